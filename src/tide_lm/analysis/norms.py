"""Norms of embedding rows by frequency: figure 1, for E and for each table."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tide_lm.analysis.by_bin import decile_means, group_spread
from tide_lm.data.frequency import FrequencyBins
from tide_lm.evaluate.subject import Subject
from tide_lm.model import EmbeddingMemory, TideForCausalLM
from tide_lm.run import checkpoint
from tide_lm.run.directory import RunDirectory


def norms(subject: Subject, tell: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Mean norm by decile, the spread of rare and common rows, and the same means at every checkpoint."""
    bins = subject.bins
    embedding_V = row_norms(subject.model.get_input_embeddings().weight)
    return {
        "embedding": decile_means(embedding_V, bins),
        "tables": _table_means(subject, bins),
        "spread": group_spread(embedding_V, bins),
        "growth": _growth(subject, bins, tell),
    }


def row_norms(rows_VD: torch.Tensor) -> np.ndarray:
    parts = rows_VD.detach().split(4096)  # the float32 copy of all tables may not fit
    return torch.cat([torch.linalg.vector_norm(part.float(), dim=-1) for part in parts]).cpu().numpy()


def _table_means(subject: Subject, bins: FrequencyBins) -> list[list[float | None]]:
    """Return the mean norms by block, as trained: before the norm, which a packed model does not have."""
    memory = subject.model.model.memory if isinstance(subject.model, TideForCausalLM) else None
    if not isinstance(memory, EmbeddingMemory):
        return []
    norms_VK = row_norms(memory.weight)
    return [decile_means(norms_VK[:, block], bins) for block in range(norms_VK.shape[1])]


def _growth(subject: Subject, bins: FrequencyBins, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the norms at each checkpoint that is whole; only its embedding is loaded."""
    if subject.owner is None:
        return []
    found = []
    folder = RunDirectory(subject.owner).checkpoints
    for step in checkpoint.steps(folder):
        tell(f"checkpoint of step {step}")
        path = checkpoint.at(folder, step)
        if checkpoint.find_fault(path):
            continue
        rows_VD = torch.empty(subject.vocabulary, subject.config.hidden_size)
        state = checkpoint.load(path, {"model.model.embed_tokens.weight": rows_VD})
        found.append(
            {"step": step, "tokens": state["tokens"], "embedding": decile_means(row_norms(rows_VD), bins)}
        )
    return found
