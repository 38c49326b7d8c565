"""Controls: each is the base without its tables, and has as many parameters as TIDE."""

import pytest
import torch

from studies.controls import CONTROLS
from studies.extensions import GatedLayer, OwnBlockLayer
from studies.plan import NARROW, VALUES_BY_RECIPE
from tide_lm.model import TideConfig, TideForCausalLM, TideModel
from tide_lm.model.extensions import extended
from tide_lm.ops.row_index import RowIndex
from tide_lm.run.settings import TrainSection
from tide_lm.spec import estimate, presets
from tide_lm.training.objective import BatchRows, Objective

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


def made_control(name, **changes):
    return made(CONTROLS[name], **{"memory_values": name in VALUES_BY_RECIPE, **changes})


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("name", CONTROLS)
def test_a_control_without_its_tables_is_the_base(name):
    model = made_control(name, memory_gain_init=0.0)
    with torch.no_grad():
        if name == "wide-input":  # whose tables are not normalised
            model.model.memory.weight.zero_()
    ffn = 16 if name == NARROW else 24
    base = made(TideForCausalLM, blocks=0, intermediate_size=ffn)
    assert torch.allclose(logits(model), logits(base), atol=1e-6)


@pytest.mark.parametrize("name", CONTROLS)
def test_a_control_uses_its_tables_and_learns_all_it_has(name):
    model = made_control(name)
    assert not torch.allclose(logits(model), logits(made(TideForCausalLM, blocks=0)), atol=1e-3)
    model(IDS, labels=IDS).loss.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())


@pytest.mark.parametrize(("name", "weight"), [("input-only", 1 / 4), ("wide-input", 1)])
def test_what_is_added_to_the_input(name, weight):
    control, base = made_control(name), made(TideForCausalLM, blocks=0)
    with torch.no_grad():
        added_BTD = weight * control.model.memory(IDS).rows_UJD.sum(1).view(*IDS.shape, -1)
        expected = base(inputs_embeds=base.model.embed_tokens(IDS) + added_BTD).logits
    assert torch.allclose(logits(control), expected, atol=1e-6)


class BothLayer(GatedLayer, OwnBlockLayer):
    pass


class BothModel(TideModel):
    @classmethod
    def layer_class(cls, config):
        return extended(BothLayer, config)


class Both(TideForCausalLM):
    decoder_class = BothModel


def test_gated_tables_are_tide_with_a_gate_and_one_block_a_layer():
    """But for the router: with no eps, the gate's norm undoes what it decides."""
    control = made_control("layer-tables-and-values", rms_norm_eps=1e-12)
    tide = made(Both, rms_norm_eps=1e-12, memory_values=True)
    assert torch.allclose(logits(tide), logits(control), atol=1e-5)


def test_a_gate_learns_from_fetched_rows_as_from_tables():
    model = made_control("gated", memory_values=True)
    objective, index = Objective(model, TrainSection(), 1e-6), RowIndex.of(IDS)
    raw = model.model.memory.weight.detach()[index.ids_U].requires_grad_()
    found = []
    for rows in None, BatchRows(raw, (index,)):
        model.zero_grad()
        objective(IDS, IDS, rows).objective.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    found[1]["model.memory.weight"] = torch.zeros(64, 3, 16).index_copy(0, index.ids_U, raw.grad)
    for name, expected in found[0].items():
        assert torch.allclose(found[1][name], expected, atol=1e-6), name


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
    rows = model.model.memory(IDS).rows_UJD
    assert all(torch.equal(row, rows[:, number].view_as(row)) for number, row in enumerate(seen))
    assert len(seen) == 3
    assert [round(row.square().mean().item() ** 0.5, 2) for row in seen] == [0.1] * 3


@pytest.mark.parametrize("name", CONTROLS)
def test_a_control_has_the_parameters_of_tide(name):
    shape = TideConfig.from_preset("tide-8e-small", "paper")
    tide = estimate.count_parameters(presets.get("tide-8e-small").model).total
    with torch.device("meta"):
        model = CONTROLS[name](shape)
    assert model.num_parameters() == pytest.approx(tide, rel=0.0005 if name == NARROW else 0.03)


@pytest.mark.parametrize("name", CONTROLS)
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


@pytest.mark.parametrize("name", CONTROLS)
def test_a_saved_model_is_opened_as_what_it_is(name, tmp_path):
    from transformers import AutoModelForCausalLM

    model = made_control(name)
    model.save_pretrained(tmp_path)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(opened) is type(model)
    assert torch.equal(logits(opened), logits(model))


def test_values_hold_the_row_of_their_layer():
    """A control of values alone is TIDE with rows in values, whose routers choose the null bank."""
    control = made_control("value-tables")
    tide = made(TideForCausalLM, memory_values=True)
    tide.load_state_dict(control.state_dict(), strict=False)
    for layer in tide.model.layers:
        layer.inject = lambda h, update, *_: h + update
    assert torch.allclose(logits(control), logits(tide), atol=1e-6)
