"""Rivals: their formulas computed anew, which layers have which rows, parameters, and that they learn."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import gelu, rms_norm, scaled_dot_product_attention

from studies.optimum import ARMS, Tuned, layer_parameters
from studies.rivals import RIVALS, FirstChannels, PerLayerInput
from tests.studies.test_designs import IDS, base, logits, made, of_arm
from tide_lm.data.shards import Manifest
from tide_lm.run.settings import OptimSection, TrainSection
from tide_lm.training.objective import Objective
from tide_lm.training.optim import make_optimizer

LAYERS = {"nanochat-values": 3, "modded-values": 8, "gemma-tables": 4, "mole": 3, "mole-one": 3}
EPS = 1e-6


def rival(name, **changes):
    blocks = 0 if name.startswith("mole") else 8
    shape = {"num_hidden_layers": LAYERS[name], "num_memory_blocks": blocks, "memory_values": False}
    return made(RIVALS[name], **{**shape, **changes})


def numbers(model, ids=IDS):
    """The K x D numbers of each token, as they are stored."""
    return model.model.memory.weight[ids].flatten(-2)


def seen_by(module, ids, model):
    """What a module is called with, and what it returns."""
    seen = []
    hook = module.register_forward_hook(
        lambda _, args, kwargs, out: seen.append((args, kwargs, out)), with_kwargs=True
    )
    logits(model, ids)
    hook.remove()
    return seen[0]


def attended(attention, n, v, rotary):
    """What attention returns for values of B x T x heads x d."""
    heads = (*n.shape[:2], -1, attention.head_dim)
    q, k = (project(n).view(heads).transpose(1, 2) for project in (attention.q_proj, attention.k_proj))
    cos, sin = (turn.unsqueeze(1) for turn in rotary)

    def turned(x):
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (turned(k), v.transpose(1, 2)))
    mixed = scaled_dot_product_attention(turned(q), k, v, is_causal=True)
    return attention.o_proj(mixed.transpose(1, 2).flatten(2))


def check_attention(model, layer, values):
    attention = model.model.layers[layer].self_attn
    _, called, (returned, _) = seen_by(attention, IDS, model)
    n = called["hidden_states"]
    v = attention.v_proj(n).view(*n.shape[:2], -1, attention.head_dim)
    expected = attended(attention, n, values(attention, n, v), called["position_embeddings"])
    assert torch.allclose(returned, expected, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize(("layer", "columns"), [(0, (0, 128)), (2, (128, 256))])
def test_nanochats_values_are_gated_for_each_head(layer, columns):
    model = rival("nanochat-values")
    model.model.memory.weight.normal_()
    model.model.layers[layer].self_attn.value_gate.weight.normal_()

    def values(attention, n, v):
        v, weight = v.clone(), attention.value_gate.weight.view(8, 2, 12)
        embeddings = numbers(model)[..., slice(*columns)].view(*n.shape[:2], 8, 2, 8)
        for number in range(8):
            for head in range(2):
                gate = 3 * torch.sigmoid(n[..., :12] @ weight[number, head])
                v[:, :, head] += gate.unsqueeze(-1) * embeddings[:, :, number, head]
        return v

    check_attention(model, layer, values)


def test_every_other_layer_has_nanochats_values_and_the_last_does():
    with_rows = [layer.columns is not None for layer in of_arm("nanochat values").model.layers]
    assert with_rows == [False, True] * 4
    small = of_arm("nanochat values small").model.layers
    assert [layer.columns for layer in small if layer.columns] == [(n, n + 128) for n in range(0, 512, 128)]


def test_nanochats_gates_begin_slightly_above_their_middle_and_its_rows_as_matrices_do():
    model = rival("nanochat-values")
    (gate,) = {module for module in model.model.layers[0].modules() if isinstance(module, FirstChannels)}
    assert gate.weight.min() >= 0
    assert 0.015 < gate.weight.max() <= 0.02
    assert model.model.memory.weight.std().item() == pytest.approx(0.02, rel=0.02)


@torch.no_grad()
@pytest.mark.parametrize(("layer", "columns"), [(1, (80, 160)), (6, (80, 160)), (7, (160, 256))])
def test_moddeds_values_are_mixed_by_learned_numbers(layer, columns):
    model = rival("modded-values")
    lambdas = model.model.layers[layer].self_attn.value_gate.weight
    assert (lambdas == 0.5).all()
    lambdas.normal_()

    def values(_, n, v):
        embeddings = numbers(model)[..., slice(*columns)].view(*n.shape[:2], -1, 2, 8)
        return lambdas[0] * v + sum(
            weight * e for weight, e in zip(lambdas[1:], embeddings.unbind(2), strict=True)
        )

    check_attention(model, layer, values)


def test_moddeds_first_and_last_layers_share_three_tables():
    columns = [layer.columns for layer in of_arm("modded values").model.layers]
    assert columns == [(0, 640), (640, 1280), (1280, 2048), None, None, (0, 640), (640, 1280), (1280, 2048)]
    drawn = rival("modded-values").model.memory.weight.std().item()
    assert drawn == pytest.approx(2 * 0.02 * 32**0.5, rel=0.02)


@torch.no_grad()
def test_a_per_layer_input_is_gated_normalised_and_added():
    model = rival("gemma-tables", memory_gain_init=1.0)
    layer, embedded = model.model.layers[2], model.model.embed_tokens(IDS)
    assert (layer.per_layer_input.norm.weight == 1).all()
    part: PerLayerInput = layer.per_layer_input
    _, _, after_ffn = seen_by(layer.mlp, IDS, model)
    (n,), _, _ = seen_by(layer.mlp, IDS, model)
    (h, *_), _, added = seen_by(part, IDS, model)
    projected = rms_norm(part.projection(embedded), (64,), eps=EPS)
    given = (projected + 8 * numbers(model)[..., 128:192]) / 2**0.5
    gated = part.out(gelu(part.gate(h), approximate="tanh") * given)
    assert torch.allclose(added, rms_norm(gated, (32,), eps=EPS), atol=1e-5)
    _, _, returned = seen_by(layer, IDS, model)
    assert torch.allclose(returned, h + added, atol=1e-6)
    assert torch.allclose(layer.post_attention_layernorm(h - after_ffn), n, atol=1e-5)  # h is after the FFN


@torch.no_grad()
@pytest.mark.parametrize(("name", "experts"), [("mole", 4), ("mole-one", 1)])
def test_experts_see_the_embedding_alone_and_are_weighed_by_the_state(name, experts):
    model = rival(name)
    layer, e = model.model.layers[1], model.model.embed_tokens(IDS)
    assert len(layer.experts) == experts
    layer.expert_layernorm.weight.normal_()
    (state,), _, _ = seen_by(layer.input_layernorm, IDS, model)
    _, _, (update, _) = seen_by(layer.self_attn, IDS, model)
    _, _, returned = seen_by(layer, IDS, model)
    h = state + update
    n = rms_norm(h, (32,), eps=EPS)
    weights = torch.softmax(n @ layer.router.weight.T, -1)
    expected = h + layer.mlp(n)
    for number, expert in enumerate(layer.experts):
        normed = rms_norm(e, (32,), eps=EPS) * layer.expert_layernorm.weight
        expected = expected + weights[..., number, None] * expert(normed)
    assert torch.allclose(returned, expected, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("name", RIVALS)
def test_a_rival_without_its_part_is_the_base(name):
    model = rival(name, memory_gain_init=0.0)  # which per-layer inputs begin with
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("memory.weight") or ".experts." in parameter_name:
            parameter.zero_()
        if name == "modded-values" and "value_gate" in parameter_name:
            parameter.fill_(1.0)
    assert torch.allclose(logits(model), logits(base(num_hidden_layers=LAYERS[name])), atol=1e-6)


@pytest.mark.parametrize("name", RIVALS)
def test_a_rival_learns_all_it_has(name):
    """The loss falls on a repeated batch, in bfloat16 too, and all tokens of it have rows that learn."""
    model, ids = rival(name), IDS[:, :-1]
    for dtype in ("bfloat16", "float32"):
        objective = Objective(model, TrainSection(dtype=dtype, compile=False), 0.0)
        optimizer = make_optimizer(model, OptimSection(max_lr=3e-3))
        losses = []
        for _ in range(20):
            loss = objective(ids, IDS[:, 1:]).objective
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0] - 0.5
        assert all(parameter.grad is not None for parameter in model.parameters())
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("memory.weight"):
                learned = parameter.grad.any(-1)
                seen = torch.zeros(64, dtype=torch.bool).index_fill(0, ids.flatten(), True)
                assert torch.equal(learned, seen.unsqueeze(-1).expand_as(learned))


@pytest.mark.parametrize("name", RIVALS)
def test_rows_are_those_of_the_token_and_seen_by_none_before_it(name):
    model, changed = rival(name), IDS.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 64
    assert torch.allclose(logits(model, changed)[:, :-1], logits(model)[:, :-1], atol=1e-6)
    if model.model.memory is not None:
        place, before = 4, logits(model)
        model.model.memory.weight.data[int(IDS[0, place])] += 1.0
        after = logits(model)
        first = (IDS[0] == IDS[0, place]).nonzero()[0]
        assert torch.allclose(after[0, :first], before[0, :first], atol=1e-6)
        assert not torch.allclose(after[0, place], before[0, place], atol=1e-3)


@pytest.mark.parametrize("name", RIVALS)
def test_a_saved_rival_is_opened_as_what_it_is(name, tmp_path):
    from transformers import AutoModelForCausalLM

    model = rival(name)
    model.save_pretrained(tmp_path)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(opened) is type(model)
    assert torch.equal(logits(opened), logits(model))


def test_mole_has_no_tables_before_the_end_of_training():
    with pytest.raises(ValueError, match="num_memory_blocks, 8, to 0"):
        rival("mole", num_memory_blocks=8)


def test_gemmas_tables_need_three_matrices_in_each_layer_or_a_narrower_ffn():
    more = sum(weight.numel() for weight in of_arm("gemma tables").model.layers.parameters())
    norms = 8 * 2 * 256
    assert more == layer_parameters(Tuned.size) + 3 * 8 * 256 * 256 + norms


@pytest.mark.parametrize(("name", "experts"), [("mole", 4), ("mole equal", 1)])
def test_moles_experts_are_as_large_as_the_ffn(name, experts):
    layers = of_arm(name).model.layers
    ours = sum(weight.numel() for weight in layers.parameters())
    own = 8 * (experts * (3 * 256 * 704 + 256) + 256)
    assert ours == layer_parameters(Tuned.size) + own


def test_data_of_a_larger_tokenizer_make_a_larger_model(prepared, monkeypatch):
    for name in ("base", "base untied", "paper", "paper untied", "best", "best untied"):
        config = Tuned.named(f"{name}, 0.008, tokens 2").config(prepared, gpu=False)
        assert config.model.vocab_size == 0
    larger = replace(Manifest.read(prepared), vocab_size=128_256)
    monkeypatch.setattr(Manifest, "read", lambda _: larger)
    for name, arm in ARMS.items():
        shape = Tuned.named(f"{name}, 0.008, tokens 2").config(prepared, gpu=False).model.shape()
        assert shape.vocab_size == 128_256, name
        assert shape.num_memory_blocks == arm.k
