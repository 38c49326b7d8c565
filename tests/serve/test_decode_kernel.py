"""The decode kernel's own source, run on the host, against the model in float32."""

import copy
import dataclasses
import re
import subprocess

import pytest
import torch
from emulated import COMPILER, EmulatedKernel
from peft import LoraConfig

from tide_lm.compress.pack import pack
from tide_lm.model import TideConfig, TideForCausalLM
from tide_lm.ops.decode import SOURCE, DecodeShape
from tide_lm.ops.nvrtc import compile_source
from tide_lm.serve.cache import SlotCache
from tide_lm.serve.fused import rope_table, shape_of, why_not
from tide_lm.serve.weights import stack_weights
from tide_lm.spec.form import Form

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")


def in_test_all(*cases) -> list:
    """Leave cases to `make test-all`: one like them is in `make test`."""
    return [pytest.param(*case, marks=pytest.mark.kernels) for case in cases]


SMALL = {
    "vocab_size": 53,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_memory_blocks": 3,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}


def model_of(**changes) -> TideForCausalLM:
    torch.manual_seed(0)
    model = TideForCausalLM(TideConfig(**SMALL | {"initializer_range": 0.2} | changes)).bfloat16().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.normal_(1, 0.2)
    return model


def bound(folder, model, token, blocks, which=None, **macros) -> tuple[EmulatedKernel, SlotCache]:
    """The kernel for a model, whose memory's rows it looks up by itself, or at the places `which`."""
    config, memory = model.config, model.model.memory
    rows = None if memory is None else memory.row_bytes(token)
    cache = SlotCache(config, 1, 32, model.lm_head.weight, together=True)
    kernel = EmulatedKernel(folder, shape_of(model), blocks, **macros)
    kernel.bind(
        stack_weights(model),
        cache.states_L2BHTd[:, :, 0],
        rope_table(model, 32),
        token,
        cache.previous_B,
        cache.place_B,
        config.rms_norm_eps,
        config.memory_value_scale,
        rows if which is None else dataclasses.replace(rows, which=which),
    )
    return kernel, cache


@pytest.fixture(scope="session")
def kernels(pytestconfig, tmp_path_factory):
    """The folder of compiled kernels, for all workers and for the next run; with no cache, for this one."""
    has_cache = hasattr(pytestconfig, "cache")
    return pytestconfig.cache.mkdir("kernels") if has_cache else tmp_path_factory.mktemp("kernels")


def run(folder, model, blocks=5, tokens=5, **macros):
    """The logits of tokens that are fed, by the kernel and by the model, and those of its bfloat16."""
    exact = copy.deepcopy(model).float()
    ids_T = torch.randint(model.config.vocab_size, (tokens,))
    with torch.no_grad():
        expected, rough = exact(ids_T[None]).logits[0], model(ids_T[None]).logits[0].float()
    token, found = torch.zeros(1, dtype=torch.long), []
    kernel, cache = bound(folder, model, token, blocks, **{"WARPS": 4} | macros)
    for place, one in enumerate(ids_T):
        assert int(cache.place_B) == place
        token.copy_(one)
        kernel.decode()
        found.append(kernel.logits_V.clone())
        assert int(token) == int(found[-1].argmax())
    return torch.stack(found), expected, rough


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    "changes",
    [
        {"memory_values": True, "memory_value_scale": 3.0, "num_memory_blocks": 4, "memory_pair_rows": 29},
        *in_test_all(
            [{"memory_values": True, "memory_value_scale": 3.0}],
            [{"num_memory_blocks": 2, "memory_pair_rows": 29}],
            [{}],
            [{"num_memory_blocks": 0}],
            [{"memory_values": True, "memory_value_scale": 3.0, "hidden_size": 128}],
            [{"num_memory_blocks": 24, "vocab_size": 17, "memory_gain_init": 4.0}],
            [{"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 96, "head_dim": 32}],
            [{"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True}],
            [{"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}}],
        ),
    ],
    ids=str,
)
def test_the_kernel_gives_the_models_logits(kernels, changes):
    found, expected, rough = run(kernels, model_of(**changes))
    assert error(found, expected) <= error(rough, expected)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("blocks", "changes"),
    [
        (2, {"WARPS": 2, "LIMIT": 1}),
        (3, {"WARPS": 4, "LIMIT": 9, "SPLITS": 1}),
        (9, {"WARPS": 6, "LIMIT": 2, "SPLITS": 4}),
        (24, {"WARPS": 2, "LIMIT": 3, "SPLITS": 8}),  # most have no part in a phase
    ],
)
def test_the_kernel_gives_the_same_whatever_it_is_split_into(kernels, blocks, changes):
    found, expected, rough = run(kernels, model_of(memory_values=True), blocks, **changes)
    assert error(found, expected) <= error(rough, expected)


@pytest.mark.parametrize(
    ("bits", "pairs"), [(4, 0), (4, 29), *in_test_all([16, 29], [8, 0], [8, 29], [3, 0], [2, 0])]
)
def test_packed_rows_are_decoded_to_the_same_bits(tmp_path, kernels, bits, pairs):
    blocks = {"num_memory_blocks": 4, "memory_pair_rows": pairs} if pairs else {}
    pack(model_of(hidden_size=72, head_dim=32, **blocks).float(), tmp_path / "packed", Form(bits))
    model = TideForCausalLM.from_pretrained(tmp_path / "packed").bfloat16().eval()
    token = torch.zeros(1, dtype=torch.long)
    kernel, cache = bound(kernels, model, token, blocks=2, WARPS=2)
    for one in 0, 1, 52:
        before = cache.previous_B.clone()
        expected = model.model.memory(token.fill_(one)[None], torch.float32, before[None]).of_positions()[0]
        kernel.decode()
        assert torch.equal(kernel.rows_KD, expected)
        assert cache.previous_B.tolist() == [one]


def test_rows_of_a_file_are_at_the_places_that_the_host_gives(tmp_path, kernels):
    """As in the cache of a store, where a GPU reads them: nothing is hashed then."""
    model = model_of(num_memory_blocks=4, memory_pair_rows=29)
    token, which = torch.tensor([7]), torch.tensor([3, 53 + 11])
    kernel, _ = bound(kernels, model, token, blocks=2, which=which)
    kernel.decode()
    raw = model.model.memory.weight[which].transpose(0, 1).flatten(0, 1).float()
    expected = model.model.memory.norm.weight.float() * raw * torch.rsqrt(raw.square().mean(-1, True) + 1e-6)
    assert torch.allclose(kernel.rows_KD, expected, atol=1e-5)


def test_rows_of_a_lower_rank_or_of_a_file_are_looked_up_by_the_host(tmp_path):
    model, ids = model_of().float(), torch.zeros(1, dtype=torch.long)
    for form, place in (Form(8, rank=0.5), "device"), (Form(8), "store"):
        pack(model, tmp_path / place, form)
        packed = TideForCausalLM.from_pretrained(tmp_path / place, memory=place)
        assert packed.model.memory.row_bytes(ids) is None


def test_a_model_that_the_kernel_cannot_run_says_why():
    device = torch.device("cpu")
    assert "24 numbers" in DecodeShape(96, 96, 4, 2, 24, 1, 50).why_not(device)
    assert "8 does not divide" in DecodeShape(36, 96, 4, 2, 16, 1, 50).why_not(device)
    assert "31 blocks" in DecodeShape(64, 96, 4, 2, 16, 1, 50, K=40).why_not(device)
    assert "2 sequences" in why_not(model_of(), 2)
    assert "no NVIDIA GPU" in why_not(model_of(), 1)
    assert "not bfloat16" in why_not(model_of().float(), 1)
    adapted = model_of()
    adapted.add_adapter(LoraConfig(target_modules=["q_proj"]))
    assert "Linear in the place of a matrix" in why_not(adapted.to(torch.bfloat16), 1)
    adapted = model_of()
    adapted.add_adapter(LoraConfig(target_modules=["lm_head"]))
    assert "in the place of the head" in why_not(adapted.to(torch.bfloat16), 1)
    hooked = model_of()
    hooked(torch.tensor([[1]]), output_hidden_states=True)
    assert "no NVIDIA GPU" in why_not(hooked, 1)
    hooked.model.norm.register_forward_hook(lambda *_: None)
    assert "a hook on model.norm" in why_not(hooked, 1)
    for shape, told in (
        (DecodeShape(16384, 65536, 128, 8, 128, 1, 50), "too long for 49152 bytes"),
        (DecodeShape(64, 96, 64, 64, 16, 1, 50), "64 key heads, more than 60"),
    ):
        with pytest.raises(ValueError, match=told):
            shape.macros(60, 49152)


def test_weights_are_stacked_once_and_again_when_one_is_another():
    model = model_of()
    first, layer = stack_weights(model), model.model.layers[1]
    assert layer.self_attn.k_proj.weight.data_ptr() == first.qkv[1, 64:].data_ptr()
    assert stack_weights(model).qkv.data_ptr() == first.qkv.data_ptr()
    layer.self_attn.v_proj.weight.data = torch.ones_like(layer.self_attn.v_proj.weight)
    layer.mlp.down_proj.weight.data = torch.ones_like(layer.mlp.down_proj.weight)
    model.resize_token_embeddings(80)
    again = stack_weights(model)
    assert (again.qkv[1, 96:] == 1).all()
    assert torch.equal(again.qkv[:, :96], first.qkv[:, :96])
    assert (again.down[1] == 1).all()
    assert again.o.data_ptr() == first.o.data_ptr()
    assert len(again.head) == len(again.embed) == 80


def test_a_model_that_was_copied_or_moved_has_stacks_of_its_own(tmp_path):
    model = model_of()
    first = stack_weights(model)
    other = copy.deepcopy(model).float()
    assert not {stack.data_ptr() for stack in vars(stack_weights(other)).values()} & {first.qkv.data_ptr()}
    assert torch.equal(stack_weights(other).ffn.bfloat16(), first.ffn)
    model.save_pretrained(tmp_path)
    kept = TideForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(kept[name], weight) for name, weight in model.state_dict().items())


@pytest.mark.kernels
@pytest.mark.parametrize("preset", ["base-350m", "tide-8e-750m", "tide-24e-1b", "tide-8e-3b"])
@pytest.mark.parametrize("bits", [0, 3])
def test_the_kernel_compiles_for_hopper_without_spilled_registers(preset, bits, tmp_path):
    """A spilled one costs as much as a word from another block."""
    pytest.importorskip("nvidia.cu13", reason="nvidia-cuda-nvrtc is not installed")
    triton = pytest.importorskip("triton", reason="triton, whose disassembler it takes, is not installed")
    with torch.device("meta"):
        model = TideForCausalLM(TideConfig.from_preset(preset, recipe="paper"))
    shape = dataclasses.replace(shape_of(model), BITS=bits)
    code = compile_source(SOURCE.read_text(), shape.macros(132, 232448), "sm_90a", SOURCE.parent)
    (tmp_path / "decode.cubin").write_bytes(code)
    command = [triton.knobs.nvidia.nvdisasm.path, "-c", tmp_path / "decode.cubin"]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "HMMA" in listing
    assert not re.findall(r"\b(?:STL|LDL)\b.*", listing)


def test_what_does_not_compile_is_told(tmp_path):
    pytest.importorskip("nvidia.cu13", reason="nvidia-cuda-nvrtc is not installed")
    with pytest.raises(ValueError, match='identifier "nothing" is undefined'):
        compile_source("int f() { return nothing; }", {}, "sm_90a", tmp_path)
