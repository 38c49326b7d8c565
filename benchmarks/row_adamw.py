"""Row-lazy AdamW on a table, against torch's fused AdamW on all of it.

    PYTHONPATH=src python3 benchmarks/row_adamw.py --json results/h200/row_adamw.json

Tokens follow Zipf's law, so many a step that about `--rows` differ; how many steps a row has missed since it
last learned is drawn as it would be found after `--history` steps. Without a GPU the sizes are small and the
reference is timed.

Shapes: V vocabulary, U rows of a step, K blocks, D hidden.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tide_lm.ops.kernels import use_triton
from tide_lm.ops.row_adamw import advance_reference, catch_up, step
from tide_lm.ops.row_table import History, RowTable
from tide_lm.run.provenance import write_record

BETAS, EPS, DECAY, RATE = (0.9, 0.95), 1e-8, 0.1, 1e-4


def chances(V: int, rows: int) -> torch.Tensor:
    """Return each row's chance to learn, by Zipf's law, in a step with `rows` rows on average."""
    zipf_V = 1 / torch.arange(1, V + 1, dtype=torch.float64)
    zipf_V /= zipf_V.sum()
    few, many = 1.0, 1e12
    while many / few > 1.001:
        tokens = (few * many) ** 0.5
        if float((1 - (1 - zipf_V) ** tokens).sum()) < rows:
            few = tokens
        else:
            many = tokens
    return 1 - (1 - zipf_V) ** few


def draw_rows(V: int, rows: int, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of a step, and how many steps in a row each has missed before it."""
    chance_V = chances(V, rows)
    ids_U = (torch.rand(V, dtype=torch.float64) < chance_V).nonzero()[:, 0]
    missed_U = torch.rand(len(ids_U), dtype=torch.float64).log() / torch.log1p(-chance_V[ids_U])
    return ids_U, missed_U.clamp(max=steps).int()


def milliseconds(work: Callable[[], object], prepare: Callable[[], object], rounds: int, cuda: bool) -> float:
    """Return the median time of `work`, each after a `prepare` that does not count."""
    taken = []
    for warm in range(-2, rounds):
        prepare()
        if cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            spent = begin.elapsed_time(end)
        else:
            start = time.perf_counter()
            work()
            spent = 1e3 * (time.perf_counter() - start)
        if warm >= 0:
            taken.append(spent)
    return round(statistics.median(taken), 4)


def measure(
    V: int, K: int, D: int, rows: int, steps: int, rounds: int, device: torch.device
) -> dict[str, object]:
    cuda = device.type == "cuda"
    ids_U, missed_U = (tensor.to(device) for tensor in draw_rows(V, rows, steps))
    table = RowTable.start(torch.randn(V, K, D, device=device).mul_(0.02))
    for moment in (table.exp_avg_VKD, table.exp_avg_sq_VKD):
        moment.uniform_(1e-6, 1e-4)
    history = History(BETAS, EPS, DECAY, torch.full((steps,), RATE, dtype=torch.float64))
    history.on_device(table.weight_VKD)
    grad_UKD = torch.randn(len(ids_U), K, D, device=device).mul_(1e-3)
    scale = torch.tensor(0.5, device=device)
    before = [tensor[ids_U] for tensor in table.state]

    def put_back(missed_U: torch.Tensor) -> None:
        """Put rows back as they were, so many steps behind."""
        for tensor, old in zip(table.state, before, strict=True):
            tensor[ids_U] = old
        table.last_V[ids_U] = table.touched_V[ids_U] = steps - missed_U

    caught_up = (lambda: put_back(torch.ones_like(missed_U)), rounds, cuda)
    behind = (lambda: put_back(missed_U), rounds, cuda)
    step_ms = milliseconds(lambda: step(table, ids_U, grad_UKD, history, scale), *caught_up)
    catch_up_ms = milliseconds(lambda: catch_up(table, ids_U, history), *behind)
    if use_triton(table.weight_VKD):
        put_back(missed_U)
        catch_up(table, ids_U, history)
        found = [tensor[ids_U] for tensor in table.state]
        put_back(missed_U)
        advance_reference(table, ids_U, history)
        for ours, expected in zip(found, table.state, strict=True):
            torch.testing.assert_close(ours, expected[ids_U], rtol=1e-5, atol=1e-9)
        del found
    before.clear()

    weight = torch.nn.Parameter(table.weight_VKD)
    weight.grad = torch.zeros_like(weight)
    weight.grad[ids_U] = grad_UKD
    optimizer = torch.optim.AdamW([weight], RATE, BETAS, EPS, DECAY, fused=True)
    optimizer.state[weight] = {
        "step": torch.tensor(float(steps), device=device),
        "exp_avg": table.exp_avg_VKD,
        "exp_avg_sq": table.exp_avg_sq_VKD,
    }
    dense_ms = milliseconds(optimizer.step, lambda: None, rounds, cuda)
    bytes_a_row = 7 * K * D * weight.element_size()  # weight and moments in and out, the gradient in
    return {
        "shape": {"V": V, "K": K, "D": D, "U": len(ids_U)},
        "missed steps": {
            name: int(missed_U.double().quantile(q)) for name, q in (("median", 0.5), ("99 %", 0.99))
        }
        | {"mean": round(float(missed_U.double().mean()), 1), "max": int(missed_U.max())},
        "milliseconds": {"step": step_ms, "catch-up": catch_up_ms, "dense fused AdamW": dense_ms},
        "GB/s": {
            "step": round(len(ids_U) * bytes_a_row / step_ms / 1e6, 1),
            "dense fused AdamW": round(V * bytes_a_row / dense_ms / 1e6, 1),
        },
        "dense / (step + catch-up)": round(dense_ms / (step_ms + catch_up_ms), 2),
    }


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="Times row-lazy AdamW against dense AdamW.")
    parser.add_argument("--vocab", type=int, default=128_256 if cuda else 2_000)
    parser.add_argument("--hidden", type=int, default=2048 if cuda else 64)
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 24] if cuda else [2, 4])
    parser.add_argument("--rows", type=int, default=5_000 if cuda else 100)
    parser.add_argument("--history", type=int, default=10_000 if cuda else 1_000, help="steps so far")
    parser.add_argument("--rounds", type=int, default=30 if cuda else 3)
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if cuda else "cpu")
    result = {
        "what": "median milliseconds, float32",
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "kernels": "triton" if use_triton(torch.empty(0, device=device)) else "reference",
        "rounds": args.rounds,
        "runs": [
            measure(args.vocab, K, args.hidden, args.rows, args.history, args.rounds, device)
            for K in args.blocks
        ],
    }
    print(json.dumps(result, indent=2))
    if args.json:
        write_record(args.json, result, seed=0)


if __name__ == "__main__":
    main()
