"""Perplexity of a text in strided windows.

A byte-level tokenizer reads a text line by line, so a long text costs no more memory than a short one. A
tokenizer that marks the beginning of a text reads each document whole.

A document is its tokens after BOS, or after EOS if the tokenizer has no BOS. Windows of W tokens start every
S tokens, and each predicts the tokens that no window before has predicted: every token once, from at least
W - S tokens before it, except at the beginning of a document. Shapes: B windows per batch, T tokens per
window, N predicted tokens.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from tide_lm.data import sources, tokenizers
from tide_lm.data.encoding import Encoder
from tide_lm.data.frequency import FrequencyBins, LossByBin
from tide_lm.data.shards import MANIFEST, TokenSplit
from tide_lm.ops.cross_entropy import chunked_cross_entropy

HELD_OUT_PIECE = 2**16  # tokens


@dataclass(frozen=True)
class Windows:
    """How a text is read: windows of `size` tokens, one every `stride`, `batch` of them at once.

    Records hold their text in `text_field`.
    """

    size: int
    stride: int
    batch: int = 8
    text_field: str = "text"

    def __post_init__(self) -> None:
        if not 1 <= self.stride <= self.size:
            raise ValueError(
                f"the stride is {self.stride} and the window {self.size}: the stride is at least 1, and no "
                "longer than the window"
            )


class Window(NamedTuple):
    """T + 1 tokens; those from place `first` on are predicted."""

    ids: np.ndarray
    first: int


@dataclass
class TextSize:
    words: int = 0
    bytes: int = 0


def cut(pieces: Iterable[np.ndarray], windows: Windows) -> Iterator[Window]:
    """Yield the windows of one document, whose tokens come in pieces."""
    held, first = np.empty(0, np.int64), 1
    for piece in pieces:
        held = np.concatenate([held, piece])
        while len(held) > windows.size + 1:
            yield Window(held[: windows.size + 1], first)
            held, first = held[windows.stride :], windows.size - windows.stride + 1
    if len(held) > first:
        yield Window(held, first)


def document_tokens(
    source: str, text_field: str, tokenizer: PreTrainedTokenizerBase, size: TextSize
) -> Iterator[Iterator[np.ndarray]]:
    """Yield the tokens of each document, in pieces, and count the text's size on the way.

    Prepared data give their validation split, as one document whose words are not known.
    """
    if (Path(source) / MANIFEST).exists():
        yield _held_out(Path(source), tokenizer)
        return
    encoder = document_encoder(tokenizer)

    def tokens(parts: Iterator[str]) -> Iterator[np.ndarray]:
        for piece in encoder.pieces(parts):
            size.words += len(piece.text.split())
            size.bytes += len(piece.text.encode())
            yield encoder.tokens(piece, encoder([piece.text])[0])

    for parts in sources.streams(source, text_field):
        yield tokens(parts)


def document_encoder(tokenizer: PreTrainedTokenizerBase) -> Encoder:
    """Return what encodes a document, with BOS or EOS before its first token."""
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return Encoder(tokenizers.plain_backend(tokenizer).to_str(), "int64", first)


def _held_out(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[np.ndarray]:
    split = TokenSplit(folder, "validation")
    if tokenizers.fingerprint(tokenizer) != split.manifest.tokenizer_sha256:
        raise ValueError(
            f"{folder} was prepared with another tokenizer than the model's: prepare it with the model's"
        )
    for start in range(0, len(split), HELD_OUT_PIECE):
        yield split.read(start, min(HELD_OUT_PIECE, len(split) - start)).astype(np.int64)


def token_losses(
    model: PreTrainedModel, inputs_BT: torch.Tensor, targets_BT: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Return the loss of each target, B x T, for any causal model."""
    if isinstance(model, LlamaForCausalLM):  # whose logits need not all exist at once
        hidden_BTD = model.model(inputs_BT, use_cache=False, **options).last_hidden_state
        losses_N = chunked_cross_entropy(
            hidden_BTD.flatten(0, 1), model.lm_head.weight, targets_BT.flatten()
        ).per_token_N
    else:
        logits_BTV = model(inputs_BT, use_cache=False, **options).logits
        losses_N = torch.cat(  # one sequence at a time: float32 takes twice the memory of bfloat16
            [
                torch.nn.functional.cross_entropy(logits_TV.float(), targets_T, reduction="none")
                for logits_TV, targets_T in zip(logits_BTV, targets_BT, strict=True)
            ]
        )
    return losses_N.view_as(targets_BT)


