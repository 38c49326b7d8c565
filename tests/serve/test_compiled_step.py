"""What a GPU runs for several sequences, compiled here for the CPU."""

import re
from contextlib import suppress

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from tide_lm.model import TideConfig, TideForCausalLM
from tide_lm.serve.cache import SlotCache
from tide_lm.serve.decoder import ModelForward
from tide_lm.serve.stacking import JointProducts

LENGTH, BATCH = 96, 3
SMALL = {
    "vocab_size": 53,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_memory_blocks": 3,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.2,
}


def forward_of(**changes) -> ModelForward:
    torch.manual_seed(0)
    model = TideForCausalLM(TideConfig(**SMALL | changes)).eval()
    cache = SlotCache(model.config, BATCH, LENGTH, model.lm_head.weight)
    for layer in cache.layers:
        layer.normal_()
    cache.ids_B.copy_(torch.tensor([5, 6, 7]))
    return ModelForward(model, cache)


@pytest.mark.slow
@torch.no_grad()
def test_one_compilation_does_for_all_lengths_and_copies_no_cache():
    forward = forward_of()
    cache, joint = forward.cache, JointProducts(forward.model)
    compiled = torch.compile(forward._logits, fullgraph=True)
    sources = []
    for reach in (17, 64, LENGTH):
        cache.look_at(reach)
        cache.place_B.copy_(torch.tensor([3, reach - 2, reach - 1]))
        kept = [layer.clone() for layer in cache.layers]
        expected = forward._logits()
        written = [layer.clone() for layer in cache.layers]
        for layer, before in zip(cache.layers, kept, strict=True):
            layer.copy_(before)
        with joint.used(), torch._dynamo.config.patch(error_on_recompile=bool(sources)):
            if sources:
                found = compiled()
            else:
                found, sources = run_and_get_code(compiled)
        assert torch.allclose(found, expected, atol=1e-5)
        assert max((a - b).abs().max() for a, b in zip(cache.layers, written, strict=True)) < 1e-5
    (source,) = sources
    assert len(re.findall(r"extern_kernels\.(?:add)?mm\(", source)) == 4 * SMALL["num_hidden_layers"] + 1
    assert not re.findall(rf"empty_strided\w*\(\([^)]*\b{LENGTH + 1}\b", source)


@pytest.mark.parametrize(
    "changes", [{}, {"num_memory_blocks": 0}, {"memory_values": True}, {"memory_gate": True}]
)
@torch.no_grad()
def test_joint_products_are_the_same_products(changes):
    forward = forward_of(**changes)
    joint = JointProducts(forward.model)
    expected = forward._logits()
    with joint.used():
        assert torch.allclose(forward._logits(), expected, atol=1e-5)
    assert torch.equal(forward._logits(), expected)


@torch.no_grad()
def test_a_step_that_failed_leaves_no_product_behind():
    forward = forward_of()
    joint, layer = JointProducts(forward.model), forward.model.model.layers[0]
    expected = forward._logits()
    with joint.used(), suppress(KeyboardInterrupt):
        layer.self_attn.q_proj(torch.ones(1, 1, 64))
        raise KeyboardInterrupt
    with joint.used():
        assert torch.allclose(forward._logits(), expected, atol=1e-5)
    assert "forward" not in vars(layer.self_attn.q_proj)
