"""How many updates a token's row may expect: table 1, from real counts."""

from typing import Any

import numpy as np

from tide_lm.data.frequency import BINS, GROUPS, FrequencyBins
from tide_lm.spec import estimate


def updates(bins: FrequencyBins, tokens: float, batch: int, sequence: int) -> dict[str, Any]:
    """Return expected updates and occurrences of an id of mean frequency, by decile and tier.

    `ratio_bound` bounds the gradient signal against that of the commonest decile (eq. 2.3, G = G_min).
    """
    total = int(bins.counts_V.sum())
    groups = {str(decile): [decile] for decile in range(BINS)} | {
        name: list(deciles) for name, deciles in GROUPS.items()
    }
    common = _frequency(bins, [BINS - 1], total)
    rows: dict[str, dict[str, float] | None] = {}
    for name, deciles in groups.items():
        frequency = _frequency(bins, deciles, total)
        if frequency is None or common is None:
            rows[name] = None
            continue
        expected, occurrences = estimate.expected_updates(frequency, tokens, batch, sequence)
        rows[name] = {
            "ids": int(np.isin(bins.bins_V, deciles).sum()),
            "mean_count": frequency * total,
            "frequency": frequency,
            "expected_updates": expected,
            "occurrences": occurrences,
            "ratio_bound": estimate.gradient_ratio_bound(frequency, common, batch, sequence),
        }
    return {"tokens": tokens, "batch": batch, "sequence": sequence, "counted_tokens": total, "rows": rows}


def _frequency(bins: FrequencyBins, deciles: list[int], total: int) -> float | None:
    counts = bins.counts_V[np.isin(bins.bins_V, deciles)]
    return float(counts.mean() / total) if len(counts) else None
