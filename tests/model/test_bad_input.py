"""Bad input gets an error that says what, the value, and what to change."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from tide_lm.model import Memory, TideConfig, TideForCausalLM
from tide_lm.spec.config import REMOVED, ModelConfig


@pytest.mark.parametrize("blocks", [0, 3])
@pytest.mark.parametrize("outside", [53, -1, 10**9])
def test_a_token_outside_the_vocabulary_is_named(tiny_model, token_ids, blocks, outside):
    token_ids[1, 4] = outside
    with pytest.raises(ValueError, match=rf"{outside} .*53.*use the tokenizer"):
        tiny_model(num_memory_blocks=blocks)(token_ids)


def test_the_config_of_another_model_is_refused():
    from transformers import LlamaConfig

    with pytest.raises(ValueError, match=r"TideConfig.*LlamaConfig"):
        TideForCausalLM(LlamaConfig())


def test_a_call_without_any_input_is_refused(tiny_model):
    with pytest.raises(ValueError, match="pass input_ids"):
        tiny_model()()


def test_no_tokens_at_all_are_refused(tiny_model):
    with pytest.raises(ValueError, match=r"shape \(2, 0\) hold no token"):
        tiny_model()(torch.empty(2, 0, dtype=torch.long))


def test_embeddings_alone_are_refused_and_with_a_memory_accepted(tiny_model, token_ids):
    model = tiny_model()
    embeddings = model.get_input_embeddings()(token_ids)
    with pytest.raises(ValueError, match="carry no token identity"):
        model(inputs_embeds=embeddings)
    with pytest.raises(ValueError, match="carry no token identity"):
        model.generate(inputs_embeds=embeddings, max_new_tokens=2)
    memory = model.model.memory(token_ids)
    assert torch.equal(model(inputs_embeds=embeddings, memory=memory).logits, model(token_ids).logits)
    base = tiny_model(num_memory_blocks=0)
    assert torch.equal(base(inputs_embeds=embeddings).logits, base(token_ids).logits)


@pytest.mark.parametrize(
    ("rows", "index", "message"),
    [
        ((18, 2, 32), None, r"rows of shape \(18, 2, 32\): this model needs \(U, 3, 32\)"),
        ((18, 32), None, r"rows of shape \(18, 32\)"),
        ((18, 0, 32), None, r"rows of shape \(18, 0, 32\)"),
        ((17, 3, 32), None, "17 rows for 2 x 9 tokens"),
        ((5, 3, 32), (2, 1), r"index of shape \(2, 1\) for 2 x 9 tokens"),
        ((5, 3, 32), (1, 9), r"index of shape \(1, 9\)"),
    ],
)
@pytest.mark.parametrize("values", [False, True], ids=["", "rows in values"])
def test_a_memory_that_does_not_fit_is_refused(tiny_model, token_ids, rows, index, message, values):
    index_BT = None if index is None else torch.zeros(index, dtype=torch.long)
    with pytest.raises(ValueError, match=message):
        tiny_model(memory_values=values)(token_ids, memory=Memory(torch.zeros(rows), index_BT))


def test_a_memory_is_refused_where_it_cannot_be_used(tiny_model, token_ids):
    model = tiny_model()
    memory = model.model.memory(token_ids)
    with pytest.raises(ValueError, match="leave memory= out"):
        model.generate(token_ids, max_new_tokens=2, memory=memory)
    with pytest.raises(ValueError, match="passed to a base model"):
        tiny_model(num_memory_blocks=0)(token_ids, memory=memory)


@pytest.mark.parametrize("layer", [2, -1])
def test_dropping_a_layer_that_does_not_exist_is_refused(tiny_model, token_ids, layer):
    with pytest.raises(ValueError, match=f"layer {layer}.* 0 to 1"):
        tiny_model()(token_ids, drop_memory_layers=[layer])


@pytest.mark.parametrize("layers", [[0.5], "01", 1])
def test_layers_that_are_not_numbers_are_refused(tiny_model, token_ids, layers):
    with pytest.raises(TypeError):
        tiny_model()(token_ids, drop_memory_layers=layers)


def test_a_bare_tensor_is_not_a_memory(tiny_model, token_ids):
    rows = tiny_model().model.memory(token_ids).rows_UJD
    with pytest.raises(ValueError, match=r"Tensor.*pass Memory"):
        tiny_model()(token_ids, memory=rows)


def test_memory_dim_other_than_hidden_size_is_refused(tiny_config):
    assert not hasattr(tiny_config(memory_dim=32), "memory_dim")
    with pytest.raises(ValueError, match=r"memory_dim is 16.*32"):
        tiny_config(memory_dim=16)


def test_no_layers_and_negative_blocks_are_refused(tiny_config, tiny_model, tmp_path):
    with pytest.raises(StrictDataclassError, match="num_hidden_layers is 0"):
        tiny_config(num_hidden_layers=0)
    with pytest.raises(StrictDataclassError, match="num_memory_blocks is -1"):
        tiny_config(num_memory_blocks=-1)
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(StrictDataclassError, match="num_memory_blocks is -1"):
        type(tiny_model()).from_pretrained(tmp_path, num_memory_blocks=-1)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("num_memmory_blocks", "num_memory_blocks"),
        ("num_memory_block", "num_memory_blocks"),
        ("memory_blocks", "num_memory_blocks"),
        ("memory_gain", "memory_gain_init"),
    ],
)
def test_a_key_that_looks_like_ours_is_refused_with_the_right_one(key, meant):
    with pytest.raises(ValueError, match=f"'{key}': did you mean '{meant}'"):
        TideConfig(**{key: 4})


def test_foreign_keys_pass_as_in_transformers():
    config = TideConfig(some_other_project="x", vision_dim=3, num_memory_tokens=4, memory="ours")
    assert config.some_other_project == "x"
    assert TideConfig(**config.to_dict()).vision_dim == 3


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_memory_blocks", "8"),
        ("num_memory_blocks", 2.5),
        ("num_memory_blocks", True),
        ("num_memory_blocks", None),
        ("memory_gain_init", "1"),
        ("memory_gain_init", float("nan")),
        ("memory_values", 1),
        ("memory_value_scale", float("inf")),
        ("memory_value_scale", -1),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_and_named(key, value):
    with pytest.raises(StrictDataclassError, match=key):
        TideConfig(**{key: value})


def test_rows_that_do_not_fit_into_values_are_refused(tiny_config):
    with pytest.raises(StrictDataclassError, match=r"hidden_size is 32.* 24"):
        tiny_config(memory_values=True, head_dim=12)
    with pytest.raises(StrictDataclassError, match=r"hidden_size is 32.*all heads, 0,"):
        tiny_config(memory_values=True, head_dim=0)
    tiny_config(memory_values=True, head_dim=12, num_memory_blocks=0)  # where there are no rows


@pytest.mark.parametrize("name", REMOVED)
def test_an_extension_of_an_earlier_version_is_refused_and_may_be_off(tiny_config, name):
    with pytest.raises(ValueError, match=rf"{name} is True.*0\.1\.0.*train a model anew"):
        tiny_config(**{name: True})
    assert not hasattr(tiny_config(**{name: False}), name)
    values = {**tiny_config().to_dict(), "intermediate_size": 48, "model_type": "tide"}
    with pytest.raises(ValueError, match=rf"{name} is True"):
        ModelConfig.from_values({**values, name: True})
    assert ModelConfig.from_values({**values, name: False}) == ModelConfig.from_values(values)


def test_a_gain_may_be_written_as_a_whole_number():
    assert TideConfig(memory_gain_init=0).memory_gain_init == 0


def test_ids_off_the_cpu_are_read_only_when_asked(tiny_config, token_ids, monkeypatch):
    """Reading ids on a GPU waits for it. Meta tensors cannot be read at all, so they stand in for one."""
    with torch.device("meta"):
        model = TideForCausalLM(tiny_config())
        ids = torch.zeros(2, 9, dtype=torch.long)
    monkeypatch.delenv("TIDE_LM_DEBUG", raising=False)
    assert model(ids).logits.shape == (2, 9, 53)
    monkeypatch.setenv("TIDE_LM_DEBUG", "1")
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        model(ids)


def test_fake_tensors_pass_as_trackers_of_memory_need(tiny_model):
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = tiny_model()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert model(torch.zeros(2, 9, dtype=torch.long), use_cache=False).logits.shape == (2, 9, 53)
