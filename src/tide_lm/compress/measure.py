"""Measure what smaller forms of the tables cost: bytes against perplexity and loss by frequency."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from tide_lm.compress.encode import Directions, Encoder
from tide_lm.compress.forms import FORMS
from tide_lm.evaluation.perplexity import losses, read
from tide_lm.evaluation.texts import TextSettings
from tide_lm.model.opened import OpenedModel
from tide_lm.model.stored import StoredMemory
from tide_lm.spec.form import Blocks, Form


def measure(
    opened: OpenedModel,
    settings: TextSettings | None = None,
    forms: Sequence[Form] = FORMS,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Return the perplexity of each text with the tables as they are, and in each form.

    `bytes` are those of a store, and `relative_bytes` those over the tables in 16 bits.
    """
    frequencies = opened.frequencies
    texts, windows = (settings or TextSettings()).resolve(opened)
    model, counts_V = opened.model_with_memory, None if frequencies is None else frequencies.counts_V
    tables = model.model.tables
    assert tables is not None
    batches = {
        name: list(read(text, opened.tokenizer, opened.vocabulary, windows)) for name, text in texts.items()
    }

    def by_text() -> dict[str, Any]:
        return {name: losses(model, some, frequencies) for name, some in batches.items()}

    log("as trained")
    whole, records = by_text(), []
    known: dict[Blocks, Directions] = {}
    for form in forms:
        log(str(form))
        encoder = Encoder(tables, form, "0" * 64, counts_V, known)
        size = encoder.header.file_bytes
        model.model.memory = held(encoder)
        try:
            about = {"form": str(form), **asdict(form), "bytes": size}
            about["relative_bytes"] = size / (2 * tables.weight.numel())
            records.append(about | {"texts": by_text()})
        finally:
            model.model.memory = tables
    return {"as_trained": whole, "forms": records}


def held(encoder: Encoder) -> StoredMemory:
    """Return the memory in a form, on the device of its tables."""
    memory = StoredMemory(encoder.memory.pair_rows)
    memory.hold(encoder.header, encoder.sections, torch.cat(list(encoder.rows())))
    return memory.eval()
