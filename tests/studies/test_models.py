"""Controls and variants: each is its base without its tables, and has as many parameters as TIDE."""

import pytest
import torch
from torch import nn

from studies.controls import CONTROLS, builder
from studies.plan import NARROW, ONE_A_LAYER, VALUES, VALUES_BY_RECIPE, search
from studies.variants import Variant
from tide_lm.model import TideConfig, TideForCausalLM
from tide_lm.run.settings import RunConfig, TrainSection
from tide_lm.spec import estimate, presets
from tide_lm.train.objective import Objective

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
}
IDS = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0))


def made(build, blocks=3, **changes):
    torch.manual_seed(0)
    return build(TideConfig(**{**SHAPE, "num_memory_blocks": blocks, **changes})).eval()


NAMES = [*CONTROLS, *ONE_A_LAYER]


def made_control(name, **changes):
    values, own = name in VALUES_BY_RECIPE, name in ONE_A_LAYER
    build = CONTROLS.get(name, TideForCausalLM)
    return made(build, **{"memory_values": values, "memory_own_block": own, **changes})


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("name", NAMES)
def test_a_control_without_its_tables_is_the_base(name):
    model = made_control(name, memory_gain_init=0.0)
    with torch.no_grad():
        if name == "wide-input":  # whose tables are not normalised
            model.model.memory.weight.zero_()
    ffn = 16 if name == NARROW else 24
    base = made(TideForCausalLM, blocks=0, intermediate_size=ffn)
    assert torch.allclose(logits(model), logits(base), atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_control_uses_its_tables_and_learns_all_it_has(name):
    model = made_control(name)
    assert not torch.allclose(logits(model), logits(made(TideForCausalLM, blocks=0)), atol=1e-3)
    model(IDS, labels=IDS).loss.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())


@pytest.mark.parametrize(("name", "weight"), [("input-only", 1 / 4), ("wide-input", 1)])
def test_what_is_added_to_the_input(name, weight):
    control, base = made_control(name), made(TideForCausalLM, blocks=0)
    with torch.no_grad():
        added_BTD = weight * control.model.memory(IDS).rows_UKD.sum(1).view(*IDS.shape, -1)
        expected = base(inputs_embeds=base.model.embed_tokens(IDS) + added_BTD).logits
    assert torch.allclose(logits(control), expected, atol=1e-6)


def test_gated_tables_are_tide_with_a_gate_and_one_block_a_layer():
    """But for the router: with no eps, the gate's norm undoes what it decides."""
    control = made_control("layer-tables-and-values", rms_norm_eps=1e-12)
    options = dict.fromkeys(("memory_values", "memory_own_block", "memory_gate"), True)
    tide = made(TideForCausalLM, rms_norm_eps=1e-12, **options)
    assert torch.allclose(logits(tide), logits(control), atol=1e-5)


def test_what_a_layer_adds_of_its_own_table_begins_with_the_gain():
    model = made_control("layer-tables", memory_gain_init=0.1)
    added = []
    for layer in model.model.layers:
        layer.memory_gate.norm.register_forward_hook(
            lambda *call: added.append(call[-1].square().mean() ** 0.5)
        )
    logits(model)
    assert torch.allclose(torch.stack(added), torch.tensor(0.1), rtol=0.1)


@pytest.mark.parametrize("name", VALUES_BY_RECIPE)
def test_a_layers_own_table_is_in_its_values_too(name):
    model, seen = made_control(name, memory_gain_init=0.1), []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, __, kwargs: seen.append(kwargs["row_BTD"]), with_kwargs=True
        )
    logits(model)
    rows = model.model.memory(IDS).rows_UKD
    assert all(torch.equal(row, rows[:, number].view_as(row)) for number, row in enumerate(seen))
    assert len(seen) == 3
    assert [round(row.square().mean().item() ** 0.5, 2) for row in seen] == [0.1] * 3


@pytest.mark.parametrize("name", NAMES)
def test_a_control_has_the_parameters_of_tide(name):
    shape = TideConfig.from_preset("tide-8e-small", memory_own_block=name in ONE_A_LAYER)
    tide = estimate.count_parameters(presets.get("tide-8e-small").model).total
    with torch.device("meta"):
        model = CONTROLS.get(name, TideForCausalLM)(shape)
    assert model.num_parameters() == pytest.approx(tide, rel=0.0005 if name == NARROW else 0.03)


