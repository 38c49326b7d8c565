"""What `tide-lm bench train` starts from; the command itself is tested in tests/cli."""

import pytest
import torch

from tide_lm.bench import train as benchmark
from tide_lm.bench.train import AGE, WARM_UP
from tide_lm.training.row_optimizer import RowOptimizer


def test_ids_are_missed_for_as_long_as_in_a_run():
    V, tokens = 6000, 16
    batches, last_V = benchmark.zipf_batches(V, 1, tokens), torch.zeros(V)
    for step in range(1, AGE + 1):
        inputs_BT, _ = next(batches)
        last_V[inputs_BT.flatten()] = step
    shape = benchmark.shape_of(f"tide-2e-tiny+pairs:{V}")
    found_V, of_pairs = benchmark.missed_steps(shape, tokens).split(V)
    assert found_V.min() >= 0
    assert of_pairs.float().mean() == pytest.approx(
        sum((1 - tokens / V) ** n for n in range(1, AGE + 1)), rel=0.1
    )
    for found, expected in zip(found_V.split(V // 4), (AGE - last_V).split(V // 4), strict=True):
        assert found.float().mean().item() == pytest.approx(expected.mean().item(), rel=0.1)


def test_row_lazy_tables_are_timed_in_the_middle_of_a_run(monkeypatch):
    made = []

    class Kept(RowOptimizer):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(benchmark, "RowOptimizer", Kept)
    benchmark.measure("tide-2e-tiny:3000", batch=1, sequence=16, steps=1)
    (tables,) = made
    assert tables.history.steps == AGE + WARM_UP + 1
    behind_V = tables.history.steps - tables.table.last_V
    assert len(behind_V.unique()) > 100
    assert torch.equal(tables.table.last_V, tables.table.touched_V)
