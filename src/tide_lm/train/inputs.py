"""What a run reads, checked against its settings before a model is built."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tide_lm.data import tokenizers
from tide_lm.data.frequency import FrequencyBins
from tide_lm.data.loader import count_windows
from tide_lm.data.shards import Manifest, TokenSplit
from tide_lm.run.settings import DataSection, ModelSection


@dataclass(frozen=True)
class Inputs:
    train: TokenSplit
    validation: TokenSplit
    tokenizer: PreTrainedTokenizerBase
    bins: FrequencyBins

    @property
    def manifest(self) -> Manifest:
        return self.train.manifest


def open_inputs(settings: DataSection, model: ModelSection) -> Inputs:
    """The prepared data of a run; an error names what does not fit, and the cure."""
    folder = Path(settings.path)
    train, validation = TokenSplit(folder, "train"), TokenSplit(folder, "validation")
    _check_vocabulary(train.manifest, folder, model)
    _check_tokenizer(folder / "tokenizer" / "tokenizer.json", train.manifest)
    if not len(validation):
        raise ValueError(f"{folder} holds no text out for validation: prepare it with a larger --validation")
    count_windows(validation, settings.sequence)
    if model.start:
        _check_same_tokenizer(Path(model.start), folder, train.manifest)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    return Inputs(train, validation, tokenizer, FrequencyBins.from_prepared(folder))


def _check_vocabulary(manifest: Manifest, folder: Path, model: ModelSection) -> None:
    vocabulary = model.shape().vocab_size
    if manifest.vocab_size > vocabulary:
        raise ValueError(
            f"{folder} was tokenised with {manifest.vocab_size:,} ids, and the model has "
            f"{vocabulary:,}: "
            + ("" if model.start else f"set model.vocab_size={manifest.vocab_size}, ")
            + f"choose another model than {model.name}, or prepare the data with a smaller tokenizer"
        )


def _check_same_tokenizer(start: Path, folder: Path, manifest: Manifest) -> None:
    """Check that a model goes on with the tokens that it knows, if its folder has a tokenizer."""
    if not (start / "tokenizer.json").is_file():
        return
    if tokenizers.fingerprint(tokenizers.load(str(start.absolute()))) != manifest.tokenizer_sha256:
        raise ValueError(
            f"{folder} was prepared with another tokenizer than that of {start}: prepare the text again, "
            f"with --tokenizer {start}"
        )


def _check_tokenizer(path: Path, manifest: Manifest) -> None:
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != manifest.tokenizer_sha256:
        raise ValueError(
            f"{path} is not the tokenizer of the shards beside it (sha256 {found[:12]}..., "
            f"not {manifest.tokenizer_sha256[:12]}...): put it back, or prepare the data again"
        )
