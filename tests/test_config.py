import pytest

from tide_lm import presets
from tide_lm.config import ModelConfig
from tide_lm.model import TideConfig

SHAPE = (
    '"vocab_size": 32000, "hidden_size": 64, "intermediate_size": 96, '
    '"num_hidden_layers": 2, "num_attention_heads": 4}'
)


@pytest.mark.parametrize("name", ["base-3b", "tide-8e-1b", "tide-4e-tiny"])
def test_a_saved_config_gives_its_shape_back(name, tmp_path):
    TideConfig.from_preset(name).save_pretrained(tmp_path)
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
        ("[]", "of type None"),
        ('{"model_type": "gpt2"}', "of type 'gpt2'"),
        ('{"model_type": "llama"}', "has no 'num_attention_heads'"),
        ('{"model_type": "tide", "num_memmory_blocks": 3, ' + SHAPE, "has no 'num_memory_blocks'"),
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
