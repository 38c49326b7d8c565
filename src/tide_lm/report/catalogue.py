"""All figures, in the order of the paper."""

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

FIGURES: dict[str, Figure] = {
    figure.name: figure
    for figure in (
        tokens.NORMS,
        tokens.UPDATES,
        collapse.COLLAPSE,
        memory.FOOTPRINT,
        tokens.GRADIENTS,
        loss.LOSS_BY_DECILE,
        collapse.SEPARATION,
        benchmarks.BENCHMARKS,
        loss.LOSS_BY_BLOCKS,
        training.PERPLEXITY,
        memory.DISTANCES,
        memory.ROUTING,
        memory.LAYER_DROP,
        compression.BITS,
        compression.RANKS,
        neighbours.NEIGHBOURS,
        training.TRAINING_LOSS,
    )
}
