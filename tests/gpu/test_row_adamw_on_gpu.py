"""The row-lazy AdamW's kernel on a GPU, against the reference on the CPU."""

import pytest
import torch

from tide_lm.ops.row_adamw import History, RowTable, catch_up, flush, step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize(
    ("dtype", "moments", "tolerance"),
    [
        (torch.float32, torch.float32, 2e-7),
        (torch.float32, torch.bfloat16, 2**-7),
        (torch.float64, torch.float64, 1e-15),
    ],
)
@pytest.mark.parametrize("shape", [(3, 7), (1, 1100), (4, 1024)])
def test_the_kernel_gives_the_results_of_the_reference(dtype, moments, tolerance, shape, monkeypatch):
    """Nearly all to the bit: only the CPU's fused operations may differ."""
    V, T = 40, 400
    results = []
    for device, kernels in (("cpu", "reference"), ("cuda", "triton")):
        monkeypatch.setenv("TIDE_LM_KERNELS", kernels)
        generator = torch.Generator().manual_seed(0)
        weight_VKD = torch.randn(V, *shape, generator=generator).to(device, dtype)
        table = RowTable.start(weight_VKD, moments)
        history = History((0.9, 0.95), eps=1e-8, weight_decay=0.1)
        for t in range(T):
            learns_V = torch.rand(V, generator=generator) < 2 / (1 + torch.arange(V)) ** 1.5
            ids_U = learns_V.nonzero()[:, 0]
            grad_UKD = torch.randn(len(ids_U), *shape, generator=generator)
            catch_up(table, ids_U.to(device), history)
            history.append(1e-3 * (1 + t % 5))
            step(table, ids_U.to(device), grad_UKD.to(device), history, torch.tensor(0.3, device=device))
        flush(table, history)
        results.append([tensor.cpu() for tensor in (*table.state, table.last_V, table.touched_V)])
    for expected, found in zip(*results, strict=True):
        assert (expected.double() - found.double()).abs().max() <= tolerance * expected.abs().max()
        assert (expected == found).double().mean() > 0.99
