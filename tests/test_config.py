import json

import pytest

from tide_lm import presets
from tide_lm.config import ModelConfig
from tide_lm.model import TideConfig


@pytest.mark.parametrize("name", ["base-3b", "tide-8e-1b", "tide-4e-tiny"])
def test_a_saved_config_gives_its_shape_back(name, tmp_path):
    TideConfig.from_preset(name).save_pretrained(tmp_path)
    found, expected = ModelConfig.from_folder(tmp_path), presets.get(name).model
    for field in ("vocab_size", "hidden_size", "num_key_value_heads", "head_dim", "num_memory_blocks"):
        assert getattr(found, field) == getattr(expected, field)
    assert ModelConfig.from_folder(tmp_path / "config.json") == found


def test_an_old_llama_config_gets_llamas_defaults(tmp_path):
    values = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 64, "intermediate_size": 96}
    values |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(values))
    found = ModelConfig.from_folder(tmp_path)
    assert (found.num_key_value_heads, found.head_dim, found.num_memory_blocks) == (4, 16, 0)
    assert not found.tie_word_embeddings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read a model config"),
        ("[]", "of type None"),
        ('{"model_type": "gpt2"}', "of type 'gpt2'"),
        ('{"model_type": "llama"}', "has no 'num_attention_heads'"),
    ],
)
def test_a_bad_file_is_named_with_its_fault(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        ModelConfig.from_folder(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("value", [0, -3, "4", True, None, 2.0])
def test_a_bad_value_is_named(value):
    with pytest.raises(ValueError, match=r"num_hidden_layers is .*whole number of at least 1"):
        ModelConfig(100, 64, 96, value, 4, 4, 16)