def batched(windows: Iterable[Window], size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield ids, padded on the right where no predicted token sees it, and which places are predicted."""
    source = iter(windows)
    while group := list(islice(source, size)):
        longest = max(len(window.ids) for window in group)
        ids = np.zeros((len(group), longest), np.int64)
        predicted = np.zeros((len(group), longest), bool)
        for row, window in enumerate(group):
            ids[row, : len(window.ids)] = window.ids
            predicted[row, window.first : len(window.ids)] = True
        yield torch.from_numpy(ids), torch.from_numpy(predicted)


def read(
    text: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: int,
    windows: Windows,
    size: TextSize | None = None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the batches of a text; it must fill a window, and its ids must fit the model."""
    documents = document_tokens(str(text), windows.text_field, tokenizer, size or TextSize())
    tokens = 0
    for ids, predicted in batched(
        (window for document in documents for window in cut(document, windows)), windows.batch
    ):
        check_ids(ids, vocabulary)
        tokens += int(predicted.sum())
        yield ids, predicted
    if tokens < windows.size:
        raise ValueError(
            f"{text} has {tokens:,} tokens to predict, fewer than one window of {windows.size:,}: "
            "give more text, or a shorter --window"
        )


def check_ids(ids: torch.Tensor, vocabulary: int) -> None:
    if ids.max() >= vocabulary:
        raise ValueError(
            f"the tokenizer gives the id {ids.max()}, and the model has {vocabulary:,} ids: put the "
            "model's own tokenizer into its folder"
        )


@torch.no_grad()
def losses(
    model: PreTrainedModel,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    bins: FrequencyBins | None = None,
    log: Callable[[str], None] = lambda line: None,
    **options: Any,
) -> dict[str, Any]:
    """Return the perplexity and mean loss of batches, and the loss by decile if bins are given.

    `options` go to the model's forward.
    """
    found = LossByBin(bins or FrequencyBins.none(model.get_input_embeddings().num_embeddings))
    tokens = 0
    for ids, predicted in batches:
        ids, predicted = ids.to(model.device), predicted[:, 1:].to(model.device)
        found.add(token_losses(model, ids[:, :-1], ids[:, 1:], **options)[predicted], ids[:, 1:][predicted])
        tokens += int(predicted.sum())
        log(f"{tokens:,} tokens")
    result = found.result()
    if not math.isfinite(result["loss"] * tokens):
        raise ValueError(f"the loss is {result['loss']}: the model's weights are damaged")
    if bins is None:
        result = {"loss": result["loss"], "tokens": tokens}
    return {"perplexity": _exp(result["loss"]), **result}


def perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Path,
    windows: Windows,
    bins: FrequencyBins | None = None,
    log: Callable[[str], None] = lambda line: None,
    **options: Any,
) -> dict[str, Any]:
    """Return loss and perplexity per token and per word, bits per byte, and the loss by decile with bins.

    `options` go to the model's forward.
    """
    size = TextSize()
    vocabulary = model.get_input_embeddings().num_embeddings
    seen = hashlib.sha256()

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for ids, predicted in read(text, tokenizer, vocabulary, windows, size):
            seen.update(ids[predicted].numpy().tobytes())
            yield ids, predicted

    result = losses(model, batches(), bins, log, **options)
    nats = result["loss"] * result["tokens"]
    return {
        "source": str(text),
        "sha256": seen.hexdigest(),  # of the predicted ids
        "perplexity": result.pop("perplexity"),
        "word_perplexity": _exp(nats / size.words) if size.words else None,
        "bits_per_byte": nats / math.log(2) / size.bytes if size.bytes else None,
        "words": size.words,
        "bytes": size.bytes,
        "window": windows.size,
        "stride": windows.stride,
        **result,
    }


def _exp(value: float) -> float | None:
    """Return e to this power, or None where that is larger than any float."""
    try:
        return math.exp(value)
    except OverflowError:
        return None
