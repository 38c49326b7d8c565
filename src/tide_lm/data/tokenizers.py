"""Tokenizers: any fast one of Hugging Face, Llama 3's, or one trained on the text at hand."""

import base64
import hashlib
import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tide_lm.run import hub
from tide_lm.spec.names import suggestion

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
SMALLEST = 258  # 256 bytes and two special tokens
_LLAMA3_SPECIAL = (
    "begin_of_text end_of_text reserved_special_token_0 reserved_special_token_1 finetune_right_pad_id "
    "step_id start_header_id end_header_id eom_id eot_id python_tag image"
)
UNKNOWN = "\ufffd"  # what a decoder returns for bytes that are no character


def check(name: str) -> None:
    """Check that there is such a tokenizer, before slow packages and long texts are read."""
    folder = Path(name)
    if name == "llama3":
        _llama3_file()
    elif folder.is_dir():
        if not any(folder.glob("*token*")) and not any(folder.glob("vocab*")):
            raise ValueError(
                f"the tokenizer {name!r} cannot be loaded, since the folder has no tokenizer.json: give one "
                "that has"
            )
    else:
        hint = "give a folder with a tokenizer.json, a name on the Hugging Face Hub, or llama3"
        if folder.exists():
            raise ValueError(f"the tokenizer {name!r} cannot be loaded, since it is a file: {hint}")
        hint = suggestion(name, ["llama3"], hint)
        if not hub.may_be_name(name):
            raise ValueError(
                f"the tokenizer {name!r} cannot be loaded, since there is no such folder: {hint}"
            )
        try:
            hub.check(name, hint, ("tokenizer.json", "tokenizer_config.json", "config.json"))
        except ValueError as error:
            raise ValueError(f"the tokenizer {name!r} cannot be loaded: {error}") from error


def load(name: str) -> "PreTrainedTokenizerFast":
    """Load `llama3`, or a fast tokenizer from a folder or the Hub; code that it may bring is not run."""
    check(name)
    if name == "llama3":
        return _llama3()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"the tokenizer {name!r} cannot be loaded: give a folder, a name on the Hugging Face Hub, "
            f"or llama3 ({' '.join(str(error).split())})"
        ) from error
    if not tokenizer.is_fast:
        raise ValueError(f"the tokenizer {name!r} has no tokenizer.json: choose one that has")
    tokenizer.backend_tokenizer.no_truncation()  # some tokenizer.json would cut every document
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def train(texts: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerFast":
    """Train a byte-level BPE of at most `vocab_size` tokens, BOS and EOS first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < SMALLEST:
        raise ValueError(
            f"vocab_size is {vocab_size}: a byte-level vocabulary has at least {SMALLEST} tokens"
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return _fast(backend)


def plain_backend(tokenizer: "PreTrainedTokenizerFast") -> "Tokenizer":
    """Copy what encodes, without the truncation and padding that its last caller asked for."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    return backend


def fingerprint(tokenizer: "PreTrainedTokenizerFast") -> str:
    """Return the sha256 of its tokenizer.json."""
    return hashlib.sha256(plain_backend(tokenizer).to_str(pretty=True).encode()).hexdigest()


def token_texts(tokenizer: "PreTrainedTokenizerFast", ids: Sequence[int]) -> list[str]:
    """Return each id's text, its space included; bytes that are no whole character are named."""
    return _named(tokenizer, ids, _decoded(tokenizer, [[id] for id in ids]))


def texts_in_order(tokenizer: "PreTrainedTokenizerFast", ids: Sequence[int]) -> list[str]:
    """Return `token_texts` of a sequence: a character belongs to the id that completes it."""
    alone = _decoded(tokenizer, [[id] for id in ids])
    texts = _named(tokenizer, ids, alone)
    begun: list[int] = []
    for place, id in enumerate(ids):
        begun = [*begun, id] if UNKNOWN in alone[place] else []
        if len(begun) > 1:
            (whole,) = _decoded(tokenizer, [begun])
            if UNKNOWN not in whole:
                texts[place], begun = whole, []
    return texts


def _decoded(tokenizer: "PreTrainedTokenizerFast", sequences: Iterable[Sequence[int]]) -> list[str]:
    """Decode each sequence behind another token, since some decoders drop a space at the beginning."""
    anchor = tokenizer("a", add_special_tokens=False).input_ids[-1:]
    before = tokenizer.decode(anchor)
    anchored = [[*anchor, *ids] for ids in sequences]
    # `batch_decode` makes one text of no sequences.
    found = tokenizer.batch_decode(anchored, clean_up_tokenization_spaces=False) if anchored else []
    return [text.removeprefix(before) for text in found]


def _named(tokenizer: "PreTrainedTokenizerFast", ids: Sequence[int], texts: Sequence[str]) -> list[str]:
    """Name the bytes of tokens that are no whole character, if the vocabulary writes bytes as signs."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {sign: byte for byte, sign in bytes_to_unicode().items()}
    named = []
    for text, stored in zip(texts, tokenizer.convert_ids_to_tokens(list(ids)), strict=True):
        if stored and UNKNOWN in text:
            plain = stored.startswith("<0x") or any(sign not in byte_of for sign in stored)
            text = stored if plain else "".join(f"<0x{byte_of[sign]:02X}>" for sign in stored)
        named.append(text)
    return named


def vocab_size(tokenizer: "PreTrainedTokenizerFast") -> int:
    """Return one more than the highest id; some tokenizers leave ids out."""
    return max(tokenizer.get_vocab().values()) + 1


def _fast(backend: "Tokenizer", **special: str) -> "PreTrainedTokenizerFast":
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS, **special)


def _llama3_file() -> Path:
    """Return the file of the package llama-models, which is not imported."""
    spec = importlib.util.find_spec("llama_models")
    folders = spec.submodule_search_locations if spec else None
    file = Path(*folders[:1], "llama3", "tokenizer.model") if folders else None
    if file is None or not file.exists():
        raise ValueError(
            "the tokenizer llama3 is a file of the package llama-models, which is not installed: "
            "pip install --no-deps llama-models"
        )
    return file


def _llama3() -> "PreTrainedTokenizerFast":
    """Make Llama 3's tokenizer from its file."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    class Converter(TikTokenConverter):
        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:  # instead of the package tiktoken
            lines = Path(tiktoken_url).read_bytes().splitlines()
            return {base64.b64decode(token): int(place) for token, place in map(bytes.split, lines)}

    backend = Converter(str(_llama3_file())).converted()
    names = [*_LLAMA3_SPECIAL.split(), *(f"reserved_special_token_{i}" for i in range(2, 246))]
    backend.add_special_tokens([f"<|{name}|>" for name in names])
    return _fast(backend, pad_token="<|finetune_right_pad_id|>")
