"""All figures, by the question that they answer."""

from typing import NamedTuple

from tide_lm.report.figure import Figure
from tide_lm.report.figures import (
    benchmarks,
    collapse,
    compression,
    loss,
    memory,
    neighbours,
    tokens,
    training,
)


class Question(NamedTuple):
    """What a reader asks. Of its figures the first is seen at once, and others when they are opened."""

    name: str
    title: str
    figures: tuple[Figure, ...] = ()


QUESTIONS = (
    Question("trained", "What was trained?"),
    Question("helped", "Did it help?", (training.TRAINING_LOSS, training.PERPLEXITY, benchmarks.BENCHMARKS)),
    Question("whom", "Which tokens does it help?", (loss.LOSS_BY_DECILE, loss.LOSS_BY_BLOCKS)),
    Question("cost", "What does it cost?", (memory.FOOTPRINT, compression.BITS, compression.RANKS)),
    Question(
        "memory",
        "How is the memory used?",
        (memory.ROUTING, memory.LAYER_DROP, memory.DISTANCES, neighbours.NEIGHBOURS),
    ),
    Question(
        "paper",
        "What else does the paper show?",
        (collapse.SEPARATION, collapse.COLLAPSE, tokens.NORMS, tokens.GRADIENTS, tokens.UPDATES),
    ),
    Question("again", "How do I get these numbers again?"),
)
FIGURES: dict[str, Figure] = {figure.name: figure for asked in QUESTIONS for figure in asked.figures}