@pytest.mark.parametrize("name", NAMES)
def test_a_control_is_causal(name):
    model = made_control(name)
    changed = IDS.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 64
    with torch.no_grad():
        assert torch.allclose(model(changed).logits[:, :-1], logits(model)[:, :-1], atol=1e-6)


@pytest.mark.parametrize("name", ["layer-tables", "value-tables", "input-and-values"])
def test_a_control_of_layers_needs_a_table_for_each(name):
    with pytest.raises(
        ValueError, match="has a table for each of 3 layers: set num_memory_blocks, 2, to that"
    ):
        made_control(name, blocks=2)


@pytest.mark.parametrize("name", [*NAMES, "variant"])
def test_a_saved_model_is_opened_as_what_it_is(name, tmp_path):
    from transformers import AutoModelForCausalLM

    model = made(builder(Variant)) if name == "variant" else made_control(name)
    model.save_pretrained(tmp_path)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(opened) is type(model)
    assert torch.equal(logits(opened), logits(model))


def test_a_variant_without_changes_is_tide():
    assert torch.equal(logits(made(builder(Variant))), logits(made(TideForCausalLM)))


@pytest.mark.parametrize("run", [run for run in search() if run.changes], ids=lambda run: run.recipe)
def test_a_variant_learns_as_the_trainer_has_it(run):
    model = made(builder(Variant, **run.changes), memory_values=run.settings.get(VALUES) == "true")
    Objective(model, RunConfig(train=TrainSection(dtype="float32", compile=False)))(
        IDS, IDS
    ).objective.backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    assert model.model.memory.weight.grad.any()


def weights(**changes):
    model = made(builder(Variant, **changes))
    with torch.no_grad():
        return torch.stack(model(IDS, output_router_weights=True).router_weights)


def test_without_a_null_bank_all_weight_is_on_blocks():
    found = weights(null_bank=False)
    assert found[..., -1].max() == 0
    assert torch.allclose(found[..., :-1].sum(-1), torch.ones(()))


def test_the_null_bank_may_start_with_a_bias():
    assert weights(null_bias=2.0)[..., -1].mean() > 2 * weights()[..., -1].mean()


def test_a_low_temperature_decides():
    sharp, soft = weights(router_temperature=0.01), weights()
    assert sharp.max(-1).values.mean() > soft.max(-1).values.mean()


@pytest.mark.parametrize(("scale", "like"), [(1.0, 3), (0.0, 0)])
def test_a_layers_scale_multiplies_its_memory(scale, like):
    expected = logits(made(TideForCausalLM, blocks=like))
    assert torch.allclose(logits(made(builder(Variant, layer_scale=scale))), expected, atol=1e-6)


def test_deeper_layers_may_start_with_a_larger_scale():
    layers = made(builder(Variant, layer_scale=0.5, deeper_is_larger=True)).model.layers
    assert [layer.layer_scale.item() for layer in layers] == pytest.approx(
        [0.5 * (number + 1) ** 0.5 for number in range(len(layers))]
    )


def test_a_router_may_start_even():
    found = weights(router_starts_even=True)
    assert torch.allclose(found, torch.full((), 1 / found.shape[-1]))


def test_the_gain_may_be_fixed():
    model = made(builder(Variant, gain_is_learned=False))
    model(IDS, labels=IDS).loss.backward()
    assert {name for name, p in model.named_parameters() if p.grad is None} == {"model.memory.norm.weight"}


def test_tables_may_be_drawn_smaller():
    drawn, small = (
        made(each).model.memory.weight for each in (TideForCausalLM, builder(Variant, table_std=0.002))
    )
    assert torch.allclose(small, drawn / 10)


def test_groups_of_layers_may_have_blocks_of_their_own():
    found = weights(layer_groups=3)  # of three layers, with three blocks
    blocks = found[..., :-1].mean((1, 2))
    assert torch.equal(blocks > 0, torch.eye(3, dtype=torch.bool))
    assert torch.allclose(found.sum(-1), torch.ones(()))


def test_heads_with_one_routers_weights_are_that_router():
    one, two = made(builder(Variant)), made(builder(Variant, router_heads=2))
    with torch.no_grad():
        for alone, heads in zip(one.model.layers, two.model.layers, strict=True):
            heads.router.weight.copy_(alone.router.weight.repeat(2, 1))
    assert torch.allclose(logits(two), logits(one), atol=1e-6)


