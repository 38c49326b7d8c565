"""Designs and STEM: the base without their rows, TIDE's bytes in tables, and as much in layers."""

from types import SimpleNamespace

import pytest
import torch

from studies.controls import CONTROLS, builder
from studies.designs import DESIGNS, Split, stem_columns
from studies.nulls import NULLS, Reinjected, ShortConvolution
from studies.optimum import ARMS, Tuned, layer_parameters
from studies.rivals import RIVALS
from tide_lm.model import TideConfig, TideForCausalLM
from tide_lm.run.settings import RunConfig, TrainSection
from tide_lm.training.build import build_config
from tide_lm.training.objective import Objective

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_memory_blocks": 8,
    "memory_gain_init": 0.1,
    "memory_value_scale": 5.0,
}
IDS = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0))
OTHER_COMPUTE = {"base doubled", "base dense", "stem", "stem paper", "stem published"}  # by design
OTHER_COMPUTE |= {"gemma tables", "mole", "mole equal"}
WITHOUT_VALUES = TideForCausalLM, DESIGNS["stem"], DESIGNS["stem-published"]
OWN_BLOCKS = {"nanochat values small": 2}


def made(build, **changes):
    torch.manual_seed(0)
    shape = {**SHAPE, "memory_values": build not in WITHOUT_VALUES, **changes}
    return build(TideConfig(**shape)).eval()


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids).logits


def base(**changes):
    return made(TideForCausalLM, num_memory_blocks=0, **changes)


def of_arm(name):
    arm = ARMS[name]
    preset = f"tide-{arm.k}e-{Tuned.size}" if arm.k else f"base-{Tuned.size}"
    settings = {"recipe": arm.of_recipe, "model.preset": preset, **arm.settings}
    config = RunConfig.load(None, [f"{key}={value}" for key, value in settings.items()])
    shape = build_config(config.model, config.data.sequence, SimpleNamespace(bos_token_id=0, eos_token_id=1))
    with torch.device("meta"):
        return (CONTROLS | NULLS | DESIGNS | RIVALS).get(arm.model, TideForCausalLM)(shape)


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_has_tides_tables_and_as_much_in_its_layers(name):
    model = of_arm(name)
    tables = sum(weight.numel() for key, weight in model.named_parameters() if key.endswith("memory.weight"))
    assert tables == (OWN_BLOCKS.get(name, 8) * 32_768 * 256 if ARMS[name].k else 0)
    layers = sum(weight.numel() for weight in model.model.layers.parameters())
    if name not in OTHER_COMPUTE:
        assert layers == pytest.approx(layer_parameters(Tuned.size), rel=0.02)


def test_larger_bases_have_twice_the_layers_and_as_many_parameters_as_tide():
    doubled = sum(weight.numel() for weight in of_arm("base doubled").model.layers.parameters())
    assert doubled == pytest.approx(2 * layer_parameters(Tuned.size), rel=0.01)
    assert of_arm("base dense").num_parameters() == pytest.approx(of_arm("best").num_parameters(), rel=0.001)


def test_stem_as_published_has_fewer_parameters_in_its_layers():
    """Those of three up projections, nearly."""
    layers = sum(weight.numel() for weight in of_arm("stem").model.layers.parameters())
    assert layers == pytest.approx(layer_parameters(Tuned.size) - 3 * 256 * 704, rel=0.01)


@pytest.mark.parametrize("name", DESIGNS)
def test_a_design_without_its_rows_is_the_base(name):
    model, without = made(DESIGNS[name]), base(intermediate_size=40 if name == "narrow-gate" else 48)
    with torch.no_grad():
        if name.startswith("stem"):  # which has no FFN then in a layer with rows
            model.model.memory.weight.zero_()
            without.model.layers[1].mlp.down_proj.weight.zero_()
        elif name == "scalars":
            for layer in model.model.layers:
                for number in layer.scalars.parameters():
                    number.zero_()
        else:
            model = made(DESIGNS[name], memory_gain_init=0.0)
    assert torch.allclose(logits(model), logits(without), atol=1e-6)


@pytest.mark.parametrize("name", DESIGNS)
def test_a_design_learns_all_it_has_as_the_trainer_has_it(name):
    model = made(DESIGNS[name])
    assert not torch.allclose(logits(model), logits(base()), atol=1e-3)
    Objective(model, TrainSection(dtype="float32", compile=False), 1e-6)(IDS, IDS).objective.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    blocks = model.model.memory.weight.grad.any(-1).any(0)
    learned = {"split": 7, "narrow-gate": 3, "scalars": 3}.get(name, len(blocks))  # of three layers
    assert blocks.sum() == learned


@pytest.mark.parametrize("name", DESIGNS)
def test_a_design_is_causal(name):
    model = made(DESIGNS[name])
    changed = IDS.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 64
    assert torch.allclose(logits(model, changed)[:, :-1], logits(model)[:, :-1], atol=1e-6)


@pytest.mark.parametrize("name", DESIGNS)
def test_a_saved_design_is_opened_as_what_it_is(name, tmp_path):
    from transformers import AutoModelForCausalLM

    model = made(DESIGNS[name])
    model.save_pretrained(tmp_path)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(opened) is type(model)
    assert torch.equal(logits(opened), logits(model))


def test_pairs_and_triples_look_further_back():
    memory = made(DESIGNS["pairs-and-triples"]).model.memory
    rows = memory(torch.tensor([[1, 3, 4, 5, 3, 4, 1, 3, 4]])).rows_UJD
    assert torch.equal(rows[2, 1], rows[5, 1])  # the same pair
    assert not torch.equal(rows[2, 3], rows[5, 3])  # other triples
    assert torch.equal(rows[2, 3], rows[8, 3])


