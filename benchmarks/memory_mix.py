"""The memory's reference beside other ways to the same result, timed on this machine.

    OMP_NUM_THREADS=1 python benchmarks/memory_mix.py --json results/cpu/memory_mix.json

Each way runs forward and backward. The ways take turns, and in its turn a way runs twice and the second
run counts, so that neither a busy moment nor a predecessor's caches fall on one of them alone.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from tide_lm.ops.memory_mix import memory_mix_reference, router_weights
from tide_lm.run.provenance import write_record

Way = Callable[..., torch.Tensor]


def mix_by_einsum(
    residual_BTD: torch.Tensor, logits_BTS: torch.Tensor, rows_UKD: torch.Tensor
) -> torch.Tensor:
    K, D = rows_UKD.shape[1:]
    memory_BTKD = rows_UKD.view(*residual_BTD.shape[:-1], K, D)
    return residual_BTD + torch.einsum("btk,btkd->btd", router_weights(logits_BTS)[..., :K], memory_BTKD)


def mix_by_matmul(
    residual_BTD: torch.Tensor, logits_BTS: torch.Tensor, rows_UKD: torch.Tensor
) -> torch.Tensor:
    K, D = rows_UKD.shape[1:]
    memory_BTKD = rows_UKD.view(*residual_BTD.shape[:-1], K, D)
    return residual_BTD + (router_weights(logits_BTS)[..., None, :K] @ memory_BTKD).squeeze(-2)


def look_up_by_embedding(ids_U: torch.Tensor, table_VKD: torch.Tensor) -> torch.Tensor:
    """Look rows up as `EmbeddingMemory` does."""
    return nn.functional.embedding(ids_U, table_VKD.flatten(1)).unflatten(-1, table_VKD.shape[1:])


MIXES: dict[str, Way] = {
    "multiply and sum (reference)": memory_mix_reference,
    "einsum": mix_by_einsum,
    "batched 1 x K matmul": mix_by_matmul,
}
LOOKUPS: dict[str, Way] = {
    "F.embedding on the flattened table (model)": look_up_by_embedding,
    "indexing": lambda ids_U, table_VKD: table_VKD[ids_U],
    "index_select": lambda ids_U, table_VKD: table_VKD.index_select(0, ids_U),
}


def step(way: Way, inputs: list[torch.Tensor], grad: torch.Tensor) -> list[torch.Tensor]:
    """Return the output, and the gradients of the inputs that need one; `grad` is the output's."""
    output = way(*inputs)
    return [output, *torch.autograd.grad(output, [x for x in inputs if x.requires_grad], grad)]


def measure(ways: dict[str, Way], inputs: list[torch.Tensor], rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each way, after a check that all agree."""
    first = next(iter(ways.values()))
    grad = torch.randn(first(*inputs).shape)  # dense, as a model sends it down
    expected = step(first, inputs, grad)
    for way in ways.values():
        torch.testing.assert_close(step(way, inputs, grad), expected, rtol=1e-4, atol=1e-4)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            step(way, inputs, grad)
            start = time.perf_counter()
            step(way, inputs, grad)
            seconds[name].append(time.perf_counter() - start)
    return {name: round(1e3 * statistics.median(taken), 3) for name, taken in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the memory's mix and lookup against other ways.")
    for name, default in {"batch": 8, "tokens": 256, "vocab": 4096, "blocks": 4, "hidden": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()

    torch.manual_seed(0)
    B, T, V, K, D = args.batch, args.tokens, args.vocab, args.blocks, args.hidden
    shapes = {"residual": (B, T, D), "logits": (B, T, K + 1), "rows": (B * T, K, D), "table": (V, K, D)}
    leaf = {name: torch.randn(shape, requires_grad=True) for name, shape in shapes.items()}
    ids_U = torch.randint(V, (B * T,))
    result = {
        "what": "median milliseconds, forward and backward, float32",
        "shape": {"B": B, "T": T, "V": V, "K": K, "D": D},
        "threads": torch.get_num_threads(),
        "rounds": args.rounds,
        "mix": measure(MIXES, [leaf["residual"], leaf["logits"], leaf["rows"]], args.rounds),
        "lookup": measure(LOOKUPS, [ids_U, leaf["table"]], args.rounds),
    }
    print(json.dumps(result, indent=2))
    if args.json:
        write_record(args.json, result, seed=0)


if __name__ == "__main__":
    main()
