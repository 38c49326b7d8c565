"""The paper's diagnostics by name: each looks at an opened model and returns numbers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from tide_lm.spec.names import suggestion

if TYPE_CHECKING:
    from tide_lm.evaluation.texts import TextSettings
    from tide_lm.model.opened import OpenedModel


class Analysis(StrEnum):
    norms = "norms"
    updates = "updates"
    gradients = "gradients"
    collapse = "collapse"
    routing = "routing"
    layer_drop = "layer-drop"
    distances = "distances"
    neighbours = "neighbours"
    footprint = "footprint"


# What each analysis reads, by the names of options.
READS: dict[Analysis, set[str]] = {
    Analysis.norms: {"counts"},
    Analysis.updates: {"counts", "tokens", "batch", "sequence"},
    Analysis.gradients: {"counts"},
    Analysis.collapse: {"delta"},
    Analysis.routing: {"text", "text_field", "counts", "window", "batch"},
    Analysis.layer_drop: {"text", "text_field", "window", "stride", "batch"},
    Analysis.distances: {"counts"},
    Analysis.neighbours: {"counts", "token"},
    Analysis.footprint: set(),
}
OF_MEMORY = {Analysis.routing, Analysis.layer_drop, Analysis.distances, Analysis.neighbours}


def named(what: str) -> Analysis:
    """Return the analysis of this name."""
    if what not in list(Analysis):
        raise ValueError(f"unknown analysis {what!r}: {suggestion(str(what), map(str, Analysis))}")
    return Analysis(what)


@dataclass(frozen=True)
class AnalysisSettings:
    """Settings of all analyses: routing and layer-drop read `texts`, collapse `delta`, neighbours `words`.

    Updates are those of a training on so many `tokens`, in batches of `batch` sequences of `sequence` tokens.
    """

    texts: "TextSettings | None" = None
    delta: float = 0.1
    words: Sequence[str] = ()
    tokens: float = 200e9
    batch: int = 8
    sequence: int = 2048

    def __post_init__(self) -> None:
        for name, least in (("delta", 0), ("tokens", 1), ("batch", 1), ("sequence", 1)):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not least <= value < math.inf:
                raise ValueError(f"{name} is {value!r}: give a finite number of at least {least}")


def analyze(
    what: Analysis | str,
    opened: "OpenedModel",
    settings: AnalysisSettings | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Return the numbers of one analysis; `opened.write` keeps them in the results of the model's run."""
    from tide_lm.analysis import collapse, footprint, gradients, layer_drop, norms, routing, tables, updates
    from tide_lm.evaluation.texts import TextSettings

    what, settings = named(what), settings or AnalysisSettings()
    texts = settings.texts or TextSettings()
    if what in OF_MEMORY:
        opened.check_memory()
    analyses: dict[Analysis, Callable[[], dict[str, Any]]] = {
        Analysis.norms: lambda: norms.norms(opened, log),
        Analysis.updates: lambda: updates.updates(
            opened.bins, settings.tokens, settings.batch, settings.sequence
        ),
        Analysis.gradients: lambda: gradients.gradients(opened.owner or opened.run, opened.bins),
        Analysis.collapse: lambda: collapse.collapse(opened, settings.delta, log),
        Analysis.routing: lambda: routing.routing(opened, texts, log),
        Analysis.layer_drop: lambda: layer_drop.layer_drop(opened, texts, log),
        Analysis.distances: lambda: tables.distances(opened, log),
        Analysis.neighbours: lambda: tables.neighbours(opened, settings.words, log=log),
        Analysis.footprint: lambda: footprint.footprint(opened.shape),
    }
    return analyses[what]()
