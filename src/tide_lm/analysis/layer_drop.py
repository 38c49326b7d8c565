"""Perplexity with the memory of one layer taken out at a time: figure 11."""

from collections.abc import Callable
from typing import Any

from tide_lm.evaluation.perplexity import losses, read
from tide_lm.evaluation.texts import TextSettings
from tide_lm.model.opened import OpenedModel


def layer_drop(
    opened: OpenedModel, settings: TextSettings, log: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Return the perplexity of each text with all layers, without each one, and without any."""
    texts, windows = settings.resolve(opened)
    model = opened.model_with_memory
    layers = range(model.config.num_hidden_layers)

    def without(dropped: list[int]) -> float:
        found = losses(model, batches, drop_memory_layers=dropped)
        if found["perplexity"] is None:
            raise ValueError(
                f"the loss on {text} is {found['loss']}, without layers {dropped}: no perplexity"
            )
        return found["perplexity"]

    found = {}
    for name, text in texts.items():
        log(f"{name}, all layers")
        batches = list(read(text, opened.tokenizer, opened.vocabulary, windows))
        full = without([])
        dropped = []
        for layer in layers:
            log(f"{name}, without layer {layer}")
            dropped.append(without([layer]))
        found[name] = {
            "source": str(text),
            "full": full,
            "without_layer": dropped,
            "change": [value / full - 1 for value in dropped],
            "without_any": without(list(layers)),
        }
    return {"window": windows.size, "stride": windows.stride, "texts": found}
