"""The squared gradient that each token's rows collected, as the trainer recorded it (Proposition 3.2)."""

from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from tide_lm.analysis.by_bin import decile_means
from tide_lm.data.frequency import FrequencyBins
from tide_lm.model.opened import LacksError


def gradients(run: Path, bins: FrequencyBins) -> dict[str, Any]:
    """Return means by decile of E's input part, E's head part and each table, and the amplification.

    `amplification` is the sum over tables divided by the input part of E: it is K if each table's gradient is
    as large as E's.
    """
    path = run / "results" / "gradients.safetensors"
    if not path.exists():
        raise LacksError(f"{run} recorded no gradients: train with --set train.record_gradients=true")
    try:
        used = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): restore it, or train again") from error
    found: dict[str, Any] = {
        name: decile_means(used[name], bins) for name in ("embedding_input", "embedding_head")
    }
    if "tables" not in used:
        return found
    tables_VK = used["tables"]
    found["tables"] = [decile_means(tables_VK[:, block], bins) for block in range(tables_VK.shape[1])]
    together = decile_means(tables_VK.sum(-1), bins)
    found["amplification"] = [
        _ratio(tables, e) for tables, e in zip(together, found["embedding_input"], strict=True)
    ]
    return found


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else float(np.divide(above, below))
