"""`ops.row_adamw` against torch's dense AdamW, and its Triton twin against the reference.

Shapes: V vocabulary, U rows of a step, K blocks, D hidden, T steps.
"""

import os
import subprocess
import sys
from dataclasses import fields
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from tide_lm.ops.row_adamw import catch_up, flush, step
from tide_lm.ops.row_table import History, RowTable

BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.1
T, K, D = 300, 2, 7
GRAD_SCALES = (1.0, 1e-3, 1e-6, 1e-8)
GAPS = (1, 2, 17, 100, 255, 261, 262, 280)
COMMON = 24  # rows drawn as in Zipf's law; after them come rows with a gap each, and rows never touched


class Batch(NamedTuple):
    rate: float
    ids_U: torch.Tensor
    grad_UKD: torch.Tensor
    scale: torch.Tensor


def make_history(**changes) -> History:
    return History(**{"betas": BETAS, "eps": EPS, "weight_decay": DECAY, **changes})


def make_run() -> tuple[torch.Tensor, list[Batch]]:
    """A table, and batches of which each row after the common ones learns twice, a gap apart, or once."""
    generator = torch.Generator().manual_seed(0)
    pairs = list(product([*GAPS, T], GRAD_SCALES))
    V = COMMON + len(pairs) + 2
    row_scale_V = torch.ones(V)
    row_scale_V[:COMMON] = torch.tensor(GRAD_SCALES).repeat(COMMON // len(GRAD_SCALES))
    row_scale_V[COMMON:-2] = torch.tensor([scale for _, scale in pairs])
    first_V = torch.randint(3, 20, (V,), generator=generator)
    again_V = first_V.clone()
    again_V[COMMON:-2] += torch.tensor([gap for gap, _ in pairs])
    zipf_V = torch.zeros(V)
    zipf_V[:COMMON] = 1 / torch.arange(1, COMMON + 1)

    batches = []
    for t in range(1, T + 1):
        learns_V = torch.rand(V, generator=generator) < zipf_V
        learns_V[COMMON:-2] |= ((first_V == t) | (again_V == t))[COMMON:-2]
        ids_U = learns_V.nonzero()[:, 0]
        ids_U = ids_U[torch.randperm(len(ids_U), generator=generator)]
        grad_UKD = torch.randn(len(ids_U), K, D, generator=generator) * row_scale_V[ids_U, None, None]
        warm, done = min(t / 20, 1), torch.tensor(max(t - 20, 0) / (T - 20))
        rate = 1e-5 + 9e-5 * warm * float(1 + torch.cos(torch.pi * done)) / 2
        batches.append(Batch(rate, ids_U, grad_UKD, torch.rand((), generator=generator)))
    return torch.randn(V, K, D, generator=generator), batches


def dense(weight_VKD: torch.Tensor, batches: list[Batch], dtype: torch.dtype) -> list[torch.Tensor]:
    weight = weight_VKD.to(dtype, copy=True).requires_grad_()
    optimizer = torch.optim.AdamW([weight], betas=BETAS, eps=EPS, weight_decay=DECAY, foreach=False)
    for rate, ids_U, grad_UKD, scale in batches:
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = torch.zeros_like(weight)
        weight.grad[ids_U] = grad_UKD.to(dtype) * scale.to(dtype)
        optimizer.step()
    state = optimizer.state[weight]
    return [weight.detach(), state["exp_avg"], state["exp_avg_sq"]]


def lazy(table: RowTable, batches: list[Batch], history: History, flush_at: tuple[int, ...] = ()) -> None:
    for rate, ids_U, grad_UKD, scale in batches:
        catch_up(table, ids_U, history)
        history.append(rate)
        step(table, ids_U, grad_UKD, history, scale)
        if history.steps in flush_at:
            flush(table, history)


def tensors(table: RowTable) -> dict[str, torch.Tensor]:
    return {field.name: getattr(table, field.name) for field in fields(table)}


def clone(table: RowTable) -> RowTable:
    return RowTable(**{name: tensor.clone() for name, tensor in tensors(table).items()})


def row_errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Each row's largest difference, by its largest element."""
    difference_V = (found.double() - expected.double()).flatten(1).abs().amax(1)
    largest_V = expected.double().flatten(1).abs().amax(1)
    assert not difference_V[largest_V == 0].any()
    return difference_V / largest_V.clamp(min=torch.finfo(torch.float64).tiny)


def resumed_run(dtype: torch.dtype) -> tuple[RowTable, list[torch.Tensor], list[torch.Tensor]]:
    """A lazy run saved and resumed on the way, the dense run of its type, and the dense run in float64."""
    weight_VKD, batches = make_run()
    table, history = RowTable.start(weight_VKD.to(dtype, copy=True)), make_history()
    lazy(table, batches[:150], history)
    assert (table.last_V < history.steps).any()
    saved = load(save({**tensors(table), "rates": history.rates}))
    history = make_history(rates=saved.pop("rates"))
    table = RowTable(**saved)
    lazy(table, batches[150:], history)
    flush(table, history)
    assert (table.last_V == T).all()
    return table, dense(weight_VKD, batches, dtype), dense(weight_VKD, batches, torch.float64)


def test_in_float64_the_result_is_that_of_dense_adamw():
    table, expected, _ = resumed_run(torch.float64)
    for ours, theirs in zip(table.state, expected, strict=True):
        assert row_errors(ours, theirs).max() < 1e-12


def test_in_float32_the_result_is_that_of_dense_adamw_and_as_exact():
    table, expected, exact = resumed_run(torch.float32)
    for ours, theirs, truth in zip(table.state, expected, exact, strict=True):
        assert row_errors(ours, theirs).max() < 1e-6
        our_errors, their_errors = row_errors(ours, truth), row_errors(theirs, truth)
        assert our_errors.max() <= 1.2 * their_errors.max()
        assert our_errors.square().mean() <= 1.2**2 * their_errors.square().mean()


def test_moments_in_bfloat16_are_half_the_bytes_and_stay_near():
    """Four roundings of 2^-8 near, as old ones fade with the moments; with bits cut off it would be 13."""
    weight_VKD, batches = make_run()
    tables = [RowTable.start(weight_VKD.clone(), moments) for moments in (torch.bfloat16, None)]
    for table in tables:
        history = make_history()
        lazy(table, batches, history)
        flush(table, history)
    (weight, *moments), (exact_weight, *exact_moments) = (table.state for table in tables)
    assert 0 < row_errors(weight - weight_VKD, exact_weight - weight_VKD).max() < 0.01
    for ours, exact in zip(moments, exact_moments, strict=True):
        assert ours.nbytes == exact.nbytes / 2
        assert 0 < row_errors(ours, exact).max() < 4 * 2**-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_rows_are_brought_up_to_date_makes_no_difference_to_a_bit(dtype):
    weight_VKD, batches = make_run()
    empty = Batch(3e-4, torch.empty(0, dtype=torch.long), torch.empty(0, K, D), torch.tensor(1.0))
    batches = batches[:60] + [empty] * 640 + batches[60:]
    plain, flushed = (RowTable.start(weight_VKD.to(dtype, copy=True)) for _ in range(2))
    plain_history, flushed_history = make_history(), make_history()
    lazy(plain, batches, plain_history)
    lazy(flushed, batches, flushed_history, flush_at=(1, 5, 59, 260, 261, 262, 263, 320, 400, 699, 701, 720))
    for table, history in ((plain, plain_history), (flushed, flushed_history)):
        flush(table, history)
    for name, tensor in tensors(plain).items():
        assert torch.equal(tensor, getattr(flushed, name)), name


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.95, 0.95), (0.99, 0.95), (0.0, 0.95), (0.0, 0.0)])
def test_momentum_is_followed_for_as_long_as_it_moves_the_row(betas):
    rate, later = 1e-3, 600
    grad_UKD = torch.randn(1, K, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight = torch.zeros_like(grad_UKD).requires_grad_()
    optimizer = torch.optim.AdamW([weight], rate, betas, EPS, DECAY, foreach=False)
    table, history, ids_U = RowTable.start(weight.clone()), make_history(betas=betas), torch.tensor([0])
    history.append(rate)
    step(table, ids_U, grad_UKD, history)
    for t in range(later):
        weight.grad = grad_UKD if t == 0 else torch.zeros_like(grad_UKD)
        optimizer.step()
    for _ in range(later - 1):
        history.append(rate)
    catch_up(table, ids_U, history)
    assert row_errors(table.weight_VKD, weight.detach()).max() < 1e-7


def test_a_decay_of_more_than_all_is_followed_too():
    history, table = make_history(weight_decay=1.0), RowTable.start(torch.ones(2, K, D))
    for rate in (0.5, 1.0, 1.5, 0.5):
        history.append(rate)
        catch_up(table, torch.tensor([0]), history)
    flush(table, history)
    assert torch.equal(table.weight_VKD, torch.zeros(2, K, D))


def test_rows_not_named_are_neither_read_nor_written():
    weight_VKD, batches = make_run()
    rate, ids_U, grad_UKD, scale = batches[10]
    table, history = RowTable.start(weight_VKD), make_history()
    untouched_V = torch.ones(len(weight_VKD), dtype=torch.bool).index_fill_(0, ids_U, False)
    for tensor in table.state:
        tensor[untouched_V] = torch.nan
    before = clone(table)
    for _ in range(3):
        history.append(rate)
        catch_up(table, ids_U, history)
    history.append(rate)
    step(table, ids_U, grad_UKD, history, scale)
    for name, tensor in tensors(table).items():
        old = getattr(before, name)
        assert torch.equal(tensor[untouched_V].nan_to_num(7), old[untouched_V].nan_to_num(7)), name
        assert tensor[ids_U].isfinite().all(), name
        assert not torch.equal(tensor[ids_U], old[ids_U]), name


def test_a_step_catches_up_first_and_is_taken_once():
    weight_VKD, batches = make_run()
    rate, ids_U, grad_UKD, scale = batches[10]
    history, table = make_history(), RowTable.start(weight_VKD)
    history.append(rate)
    step(table, ids_U, grad_UKD, history)
    for _ in range(3):
        history.append(rate)
    caught = clone(table)
    catch_up(caught, ids_U, history)
    history.append(rate)
    for each in (table, caught, caught):
        step(each, ids_U, grad_UKD, history, scale)
    for name, tensor in tensors(table).items():
        assert torch.equal(tensor, getattr(caught, name)), name


def test_scalars_on_the_device_are_those_of_the_host_and_old_ones_are_not_copied_again():
    history = make_history()
    like = torch.empty(0, dtype=torch.float64)
    for t in range(1, 2100):
        history.append(1e-4 * t)
        if t % 7 == 0:
            assert history.on_device(like)[t - 1].tolist() == list(history.scalars(t))
    kept = history.on_device(like)
    assert kept[:2099].tolist() == [list(history.scalars(t)) for t in range(1, 2100)]
    kept[0] = 7
    history.append(1e-4)
    assert history.on_device(like)[0, 0] == 7
    assert history.on_device(like.float())[0].tolist() == pytest.approx(list(history.scalars(1)))


def test_an_eps_of_zero_is_refused():
    with pytest.raises(ValueError, match="eps is 0"):
        make_history(eps=0)


@pytest.mark.kernels
def test_the_triton_twin_gives_the_bits_of_the_reference():
    """Interpreted, all roots and quotients are exact; tests/gpu has those of a GPU."""
    pytest.importorskip("triton", "3.9", reason="triton 3.9 is the first whose interpreter rounds fma once")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["agreed"] * 18


def compare_twins() -> None:
    """Print a line for each case in which Triton, interpreted, and the reference agree.

    Roots are numpy's: those of MKL, which torch has on some processors, may be off by the last bit.
    """
    torch.Tensor.sqrt = lambda tensor: torch.from_numpy(np.sqrt(tensor.numpy()))
    from tide_lm.ops.row_adamw import advance_reference
    from tide_lm.ops.row_adamw_triton import advance_triton

    gaps, quiet = torch.tensor([0, 1, 2, 300, 40, 3]), torch.tensor([0, 0, 259, 0, 240, 300])
    history = make_history()
    for t in range(1, 341):
        history.append(1e-3 * (1 + t % 5))
    last_V = (history.steps - gaps).int()
    cases = [((3, 7), [3]), ((3, 7), [4, 0, 2, 3, 5]), ((1, 1100), [1, 2])]
    types = [(torch.float32,) * 2, (torch.float64,) * 2, (torch.float32, torch.bfloat16)]
    for (dtype, moments), (shape, ids), learns in product(types, cases, (False, True)):
        generator = torch.Generator().manual_seed(0)
        V, U = len(gaps), len(ids)

        def normal(*size: int, dtype=dtype, generator=generator) -> torch.Tensor:
            return torch.randn(size, generator=generator, dtype=dtype)

        state = normal(V, *shape), normal(V, *shape).to(moments), normal(V, *shape).square().to(moments)
        table = RowTable(*state, last_V.clone(), last_V - quiet)
        twin, ids_U = clone(table), torch.tensor(ids)
        given = (normal(U, *shape, dtype=torch.float32), torch.tensor(0.3)) if learns else ()
        advance_reference(table, ids_U, history, *given)
        advance_triton(twin, ids_U, history, *given)
        for name, tensor in tensors(table).items():
            other = getattr(twin, name)
            if tensor.dtype == torch.bfloat16:  # the interpreter cuts bits off where torch and a GPU round
                agreed = (tensor.view(torch.int16) - other.view(torch.int16)).abs().max() <= 1
            else:
                agreed = torch.equal(tensor, other)
            assert agreed, (name, dtype, moments, shape, ids, learns)
        print("agreed")


@pytest.mark.parametrize("choice", ["reference", "triton"])
def test_no_rows_are_no_work(choice, monkeypatch):
    monkeypatch.setenv("TIDE_LM_KERNELS", choice)
    table, history = RowTable.start(torch.ones(3, K, D)), make_history()
    history.append(1e-3)
    none_U = torch.empty(0, dtype=torch.long)
    catch_up(table, none_U, history)
    step(table, none_U, torch.empty(0, K, D), history)
    assert torch.equal(table.weight_VKD, torch.ones(3, K, D))


if __name__ == "__main__":
    compare_twins()