@pytest.mark.parametrize("name", [name for name in DESIGNS if name.startswith("pair-rows")])
def test_one_table_has_whole_rows_for_tokens_and_pairs(name):
    memory = made(DESIGNS[name]).model.memory
    parts, before, after = len(memory.orders), torch.tensor([[3, 4]]), torch.tensor([[5, 4]])
    ours, others = memory(before).rows_UJD[1], memory(after).rows_UJD[1]
    raw = memory.weight[4] * torch.rsqrt(memory.weight[4].square().mean(-1, keepdim=True) + 1e-6)
    assert torch.allclose(ours[::parts], 0.1 * raw, atol=1e-6)  # the token's own
    assert torch.equal(ours[::parts], others[::parts])
    assert (ours != others).any(-1).sum() == len(ours) - len(ours[::parts])
    assert torch.equal(memory(torch.tensor([[1, 3, 4]])).rows_UJD[2], ours)


def test_whole_rows_for_pairs_are_those_of_the_package():
    ours = made(TideForCausalLM, memory_pair_rows=64, memory_values=True)
    theirs = made(DESIGNS["pair-rows"])
    theirs.load_state_dict(ours.state_dict())
    assert torch.allclose(logits(ours), logits(theirs), atol=1e-6)


def test_a_split_mixes_some_tables_and_puts_the_others_in_values():
    model, seen = made(builder(Split, orders=[1] * 4 + [2] * 4)), []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, __, kwargs: seen.append(kwargs["row_BTD"]), with_kwargs=True
        )
    logits(model)
    rows = model.model.memory(IDS).rows_UJD
    assert all(torch.equal(row, rows[:, 4 + number].view_as(row)) for number, row in enumerate(seen))
    assert [layer.router.out_features for layer in model.model.layers] == [5] * 3


def test_a_convolution_begins_without_effect_and_ends_with_the_token():
    convolution = ShortConvolution(SimpleNamespace(hidden_size=4, rms_norm_eps=1e-6), tokens=2)
    m = torch.randn(1, 3, 4)
    with torch.no_grad():
        convolution.weight.zero_()
        assert torch.equal(convolution(m), m)
        convolution.weight[1] = 1.0
        before = torch.cat([torch.zeros(1, 1, 4), m[:, :-1]], 1)
        normed = before * torch.rsqrt(before.square().mean(-1, keepdim=True) + 1e-6)
        assert torch.allclose(convolution(m), m + torch.nn.functional.silu(normed), atol=1e-6)


def test_a_reinjected_row_is_convolved_from_nothing():
    plain, convolved = (
        made(builder(Reinjected, in_values=True, convolved=convolved), num_memory_blocks=0)
        for convolved in (False, True)
    )
    assert torch.equal(logits(plain), logits(convolved))
    convolved(IDS, labels=IDS).loss.backward()
    assert all(layer.convolution.weight.grad.any() for layer in convolved.model.layers)


def test_a_gate_weighs_rows_as_an_even_router_does_where_nothing_is_near():
    model = made(DESIGNS["row-gates"])
    gates, rows = model.model.layers[0].row_gates, torch.randn(2, 9, 8, 32)
    even = gates(torch.zeros(2, 9, 32), rows)
    assert torch.allclose(even, rows.sum(2) / 9, atol=1e-6)
    keys = 10 * rows[:, :, 3]  # which its first key has, too, since gains begin at 0.1
    assert (gates(keys, rows) * rows[:, :, 3]).sum() > (even * rows[:, :, 3]).sum()


def test_stem_shares_all_columns_out_among_a_third_of_the_layers():
    shape = TideConfig.from_preset(f"tide-8e-{Tuned.size}")
    assert stem_columns(shape) == {1: (0, 680), 4: (680, 1360), 6: (1360, 2048)}


def test_a_row_replaces_the_up_projection():
    model = made(DESIGNS["stem"])
    layer = model.model.layers[1]
    n, rows = torch.randn(2, 9, 32), torch.randn(18, 8, 32)
    gate = torch.nn.functional.silu(layer.mlp.gate_proj(n))
    assert torch.allclose(layer.mlp(n, rows), layer.mlp.down_proj(gate * rows.view(2, 9, 256)), atol=1e-6)
    assert not any("up_proj" in name for name, _ in layer.named_parameters())


def test_gated_pairs_gate_what_pairs_look_up():
    gated, pairs = made(NULLS["gated-pairs"]), made(NULLS["pairs"])
    assert torch.equal(gated.model.memory(IDS).rows_UJD, pairs.model.memory(IDS).rows_UJD)
    assert not torch.allclose(logits(gated), logits(pairs), atol=1e-3)
    added = {name.split(".", 3)[-1] for name in gated.state_dict().keys() - pairs.state_dict().keys()}
    assert added == {f"memory_gate.{part}.weight" for part in ("gate", "out", "norm")}


def test_rows_as_published_begin_as_small_as_the_table_is_long():
    drawn = made(DESIGNS["stem-published"]).model.memory.weight.std()
    assert drawn.item() == pytest.approx((2 / (64 + 256)) ** 0.5, rel=0.02)
    drawn = made(DESIGNS["stem"]).model.memory.weight.std()
    assert drawn.item() == pytest.approx(0.02 * 32**0.5, rel=0.02)
