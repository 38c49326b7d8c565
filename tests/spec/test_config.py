import json

import pytest

from tide_lm.model import TideConfig
from tide_lm.spec import presets
from tide_lm.spec.config import ModelConfig

SHAPE = (
    '"vocab_size": 32000, "hidden_size": 64, "intermediate_size": 96, '
    '"num_hidden_layers": 2, "num_attention_heads": 4}'
)


@pytest.mark.parametrize("name", ["base-3b", "tide-8e-1b", "tide-4e-tiny"])
def test_a_saved_config_gives_its_shape_back(name, tmp_path):
    TideConfig.from_preset(name, recipe="paper").save_pretrained(tmp_path)
    assert ModelConfig.from_folder(tmp_path) == presets.get(name).model
    assert ModelConfig.from_folder(tmp_path / "config.json") == presets.get(name).model


def test_an_old_llama_config_gets_llamas_defaults(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", ' + SHAPE)
    found = ModelConfig.from_folder(tmp_path)
    assert (found.num_key_value_heads, found.head_dim, found.num_memory_blocks) == (4, 16, 0)
    assert not found.tie_word_embeddings
    assert (found.rope_theta, found.rms_norm_eps) == (10_000, 1e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read a model config"),
        ("[]", "has no model_type"),
        ("[" * 100_000, "cannot read a model config"),
        ('{"model_type": "gpt2"}', "of type 'gpt2'"),
        ('{"model_type": "llama"}', "has no 'hidden_size'"),
        ('{"model_type": "tide", "num_memmory_blocks": 3, ' + SHAPE, "has no 'num_memory_blocks'"),
    ],
)
def test_a_bad_file_is_named_with_its_fault(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        ModelConfig.from_folder(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("value", [0, -3, "4", True, None, 2.0, 10**400])
def test_a_bad_value_is_named(value):
    with pytest.raises(ValueError, match=r"num_hidden_layers is .*whole number from 1 to"):
        ModelConfig(100, 64, 96, value, 4, 4, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_position_embeddings": "x"}, "max_position_embeddings is 'x'"),
        ({"max_position_embeddings": -5}, "max_position_embeddings is -5"),
        ({"attention_bias": True}, "has biases"),
        ({"memory_dim": 7}, "memory_dim is 7: it must equal hidden_size, 64"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0: it must divide"),
        ({"hidden_size": "64"}, "must divide hidden_size, '64'"),
        ({"hidden_size": 65}, "num_attention_heads is 4: it must divide hidden_size, 65"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3: it must divide"),
        ({"rope_parameters": "none"}, None),
    ],
)
def test_a_config_that_no_model_can_have_is_refused(tmp_path, change, message):
    values = json.loads('{"model_type": "llama", ' + SHAPE) | change
    (tmp_path / "config.json").write_text(json.dumps(values))
    if message is None:
        ModelConfig.from_folder(tmp_path)
    else:
        with pytest.raises(ValueError, match=message):
            ModelConfig.from_folder(tmp_path)
