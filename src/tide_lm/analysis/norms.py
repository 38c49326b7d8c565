"""Norms of embedding rows by frequency: figure 1, for E and for each table."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tide_lm.analysis.by_bin import decile_means, group_spread
from tide_lm.data.frequency import FrequencyBins
from tide_lm.model.opened import OpenedModel
from tide_lm.run import checkpoint
from tide_lm.run.directory import RunDirectory


def norms(opened: OpenedModel, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Return mean norms by decile, the spread of rare and common rows, and the means at every checkpoint."""
    bins = opened.bins
    embedding_V = row_norms(opened.model.get_input_embeddings().weight)
    return {
        "embedding": decile_means(embedding_V, bins),
        "tables": _table_means(opened, bins),
        "spread": group_spread(embedding_V, bins),
        "growth": _growth(opened, bins, log),
    }


def row_norms(rows_VD: torch.Tensor) -> np.ndarray:
    parts = rows_VD.detach().split(4096)  # the float32 copy of all tables may not fit
    return torch.cat([torch.linalg.vector_norm(part.float(), dim=-1) for part in parts]).cpu().numpy()


def _table_means(opened: OpenedModel, bins: FrequencyBins) -> list[list[float | None]]:
    """Return the mean norms by block, as trained: before the norm, which a packed model does not have."""
    if (tables_VKD := opened.trained_rows) is None:
        return []
    norms_VK = row_norms(tables_VKD)
    return [decile_means(norms_VK[:, block], bins) for block in range(norms_VK.shape[1])]


def _growth(opened: OpenedModel, bins: FrequencyBins, log: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the norms at each checkpoint that is whole; only its embedding is loaded."""
    if opened.owner is None:
        return []
    found = []
    folder = RunDirectory(opened.owner).checkpoints
    for step in checkpoint.steps(folder):
        log(f"checkpoint of step {step}")
        path = checkpoint.at(folder, step)
        if checkpoint.find_fault(path):
            continue
        rows_VD = torch.empty(opened.vocabulary, opened.config.hidden_size)
        checkpoint.load(path, {"model.model.embed_tokens.weight": rows_VD})
        tokens = checkpoint.read_state(path)["tokens"]
        found.append({"step": step, "tokens": tokens, "embedding": decile_means(row_norms(rows_VD), bins)})
    return found
