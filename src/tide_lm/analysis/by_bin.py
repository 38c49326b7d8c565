"""Means and spreads of one number per token id, by frequency decile. Shape: V vocabulary."""

from typing import Any

import numpy as np

from tide_lm.data.frequency import BINS, GROUPS, FrequencyBins


def decile_means(values_V: np.ndarray, bins: FrequencyBins) -> list[float | None]:
    """Return the mean of each decile, each id counted once; None for a decile without ids."""
    return [_mean(values_V[bins.bins_V == decile]) for decile in range(BINS)]


def group_spread(values_V: np.ndarray, bins: FrequencyBins) -> dict[str, Any]:
    """Return mean, deviation and histogram of rare, mid and common ids, on common edges."""
    kept = values_V[bins.bins_V >= 0]
    edges = np.histogram_bin_edges(kept, 40) if len(kept) else np.linspace(0, 1, 41)
    found = {}
    for name, deciles in GROUPS.items():
        values = values_V[np.isin(bins.bins_V, list(deciles))]
        found[name] = {
            "ids": len(values),
            "mean": _mean(values),
            "deviation": float(values.std()) if len(values) else None,
            "histogram": np.histogram(values, edges)[0].tolist(),
        }
    return {"edges": edges.tolist(), **found}


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None
