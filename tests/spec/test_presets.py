import pytest

from tide_lm.model import TideConfig
from tide_lm.spec import presets


def test_every_name_gives_a_model_that_transformers_accepts():
    for name in presets.names():
        config = TideConfig.from_preset(name)
        preset = presets.get(name)
        assert preset.name == name
        assert config.num_memory_blocks == preset.model.num_memory_blocks
        assert config.head_dim == preset.model.head_dim
        assert config.rope_parameters["rope_theta"] == 500_000
        assert config.tie_word_embeddings


def test_any_number_of_blocks_has_a_name():
    assert presets.get("tide-5e-750m").model.num_memory_blocks == 5
    assert presets.get("base-750m").model.num_memory_blocks == 0


def test_what_the_paper_states_is_marked():
    assert {"hidden_size", "num_hidden_layers", "vocab_size"} <= presets.get("tide-8e-1b").stated
    assert "intermediate_size" not in presets.get("tide-8e-1b").stated
    assert "hidden_size" not in presets.get("tide-8e-3b").stated
    assert not presets.get("tide-4e-tiny").stated
    assert "num_memory_blocks" in presets.get("tide-24e-1b").stated
    assert "num_memory_blocks" not in presets.get("tide-24e-3b").stated
    assert "num_memory_blocks" not in presets.get("tide-5e-1b").stated


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("tide-8e-1B", "did you mean 'tide-8e-1b'"),
        ("tide8e-1b", "did you mean 'tide-8e-1b'"),
        ("tide-0e-1b", "no tables, so it is the base model: write 'base-1b'"),
        ("gpt", "SIZE one of tiny, 6m, small"),
    ],
)
def test_an_unknown_name_gets_a_hint(name, hint):
    with pytest.raises(ValueError, match=hint):
        presets.get(name)


def test_overrides_win_over_the_preset():
    assert TideConfig.from_preset("tide-8e-1b", vocab_size=1000).vocab_size == 1000
