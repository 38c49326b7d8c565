"""Every kernel compiles for Hopper, with the types and constants of its launches; no GPU is needed.

Shapes: B batch, T tokens, U rows, S slots, V vocabulary, K blocks, D hidden.
"""

import pytest
import torch

from tide_lm.ops.row_index import RowIndex
from tide_lm.ops.row_table import History, RowTable

triton = pytest.importorskip("triton", reason="triton is not installed")
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset"),
]


@pytest.fixture
def compiled(monkeypatch):
    """What launches are compiled to, by the kernel's name, and not run."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import mangle_type

    found = {}

    def compile(kernel, *values, grid, warmup, **options):
        constants, signature = {}, {}
        for parameter, value in zip(kernel.params, values, strict=True):
            if parameter.is_constexpr or value is None:
                constants[parameter.name] = value
            signature[parameter.name] = "constexpr" if parameter.name in constants else mangle_type(value)
        source = triton.compiler.ASTSource(kernel, signature, constants)
        found[kernel.__name__] = triton.compile(source, GPUTarget("cuda", 90, 32), options).asm

    monkeypatch.setattr(triton.JITFunction, "run", compile)
    return found


def assert_all_came_out(module, compiled) -> None:
    assert compiled.keys() == {name for name in vars(module) if name.endswith("_kernel")}
    assert all(asm["cubin"] for asm in compiled.values())


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize(
    ("dtype", "moments"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.float64, torch.float64)],
)
def test_the_optimiser_compiles_and_its_steps_with_gradients_are_exact(dtype, moments, learns, compiled):
    from tide_lm.ops import row_adamw_triton

    table = RowTable.start(torch.zeros(2, 2, 1024, dtype=dtype), moments)
    history = History((0.9, 0.95), eps=1e-8, weight_decay=0.1)
    history.append(1e-3)
    given = (torch.zeros(1, 2, 1024), torch.tensor(0.3)) if learns else ()
    row_adamw_triton.advance_triton(table, torch.tensor([1]), history, *given)
    assert_all_came_out(row_adamw_triton, compiled)
    ptx, width = compiled["advance_kernel"]["ptx"], 8 * dtype.itemsize
    exact = learns or dtype == torch.float64
    assert (f"sqrt.rn.f{width}" in ptx) == exact
    assert (f"div.rn.f{width}" in ptx) == exact
    assert ("cvt.rn.bf16" in ptx) == (moments == torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("K", "L"), [(1, 1), (8, 24), (24, 16), (24, 24), (64, 24)])
@pytest.mark.parametrize("D", [2048, 1001])
def test_the_memory_compiles_with_tensor_cores_for_16_bits(D, K, L, dtype, compiled):
    from tide_lm.ops import memory_mix_triton as kernels

    index = RowIndex.of(torch.tensor([[3, 1, 3]]))
    raw_UKD, gain_KD = torch.zeros(2, K, D), torch.zeros(K, D)
    residual_BTD, logits_BTS = torch.zeros(1, 3, D, dtype=dtype), torch.zeros(1, 3, K + 1, dtype=dtype)
    rows_UKD, d_raw_UKD = torch.empty(2, K, D, dtype=dtype), torch.empty(2, K, D)
    kernels.norm(raw_UKD, gain_KD, 1e-5, rows_UKD)
    kernels.mix(residual_BTD, None, logits_BTS, rows_UKD[index.index_BT[0]], None, None)
    out_BTD = kernels.mix(residual_BTD, residual_BTD, logits_BTS, rows_UKD, index.index_BT, index.order_N)
    _, alpha_BTK = kernels.mix_backward(out_BTD, logits_BTS, rows_UKD, index.index_BT, index.order_N)
    kernels.rows_backward(raw_UKD, gain_KD, 1e-5, index, [out_BTD] * L, [alpha_BTK] * L, d_raw_UKD)
    assert_all_came_out(kernels, compiled)
    assert ("mma" in compiled["_pieces_kernel"]["ptx"]) == (dtype == torch.bfloat16)
    assert not [name for name, asm in compiled.items() if "STL" in asm["sass"]]  # all sums are in registers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("V", [8192, 1001])
@pytest.mark.parametrize("learning", [False, True])
def test_the_loss_compiles(learning, V, dtype, compiled):
    from tide_lm.ops import cross_entropy_triton

    cross_entropy_triton.rows(torch.zeros(1, V, dtype=dtype), torch.tensor([0]), 1e-6, 1.0, learning)
    assert_all_came_out(cross_entropy_triton, compiled)
