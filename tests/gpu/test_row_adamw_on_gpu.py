"""The row-lazy AdamW's kernel on a GPU, against the reference on the CPU."""

import pytest
import torch

from tide_lm.ops.row_adamw import catch_up, flush, step
from tide_lm.ops.row_table import History, RowTable

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(autouse=True)
def _by_the_device(monkeypatch):
    monkeypatch.delenv("TIDE_LM_KERNELS", raising=False)


SHAPES = [(3, 7), (1, 1100), (4, 1024)]


def trained(device, dtype, moments, shape):
    """A table after 400 steps, of which its rows learn in some."""
    V = 40
    generator = torch.Generator().manual_seed(0)
    weight_VKD = torch.randn(V, *shape, generator=generator).to(device, dtype)
    table = RowTable.start(weight_VKD, moments)
    history = History((0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for t in range(400):
        learns_V = torch.rand(V, generator=generator) < 2 / (1 + torch.arange(V)) ** 1.5
        ids_U = learns_V.nonzero()[:, 0]
        grad_UKD = torch.randn(len(ids_U), *shape, generator=generator)
        catch_up(table, ids_U.to(device), history)
        history.append(1e-3 * (1 + t % 5))
        step(table, ids_U.to(device), grad_UKD.to(device), history, torch.tensor(0.3, device=device))
    flush(table, history)
    return [tensor.cpu() for tensor in (*table.state, table.last_V, table.touched_V)]


@pytest.mark.parametrize(
    ("dtype", "moments", "tolerance"),
    [
        (torch.float32, torch.float32, 2e-7),
        (torch.float32, torch.bfloat16, 2**-7),
        (torch.float64, torch.float64, 1e-15),
    ],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_gives_the_results_of_the_reference(dtype, moments, tolerance, shape):
    """All but weights nearly always to the bit: only the CPU's fused operations may differ."""
    expected, found = (trained(device, dtype, moments, shape) for device in ("cpu", "cuda"))
    for a, b in zip(expected, found, strict=True):
        assert (a.double() - b.double()).abs().max() <= tolerance * a.abs().max()
    for a, b in zip(expected[1:], found[1:], strict=True):
        assert (a == b).double().mean() > 0.99


@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_is_as_near_to_the_exact_result_as_the_reference(shape):
    exact = trained("cpu", torch.float64, torch.float64, shape)[0]
    reference, found = (trained(device, torch.float32, torch.float32, shape)[0] for device in ("cpu", "cuda"))
    assert (found - exact).abs().max() <= 1.2 * (reference - exact).abs().max()