def test_each_head_weighs_a_slice_of_its_own():
    layer = made(builder(Variant, router_heads=2)).model.layers[0]
    logits_BTHS, rows_UKD = torch.zeros(2, 9, 2, 4), torch.randn(18, 3, 16)
    logits_BTHS[:, :, 1, 3] = 1e4  # the second head's null bank
    added_BTD = layer._by_heads(torch.empty(2, 9, 16), logits_BTHS.flatten(-2), rows_UKD)
    assert torch.allclose(added_BTD[..., :8], rows_UKD.sum(1).view(2, 9, 16)[..., :8] / 4)
    assert not added_BTD[..., 8:].any()


def test_memory_may_be_added_to_the_input_too():
    model = made(builder(Variant, input_too=True))
    assert torch.allclose(
        logits(made(builder(Variant, input_too=True), memory_gain_init=0.0)),
        logits(made(TideForCausalLM, blocks=0)),
        atol=1e-6,
    )
    assert not torch.allclose(logits(model), logits(made(TideForCausalLM)), atol=1e-3)
    model(IDS, labels=IDS).loss.backward()
    assert model.model.layers[0].input_router.weight.grad.any()


def test_values_hold_the_row_of_their_layer():
    """A control of values alone is TIDE with rows in values, whose routers choose the null bank."""
    control = made_control("value-tables")
    tide = made(TideForCausalLM, memory_values=True)
    tide.load_state_dict(control.state_dict(), strict=False)
    for layer in tide.model.layers:
        layer.inject = lambda h, update, *_: h + update
    assert torch.allclose(logits(control), logits(tide), atol=1e-6)


@pytest.mark.parametrize("change", ["view_rank", "gate_rank"])
def test_a_product_starts_without_effect_and_learns(change):
    model = made(builder(Variant, **{change: 2}))
    assert torch.allclose(logits(model), logits(made(TideForCausalLM)), atol=1e-6)
    model(IDS, labels=IDS).loss.backward()
    product = getattr(model.model.layers[0], change.removesuffix("_rank"))
    assert product[1].weight.grad.any()


def test_a_gate_for_the_mix_begins_with_the_gain_and_takes_its_parameters_from_the_ffn():
    narrow = made(TideForCausalLM, blocks=0, intermediate_size=16)
    without = made(builder(Variant, gated=True), memory_gain_init=0.0)
    assert torch.allclose(logits(without), logits(narrow), atol=1e-6)
    assert not torch.allclose(logits(made(builder(Variant, gated=True))), logits(narrow), atol=1e-3)


def test_only_routers_and_scales_are_new():
    names = {name for name, _ in made(builder(Variant, layer_scale=1.0, null_bias=0.0)).named_parameters()}
    old = {name for name, _ in made(TideForCausalLM).named_parameters()}
    assert {name.split(".")[-1] for name in names - old} == {"layer_scale", "null_bias"}
    assert isinstance(made(builder(Variant)).model.layers[0].router, nn.Linear)


def test_values_of_all_blocks_start_with_the_layers_own():
    expected = logits(made(TideForCausalLM, memory_values=True))
    model = made(builder(Variant, values_of_all="learned"), memory_values=True)
    assert torch.allclose(logits(model), expected, atol=1e-6)
    model(IDS, labels=IDS).loss.backward()
    assert all(layer.value_weights.grad.all() for layer in model.model.layers)


def test_a_router_may_mix_what_is_in_values():
    model = made(builder(Variant, values_of_all="routed"), memory_values=True)
    given = []
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.value_router.weight)
        layer.self_attn.register_forward_pre_hook(
            lambda _, __, kwargs: given.append(kwargs["row_BTD"]), with_kwargs=True
        )
    logits(model)
    even = model.model.memory(IDS).rows_UKD.sum(1) / 4
    assert all(torch.allclose(row, even.view_as(row), atol=1e-6) for row in given)
    assert len(given) == 3


def test_what_is_in_values_may_be_larger():
    expected = logits(made(TideForCausalLM, memory_values=True))
    for scale, same in ((1.0, True), (5.0, False)):
        found = logits(made(builder(Variant, value_scale=scale), memory_values=True))
        assert torch.allclose(found, expected, atol=1e-6) == same


@pytest.mark.parametrize(
    "changes", [{"values_of_all": "learned"}, {"values_of_all": "routed"}, {"value_scale": 5.0}], ids=str
)
def test_a_layer_that_is_dropped_has_nothing_in_its_values(changes):
    model, base = made(builder(Variant, **changes), memory_values=True), made(TideForCausalLM, blocks=0)
    with torch.no_grad():
        assert torch.equal(model(IDS, drop_memory_layers=[0, 1, 2]).logits, logits(base))
