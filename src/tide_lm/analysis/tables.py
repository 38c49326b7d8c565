"""The tables as directions: distances between E and the blocks (figure 9), neighbours (figure 13, table 6).

Shapes: V vocabulary, K blocks, A all tables (E and the blocks), D hidden, N tokens asked for, J nearest to
each.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from tide_lm.data import tokenizers
from tide_lm.data.frequency import COMMON, RARE
from tide_lm.model import TideConfig, TideForCausalLM
from tide_lm.model.opened import OpenedModel

CHUNK_NUMBERS = 2**19  # as many as a CPU's cache holds
GPU_CHUNK_NUMBERS = 2**26
NEIGHBOURS = 10


def directions(model: TideForCausalLM, ids_N: torch.Tensor) -> torch.Tensor:
    """Return unit rows of E and of every M_k as layers receive them, with their gain: A x N x D.

    The norm before the gain changes no direction.
    """
    memory = model.model.memory
    assert memory is not None
    blocks_NKD = memory.directions(ids_N)
    embedded_ND = model.get_input_embeddings().weight[ids_N].float()
    rows_AND = torch.cat([embedded_ND[None], blocks_NKD.transpose(0, 1)])
    norms_AN = torch.linalg.vector_norm(rows_AND, dim=-1)
    finite_A = norms_AN.isfinite().all(-1).tolist()
    if not all(finite_A):
        name = names(model.config)[finite_A.index(False)]
        raise ValueError(f"{name} has rows that are not finite: its weights are damaged")
    return rows_AND / norms_AN.clamp(min=torch.finfo(torch.float).tiny)[..., None]


def _parts(model: TideForCausalLM, ids: torch.Tensor, least: int = 1) -> tuple[torch.Tensor, ...]:
    """Split ids into parts whose rows are compared together."""
    numbers = model.config.hidden_size * (model.config.num_memory_blocks + 1)
    return ids.split(
        max((CHUNK_NUMBERS if model.device.type == "cpu" else GPU_CHUNK_NUMBERS) // numbers, least)
    )


def numbered(blocks: int) -> list[str]:
    """Return the names of the blocks that a router weighs."""
    return [f"M{block + 1}" for block in range(blocks)]


def names(config: TideConfig) -> list[str]:
    """Return the names of E and of the blocks of a token's own row, as routers number them."""
    turns = 2 if config.memory_pair_rows else 1
    return ["E", *numbered(config.num_memory_blocks)[::turns]]


@torch.no_grad()
def distances(opened: OpenedModel, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Return the mean cosine distance of every two tables, over the ids that occur (all if not known)."""
    model = opened.model_with_memory
    ids_N = known_ids(opened).to(model.device)
    tables = names(model.config)
    cosines = torch.zeros(len(tables), len(tables), dtype=torch.float64, device=model.device)
    done = 0
    for ids in _parts(model, ids_N):
        rows_AND = directions(model, ids)
        cosines += torch.einsum("and,bnd->ab", rows_AND, rows_AND).double()
        done += len(ids)
        log(f"{done:,} of {len(ids_N):,} tokens")
    return {
        "tables": tables,
        "ids": len(ids_N),
        "distance": (1 - cosines / len(ids_N)).clamp(min=0).tolist(),
    }


@torch.no_grad()
def neighbours(
    opened: OpenedModel,
    words: Sequence[str] = (),
    sample: int = 200,
    seed: int = 0,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Return the overlap of nearest neighbours in E and in each block, for rare and common ids and for words.

    A neighbour is an id that occurs in the counts.
    """
    model = opened.model_with_memory
    candidates = known_ids(opened)
    generator = np.random.default_rng(seed)
    result: dict[str, Any] = {
        "neighbours": NEIGHBOURS,
        "tables": names(model.config),
        "seed": seed,
    }
    for name, deciles in (("rare", RARE), ("common", COMMON)):
        members = np.flatnonzero(np.isin(opened.bins.bins_V, list(deciles)))
        chosen = np.sort(generator.permutation(members)[:sample])
        result[name] = _overlap(nearest(model, torch.from_numpy(chosen), candidates, log))
    result["words"] = {}
    for word in words:
        id = single_token(opened, word)
        found = nearest(model, torch.tensor([id]), candidates, log)
        result["words"][word] = neighbours_of(opened, id, found[:, 0])
    return result


def nearest(
    model: TideForCausalLM,
    ids_N: torch.Tensor,
    candidates: torch.Tensor,
    log: Callable[[str], None] = lambda line: None,
) -> torch.Tensor:
    """Return the ids nearest by cosine to each id in each table, without the id itself: A x N x J."""
    for searched, found in nearest_so_far(model, ids_N, candidates):
        log(f"{searched:,} of {len(candidates):,} tokens")
        found_ANJ = found
    return found_ANJ


def nearest_so_far(
    model: TideForCausalLM, ids_N: torch.Tensor, candidates: torch.Tensor
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield, as candidates are searched, how many were and the nearest among them."""
    candidates, ids_N = candidates.to(model.device), ids_N.to(model.device)
    asked_AND = directions(model, ids_N)
    best = torch.empty(*asked_AND.shape[:2], 0, device=model.device)
    found, searched = best.long(), 0
    for part in _parts(model, candidates, least=len(ids_N)):
        cosines = asked_AND @ directions(model, part).mT
        cosines[:, ids_N[:, None] == part] = -torch.inf
        best, places = torch.cat([best, cosines], -1).topk(
            min(NEIGHBOURS, best.shape[-1] + len(part)), dim=-1
        )
        found = torch.cat([found, part.expand_as(cosines)], -1).gather(-1, places)
        searched += len(part)
        yield searched, found[..., : searched - 1].cpu()  # without the token itself


def jaccard(a: Sequence[int], b: Sequence[int]) -> float:
    first, second = set(a), set(b)
    return len(first & second) / max(len(first | second), 1)


def _overlap(found_ANJ: torch.Tensor) -> dict[str, Any]:
    """Return Jaccard's index with E's neighbours for each id, by block."""
    base, *blocks = found_ANJ.tolist()
    return {
        "ids": len(base),
        "jaccard": [[jaccard(e, m) for e, m in zip(base, block, strict=True)] for block in blocks],
    }


def neighbours_of(opened: OpenedModel, id: int, found_AJ: torch.Tensor) -> dict[str, Any]:
    """Return one token's neighbours in E and in each block, and how much of E's each block shares."""
    base, *blocks = found_AJ.tolist()
    return {
        "id": id,
        "neighbours": [tokenizers.token_texts(opened.tokenizer, ids) for ids in (base, *blocks)],
        "jaccard": [jaccard(base, ids) for ids in blocks],
    }


def single_token(opened: OpenedModel, word: str) -> int:
    """Return the id of a word with a space before it, or without."""
    for text in (f" {word}", word):
        ids = opened.tokenizer(text, add_special_tokens=False).input_ids
        if len(ids) == 1:
            return ids[0]
    raise ValueError(f"{word!r} is not a single token of {opened.name}'s tokenizer: choose another word")


def known_ids(opened: OpenedModel) -> torch.Tensor:
    """Return the ids that occur, or all if that is not known."""
    if opened.frequencies is None:
        return torch.arange(opened.vocabulary)
    return torch.from_numpy(np.flatnonzero(opened.frequencies.counts_V))
