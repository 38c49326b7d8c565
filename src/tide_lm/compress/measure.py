"""What smaller forms of the tables cost: bytes against perplexity, and against loss by frequency."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tide_lm.compress.encode import Directions, Encoder, Form
from tide_lm.evaluate.perplexity import TextSize, Windows, losses, read
from tide_lm.model.opened import OpenedModel
from tide_lm.model.stored import StoredMemory

_SHARES, _POWERS = (0.9, 0.7, 0.5, 0.3, 0.1), (0.5, 1.0)
FORMS = (
    *(Form(bits) for bits in (16, 8, 4, 3, 2)),
    *(Form(16, rank=share) for share in _SHARES),
    *(Form(16, rank=share, blocks="joint") for share in _SHARES),
    Form(16, rank=0.5, blocks="uneven"),
    *(Form(16, rank=0.5, weighted=power) for power in _POWERS),
    *(Form(16, rank=0.5, blocks="uneven", weighted=power) for power in _POWERS),
    *(Form(16, rank=0.5, blocks="joint", weighted=power) for power in _POWERS),
    *(Form(bits, rank=0.5, blocks="joint", weighted=0.5) for bits in (8, 4)),
    *(Form(bits, rank=0.75, blocks="joint", weighted=0.5) for bits in (8, 4)),
)


def measure(
    opened: OpenedModel,
    forms: Sequence[Form],
    texts: Mapping[str, Path],
    windows: Windows,
    text_field: str = "text",
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Perplexity of each text with the tables as they are, and in each form.

    `bytes` are those of a store, and `relative_bytes` those over the tables in 16 bits.
    """
    model, counts = opened.tide, opened.frequencies
    tables = model.model.tables
    assert tables is not None

    batches = {
        name: list(read(text, text_field, opened.tokenizer, opened.vocabulary, windows, TextSize()))
        for name, text in texts.items()
    }

    def by_text() -> dict[str, Any]:
        return {name: losses(model, some, counts) for name, some in batches.items()}

    tell("as trained")
    whole, records = by_text(), []
    known: dict[tuple[bool, float], Directions] = {}
    for form in forms:
        tell(str(form))
        encoder = Encoder(tables, form, "0" * 64, None if counts is None else counts.counts_V, known)
        size = encoder.header.file_bytes
        model.model.memory = held(encoder)
        try:
            records.append(
                {
                    "form": str(form),
                    **asdict(form),
                    "bytes": size,
                    "relative_bytes": size / (2 * tables.weight.numel()),
                    "texts": by_text(),
                }
            )
        finally:
            model.model.memory = tables
    return {"as_trained": whole, "forms": records}


def held(encoder: Encoder) -> StoredMemory:
    """The memory in a form, on the device of its tables."""
    memory = StoredMemory(*encoder.memory.weight.shape)
    memory.hold(encoder.header, encoder.sections, torch.cat(list(encoder.rows())))
    return memory.eval()
