"""The memory's mix and the gradient of its rows on a GPU, with positions in the order of their rows or not.

    PYTHONPATH=src python3 benchmarks/memory_rows.py --json results/h200/memory_rows.json

Tokens follow Zipf's law. `bytes` is the least that must be moved, each tensor once. Shapes: N positions, V
vocabulary, U rows, K blocks, D hidden, L layers.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from tide_lm.bench.train import zipf_batches
from tide_lm.ops.row_index import RowIndex
from tide_lm.run.provenance import write_record


def milliseconds(work: Callable[[], object], rounds: int) -> float:
    """Return the median time of `work`; each time the cache is empty and the launch waits in the queue."""
    taken, flush = [], torch.empty(2**28, dtype=torch.uint8, device="cuda")
    for warm in range(-3, rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        torch.cuda._sleep(1_000_000)
        begin.record()
        work()
        end.record()
        end.synchronize()
        if warm >= 0:
            taken.append(begin.elapsed_time(end))
    return round(statistics.median(taken), 4)


def measure(N: int, V: int, K: int, D: int, L: int, rounds: int) -> dict[str, object]:
    from tide_lm.ops import memory_mix_triton as kernels

    ids_BT, _ = next(zipf_batches(V, 8, N // 8))
    index = RowIndex.of(ids_BT).to(torch.device("cuda"))
    U = len(index.ids_U)

    def normal(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(size, device="cuda").to(dtype)

    raw_UKD, gain_KD = normal(U, K, D, dtype=torch.float32), torch.ones(K, D, device="cuda")
    rows_UKD = kernels.norm(raw_UKD, gain_KD, 1e-5, torch.bfloat16)
    residual_BTD, update_BTD, d_out_BTD = (normal(*ids_BT.shape, D) for _ in range(3))
    logits_BTS = normal(*ids_BT.shape, K + 1)
    d_out_LBTD = [normal(*ids_BT.shape, D) for _ in range(L)]
    alpha_LBTK = [torch.rand(*ids_BT.shape, K, device="cuda") for _ in range(L)]
    orders = {"in order": index.order_N, "as they come": torch.arange(N, dtype=torch.int32, device="cuda")}
    taken = {}
    for name, order_N in orders.items():
        where = rows_UKD, index.index_BT, order_N
        taken[f"mix, {name}"] = milliseconds(
            lambda where=where: kernels.mix(residual_BTD, update_BTD, logits_BTS, *where), rounds
        )
        taken[f"its backward, {name}"] = milliseconds(
            lambda where=where: kernels.mix_backward(d_out_BTD, logits_BTS, *where), rounds
        )
    taken["gradient of the rows"] = milliseconds(
        lambda: kernels.rows_backward(raw_UKD, gain_KD, 1e-5, index, d_out_LBTD, alpha_LBTK), rounds
    )
    row = K * D
    return {
        "shape": {"N": N, "V": V, "U": U, "K": K, "D": D, "L": L},
        "milliseconds": taken,
        "bytes": {
            "mix": 2 * (3 * N * D + U * row),
            "its backward": 2 * (N * D + U * row),
            "gradient of the rows": 2 * L * N * D + 8 * U * row,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the memory's kernels.")
    parser.add_argument("--positions", type=int, default=16_384)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 24])
    parser.add_argument("--hidden", type=int, default=2_048)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/memory_rows.py needs a CUDA GPU, and torch sees none")

    torch.manual_seed(0)
    shape = args.positions, args.vocabulary
    measured = [measure(*shape, K, args.hidden, args.layers, args.rounds) for K in args.blocks]
    result = {
        "what": "median milliseconds, bfloat16",
        "device": torch.cuda.get_device_name(),
        "runs": measured,
    }
    print(json.dumps(result, indent=2))
    if args.json:
        write_record(args.json, result, seed=0)


if __name__ == "__main__":
    main()
