"""The kernels of the memory and of the loss on a GPU, against plain torch in float64."""

import pytest
import torch

from tide_lm import ops
from tide_lm.model import Memory
from tide_lm.ops.cross_entropy import chunked_cross_entropy
from tide_lm.ops.memory_rows import normed_rows
from tide_lm.ops.row_index import RowIndex
from tide_lm.training.objective import BatchRows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def _mixed(dtype, fused, layers=4, pairs=False, B=3, T=100, V=40, K=8, D=320):
    generator = torch.Generator().manual_seed(0)
    J = K // 2 if pairs else K

    def normal(*size):
        drawn = torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).cuda()
        return drawn if fused else drawn.double()

    ids = torch.randint(V, (B, T), generator=generator)
    ids[0, :60] = 0
    numbers = [ids, V + torch.randint(V, (B, T), generator=generator)] if pairs else [ids]
    wide = torch.float32 if fused else torch.float64
    table, gain = normal(2 * V, J, D).to(wide).requires_grad_(), normal(K, D).to(wide).requires_grad_()
    routers = [(normal(D, K + 1) / 16).requires_grad_() for _ in range(layers)]
    h = start = normal(B, T, D).requires_grad_()
    if fused:
        indices = tuple(RowIndex.of(part).to(torch.device("cuda")) for part in numbers)
        own = torch.cat([index.ids_U for index in indices])
        raw = table.detach()[own].requires_grad_()
        rows, placeholders = normed_rows(raw, gain, 1e-5, indices, layers, dtype, values=True)
        memory = Memory(rows, BatchRows(raw, indices).index(), placeholders)
    else:
        normed = table * torch.rsqrt(table.square().mean(-1, keepdim=True) + 1e-5)
        parts = [normed[part] * gain[at :: len(numbers)] for at, part in enumerate(numbers)]
        memory = Memory(torch.stack(parts, 3).flatten(2, 3).flatten(0, 1))
    for layer, router in enumerate(routers):
        logits, own_memory = torch.tanh(h) @ router, memory.for_layer(layer)
        given = own_memory.placeholder
        row = ops.memory_row(h, own_memory.own_row_UD, own_memory.own_index_BT, given and given.g_value_BTD)
        h = (h + torch.sigmoid(h / 4) * row) / 2  # so that 24 layers do not blow rounding up
        h = ops.memory_mix(h, logits, memory.rows_UJD, memory.row_index, h / 2, given)
    (h * normal(B, T, D)).sum().backward()
    d_table = torch.zeros_like(table).index_add_(0, own, raw.grad) if fused else table.grad
    return [h.detach(), start.grad, d_table, gain.grad, *(router.grad for router in routers)]


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("layers", [4, 24])
@pytest.mark.parametrize("pairs", [False, True], ids=["", "pairs"])
def test_mixing_and_its_gradients(dtype, layers, pairs):
    both = zip(*(_mixed(dtype, fused, layers, pairs) for fused in (True, False)), strict=True)
    for found, exact in both:
        assert (found.double() - exact).abs().max() <= TOLERANCES[dtype] * exact.abs().max()


def test_the_gradient_of_rows_repeats_to_the_bit():
    first, again = _mixed(torch.bfloat16, fused=True), _mixed(torch.bfloat16, fused=True)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.fixture
def memory_of_nan():
    """New tensors hold NaN until they are written."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("memory_of_nan")
@pytest.mark.filterwarnings("ignore::UserWarning")  # of what is not deterministic on a GPU
@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_the_loss_and_its_gradients(dtype):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 64, generator=generator).to(dtype)
    head = torch.randn(1001, 64, generator=generator).to(dtype)
    targets = torch.randint(1001, (300,), generator=generator).cuda()

    def run(kind, chunk):
        inputs = [value.cuda().to(kind).requires_grad_() for value in (hidden, head)]
        loss = chunked_cross_entropy(*inputs, targets, 1e-3, chunk)
        return [loss.objective.detach(), loss.per_token_N, *torch.autograd.grad(loss.objective, inputs)]

    exact_inputs = [value.cuda().double().requires_grad_() for value in (hidden, head)]
    logits = exact_inputs[0] @ exact_inputs[1].T
    per_token = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    whole = per_token.mean() + 1e-3 * logits.logsumexp(-1).square().mean()
    exact = [whole.detach(), per_token.detach(), *torch.autograd.grad(whole, exact_inputs)]
    for found, wanted in zip(run(dtype, 128), exact, strict=True):
        assert (found.double() - wanted).abs().max() <= TOLERANCES[dtype] * wanted.abs().max()
