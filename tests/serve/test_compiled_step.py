"""What a GPU runs for several sequences, compiled here for the CPU."""

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from tide_lm.model import TideConfig, TideForCausalLM
from tide_lm.serve import Engine
from tide_lm.serve.cache import SlotCache
from tide_lm.serve.decoder import ModelForward
from tide_lm.serve.step import LayerForward
from tide_lm.serve.weights import why_opaque

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


def forward_of(**changes) -> LayerForward:
    torch.manual_seed(0)
    model = TideForCausalLM(TideConfig(**SMALL | changes)).eval()
    cache = SlotCache(model.config, BATCH, LENGTH, model.lm_head.weight)
    for layer in cache.layers:
        layer.normal_()
    cache.ids_B.copy_(torch.tensor([5, 6, 7]))
    return LayerForward(model, cache)


@pytest.mark.slow
@torch.no_grad()
def test_one_compilation_does_for_all_lengths_and_copies_no_cache():
    forward = forward_of()
    cache = forward.cache
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
        with torch._dynamo.config.patch(error_on_recompile=bool(sources)):
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
    "changes",
    [
        {},
        {"num_memory_blocks": 0},
        {"memory_values": True},
    ],
    ids=str,
)
@torch.no_grad()
def test_a_step_through_the_layers_is_the_models_forward(changes):
    forward = forward_of(**changes)
    kept = [layer.clone() for layer in forward.cache.layers]
    expected = ModelForward(forward.model, forward.cache)._logits()
    written = [layer.clone() for layer in forward.cache.layers]
    for layer, before in zip(forward.cache.layers, kept, strict=True):
        layer.copy_(before)
    assert torch.allclose(forward._logits(), expected, atol=1e-5)
    assert max((a - b).abs().max() for a, b in zip(forward.cache.layers, written, strict=True)) < 1e-5


def test_layers_of_others_are_left_to_their_own_forward():
    model = forward_of().model
    model(torch.tensor([[1]]), output_hidden_states=True)  # transformers leaves hooks behind
    assert why_opaque(model) is None
    hook = model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    assert why_opaque(model) == "a hook on model.layers.1.mlp"
    hook.remove()
    layer = model.model.layers[1]
    kind, layer.mlp.forward = type(layer.mlp), lambda x: x
    assert why_opaque(model) == f"a changed forward of {kind.__name__}"
    del layer.mlp.forward
    for part, name in ((layer.mlp, "OtherFFN"), (layer.self_attn, "OtherAttention"), (layer, "OtherLayer")):
        part.__class__ = type(name, (type(part),), {"__module__": "elsewhere"})
        assert why_opaque(model) == f"layers of type {name}"
    assert type(Engine(model).forward) is ModelForward
    biased = TideForCausalLM(TideConfig(**SMALL, attention_bias=True, mlp_bias=True))
    assert type(Engine(biased).forward) is ModelForward
