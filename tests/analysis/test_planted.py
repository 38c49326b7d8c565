"""Each analysis on data where the right answer is known."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import nn

from tide_lm.analysis import collapse, tables
from tide_lm.analysis.by_bin import decile_means, group_spread
from tide_lm.analysis.contexts import PAIRS, TEMPLATES
from tide_lm.analysis.footprint import footprint
from tide_lm.analysis.gradients import gradients
from tide_lm.analysis.layer_drop import layer_drop
from tide_lm.analysis.norms import norms
from tide_lm.analysis.routing import routing
from tide_lm.analysis.updates import updates
from tide_lm.data.frequency import FrequencyBins
from tide_lm.evaluation.perplexity import Windows, perplexity
from tide_lm.evaluation.texts import TextSettings
from tide_lm.model.opened import OpenedModel, open_model
from tide_lm.spec import estimate, presets

WINDOWS = Windows(16, 16, 4)


def read(text, stride=16):
    return TextSettings({"text": text}, window=16, stride=stride, batch=4)


@pytest.fixture
def bins():
    """Twenty ids of the small tokenizer in ten deciles, two each, in the order of ids; the rest unbinned."""
    bins_V, counts_V = np.full(300, -1, np.int8), np.zeros(300, np.int64)
    bins_V[100:120] = np.arange(20) // 2
    counts_V[100:120] = np.arange(1, 21)
    return FrequencyBins(bins_V, counts_V)


@pytest.fixture
def opened(tiny_model, tokenizer, bins, tmp_path):
    model = tiny_model(vocab_size=300, tie_word_embeddings=False)
    return OpenedModel("planted", "planted", tmp_path, model.config, lambda: model, tokenizer, lambda: bins)


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(
        "every token knows the layer beneath the context, and every layer too. " * 6
    )
    return tmp_path / "text.txt"


def test_means_by_decile_are_those_of_the_ids(bins):
    values = np.arange(300, dtype=float)
    assert decile_means(values, bins) == [100.5 + 2 * decile for decile in range(10)]
    spread = group_spread(values, bins)
    assert spread["rare"]["ids"] == 6
    assert spread["rare"]["mean"] == pytest.approx(102.5)
    assert sum(spread["common"]["histogram"]) == 6
    empty = FrequencyBins.none(300)
    assert decile_means(values, empty) == [None] * 10
    assert group_spread(values, empty)["rare"]["mean"] is None


def test_norms_are_those_of_planted_rows(opened):
    with torch.no_grad():
        rows = opened.model.get_input_embeddings().weight
        rows.copy_(nn.functional.normalize(torch.randn_like(rows), dim=-1))
        rows[100:120] *= torch.arange(1.0, 21.0)[:, None]
        tables = opened.model.model.memory.weight
        tables.copy_(torch.tensor([1.0, 2.0, 5.0])[:, None] * rows[:, None])
    found = norms(opened)
    assert found["embedding"] == pytest.approx([1.5 + 2 * decile for decile in range(10)])
    for size, means in zip((1, 2, 5), found["tables"], strict=True):
        assert means == pytest.approx([size * (1.5 + 2 * decile) for decile in range(10)])
    assert found["growth"] == []


def test_norms_grow_from_checkpoint_to_checkpoint(trained):
    found = norms(open_model(str(trained)))
    assert [(point["step"], point["tokens"]) for point in found["growth"]] == [(2, 256), (4, 512)]
    assert found["growth"][-1]["embedding"] == pytest.approx(found["embedding"])


def test_updates_have_both_columns_and_saturate():
    counts = np.array([1] * 50 + [10**6] * 50)
    bins = FrequencyBins(np.arange(100).astype(np.int8) // 10, counts)
    found = updates(bins, 200e9, 8, 2048)
    rare, common = found["rows"]["0"], found["rows"]["common"]
    steps = 200e9 / (8 * 2048)
    assert rare["occurrences"] == pytest.approx(200e9 / counts.sum())
    assert rare["expected_updates"] == pytest.approx(rare["occurrences"], rel=0.01)
    assert common["expected_updates"] == pytest.approx(steps)
    assert common["occurrences"] > 300 * steps
    bound = estimate.gradient_ratio_bound(1 / counts.sum(), 10**6 / counts.sum(), 8, 2048)
    assert rare["ratio_bound"] == pytest.approx(bound)


def test_gradients_are_read_and_the_amplification_is_k_where_tables_are_equal(tmp_path, bins):
    (tmp_path / "results").mkdir()
    recorded = {
        "embedding_input": np.arange(300.0),
        "embedding_head": np.full(300, 2.0),
        "tables": np.repeat(np.arange(300.0)[:, None], 4, 1),
    }
    save_file(recorded, tmp_path / "results" / "gradients.safetensors")
    found = gradients(tmp_path, bins)
    assert found["embedding_input"] == [100.5 + 2 * decile for decile in range(10)]
    assert found["embedding_head"] == [2.0] * 10
    assert found["amplification"] == [4.0] * 10
    with pytest.raises(ValueError, match=r"train\.record_gradients=true"):
        gradients(tmp_path / "none", bins)


def test_a_constant_router_gives_flat_rows(opened, text):
    with torch.no_grad():
        for layer in opened.model.model.layers:
            layer.router.weight.zero_()
    found = routing(opened, read(text))
    for layer in found["by_layer"]:
        for row, tokens in zip(layer, found["tokens"], strict=True):
            assert (row is None) == (tokens == 0)
            assert row is None or row == pytest.approx([0.25] * 4)


def test_routing_is_the_mean_over_input_tokens_of_each_decile(opened, text, tokenizer):
    ids = [tokenizer.bos_token_id, *tokenizer(text.read_text()).input_ids]
    bins_V = np.where(np.arange(300) % 2, 3, -1).astype(np.int8)
    bins_V[tokenizer.bos_token_id] = 7
    opened = replace(opened, read_frequencies=lambda: FrequencyBins(bins_V, np.ones(300, np.int64)))
    sums, counts = torch.zeros(2, 11, 4, dtype=torch.float64), torch.zeros(11)
    for begin in range(0, len(ids) - 1, 16):
        window = torch.tensor([ids[begin : min(begin + 16, len(ids) - 1)]])
        with torch.no_grad():
            weights = opened.model(window, output_router_weights=True).router_weights
        for place, id in enumerate(window[0].tolist()):
            row = bins_V[id] if bins_V[id] >= 0 else 10
            counts[row] += 1
            for layer in range(2):
                sums[layer, row] += weights[layer][0, place].double()
    found = routing(opened, read(text, stride=8))  # whatever the stride, no token is counted twice
    assert found["tokens"] == counts.tolist()
    for layer in range(2):
        for row in (3, 7, 10):
            expected = (sums[layer, row] / counts[row]).tolist()
            assert found["by_layer"][layer][row] == pytest.approx(expected, abs=1e-6)


def test_a_text_that_fills_no_window_and_a_tokenizer_that_does_not_fit_are_refused(opened, text, tiny_model):
    (short := text.with_name("short.txt")).write_text("every token")
    with pytest.raises(ValueError, match="window of 16"):
        routing(opened, read(short))
    small = tiny_model(vocab_size=50)
    opened = replace(opened, config=small.config, load=lambda: small)
    for look in (
        lambda: routing(opened, read(text)),
        lambda: collapsed(opened),
        lambda: perplexity(small, opened.tokenizer, text, WINDOWS),
    ):
        with pytest.raises(ValueError, match="model has 50"):
            look()


def test_dropping_every_layer_is_the_base_path(opened, text, tiny_model, tokenizer):
    found = layer_drop(opened, read(text))["texts"]["text"]
    base = tiny_model(vocab_size=300, tie_word_embeddings=False, num_memory_blocks=0)
    base.load_state_dict(opened.model.state_dict(), strict=False)
    assert found["full"] == perplexity(opened.model, tokenizer, text, WINDOWS)["perplexity"]
    expected = perplexity(base, tokenizer, text, WINDOWS)["perplexity"]
    assert found["without_any"] == pytest.approx(expected, rel=1e-6)
    assert len(found["without_layer"]) == 2
    assert found["change"][0] == pytest.approx(found["without_layer"][0] / found["full"] - 1)


def test_distances_of_planted_tables(opened):
    memory = opened.model.model.memory
    with torch.no_grad():
        rows = opened.model.get_input_embeddings().weight
        memory.norm.weight.fill_(1)
        gain_D = memory.norm.weight[2] = torch.linspace(0.5, 2, rows.shape[1])
        memory.weight[:, 0], memory.weight[:, 1], memory.weight[:, 2] = 3 * rows, -rows, rows / gain_D
    found = tables.distances(opened)
    assert found["tables"] == ["E", "M1", "M2", "M3"]
    assert found["ids"] == 20
    distance = np.array(found["distance"])
    assert distance[0] == pytest.approx([0, 0, 2, 0], abs=1e-5)
    assert np.allclose(distance, distance.T)


def test_planted_neighbours_are_found(opened, tokenizer):
    """Ids that occur lie on a circle in their order: neighbours are the next on both sides."""
    memory = opened.model.model.memory
    with torch.no_grad():
        rows = opened.model.get_input_embeddings().weight
        memory.norm.weight.fill_(1)
        rows.normal_()
        angle = torch.arange(20) / 20 * 2 * torch.pi
        rows[100:120] = 0
        rows[100:120, 0], rows[100:120, 1] = angle.cos(), angle.sin()
        memory.weight[:, 0] = rows
        memory.weight[:, 1] = rows
        memory.weight[100:120, 1] = rows[100:120][(7 * torch.arange(20)) % 20]  # another order
    known = torch.arange(100, 120)
    e, same, other, _ = tables.nearest(opened.model, torch.tensor([105]), known)
    assert set(e[0].tolist()) == {100, 101, 102, 103, 104, 106, 107, 108, 109, 110}
    assert set(same[0].tolist()) == set(e[0].tolist())
    assert set(other[0].tolist()) != set(e[0].tolist())
    found = tables.neighbours(opened, sample=4)
    assert found["rare"]["ids"] == 4
    assert found["rare"]["jaccard"][0] == [1.0] * 4
    assert max(found["common"]["jaccard"][1]) < 1
    word = tables.neighbours(opened, [" layer".strip()])["words"]["layer"]
    assert len(word["neighbours"]) == 4
    with pytest.raises(ValueError, match="'unheardof' is not a single token"):
        tables.neighbours(opened, ["unheardof"])


PAIR = ("layer", "token")


def collapsed(opened):
    return collapse.category(
        opened.model, opened.tokenizer, [PAIR, ("unheardof", "layer")], ["every", "knows the"], 0.1
    )


def _ids(opened) -> list[int]:
    return [tables.single_token(opened, word) for word in PAIR]


def test_two_identical_tokens_have_distance_zero_and_a_memory_tells_them_apart(opened):
    first, second = _ids(opened)
    memory = opened.model.model.memory
    with torch.no_grad():
        for rows in (opened.model.get_input_embeddings().weight, memory.weight):
            rows[second] = rows[first]
    same = collapsed(opened)
    assert same["pairs"] == [list(PAIR)]
    assert same["skipped"] == [["unheardof", "layer"]]
    assert same["distance"] == [[0.0, 0.0]]
    assert same["collapse_set"] == [[0], [0]]
    with torch.no_grad():
        memory.weight[second] = -memory.weight[first]
    apart = collapsed(opened)
    assert min(apart["distance"][0]) > 0.01
    assert apart["collapse_set"] == [[], []]
    assert apart["ffn"]["members"][0] == [0]  # the first memory comes after the first FFN
    assert apart["ffn"]["members"][1] == []
    assert apart["ffn"]["input_distance"][0][0] == 0


def test_the_bound_of_the_ffn_is_by_pair_and_layer(opened):
    pairs = [PAIR, ("the", "knows")]
    found = collapse.category(opened.model, opened.tokenizer, pairs, ["knows the"], 10.0)
    assert found["collapse_set"] == [[0, 1], [0, 1]]
    assert found["ffn"].pop("members") == [[0, 1], [0, 1]]
    shapes = {name: np.shape(values) for name, values in found["ffn"].items()}
    assert shapes == dict.fromkeys(("input_distance", "slope", "bound", "separation"), (2, 2))
    alone = collapse.category(opened.model, opened.tokenizer, pairs[1:], ["knows the"], 10.0)["ffn"]
    for name, values in found["ffn"].items():
        assert values[1] == pytest.approx(alone[name][0], rel=1e-3)
    ffn = {name: np.array(values) for name, values in found["ffn"].items()}
    assert ffn["bound"] == pytest.approx(ffn["slope"] * ffn["input_distance"])
    assert (ffn["separation"] <= ffn["bound"] * 1.001).all()


def test_near_states_of_a_bfloat16_model_are_told_apart_in_float32(opened):
    """Its FFN sees inputs that differ by less than its rounding."""
    inputs_WLD = torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(0)).repeat(2, 1, 1)
    inputs_WLD[1] += 1e-4 * torch.randn(2, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        low = opened.model.bfloat16()
        found = collapse._ffn(low, inputs_WLD, 0.1)
        exact = collapse._ffn(low.float(), inputs_WLD, 0.1)
    for name, values in exact.items():
        assert np.array(found[name]) == pytest.approx(np.array(values), rel=1e-3)


def test_distances_are_those_of_the_hidden_states(opened, tokenizer):
    found = collapsed(opened)
    apart, relative = torch.zeros(2), torch.zeros(2)
    for template in ("every", "knows the"):
        prefix = [tokenizer.bos_token_id, *tokenizer(template).input_ids]
        found_here = collapse.last_states(opened.model, torch.tensor([[*prefix, id] for id in _ids(opened)]))[
            0
        ].detach()
        with torch.no_grad():
            states = opened.model(
                torch.tensor([[*prefix, id] for id in _ids(opened)]), output_hidden_states=True
            ).hidden_states
            assert torch.allclose(found_here[:, 0], states[1][:, -1], atol=1e-6)
            last = opened.model.model.norm(found_here[:, 1])  # the model returns it after its norm
            assert torch.allclose(last, states[2][:, -1], atol=1e-5)
        here = (found_here[0] - found_here[1]).norm(dim=-1)
        apart += here / 2
        relative += here / found_here.norm(dim=-1).mean(0) / 2
    assert found["distance"][0] == pytest.approx(apart.tolist(), rel=1e-5)
    assert found["relative"][0] == pytest.approx(relative.tolist(), rel=1e-5)


def test_a_mixture_of_experts_has_distances_and_no_bound(tokenizer):
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
    )
    found = collapse.category(MixtralForCausalLM(config).eval(), tokenizer, [PAIR], ["every"], 0.1)
    assert len(found["distance"][0]) == 2
    assert found["ffn"] is None


def test_states_of_a_model_with_a_narrow_output_are_those_of_its_layers(tokenizer):
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"hidden_size": 16, "word_embed_proj_dim": 8, "ffn_dim": 16, "do_layer_norm_before": False}
    config = OPTConfig(vocab_size=300, num_hidden_layers=3, num_attention_heads=2, **sizes)
    found = collapse.category(OPTForCausalLM(config).eval(), tokenizer, [PAIR], ["every"], 0.1)
    assert len(found["distance"][0]) == 2  # after the last layer the state is projected


def test_neighbours_of_weights_that_are_not_finite_are_refused(opened):
    with torch.no_grad():
        opened.model.get_input_embeddings().weight[105] = torch.nan
    with pytest.raises(ValueError, match="E has rows that are not finite"):
        tables.neighbours(opened)


def test_the_largest_slope_is_the_norm_of_a_linear_map_and_bounds_a_gated_one():
    torch.manual_seed(0)
    weight = torch.randn(6, 5)
    first, second = torch.randn(3, 5), torch.randn(3, 5)
    found = collapse.largest_slope(lambda x: x @ weight.T, first, second)
    assert found.tolist() == pytest.approx([torch.linalg.matrix_norm(weight, 2).item()] * 3, rel=1e-3)
    square = collapse.largest_slope(
        torch.square, torch.tensor([[1.0], [-3], [2]]), torch.tensor([[2.0], [1], [2.5]])
    )
    assert square.tolist() == pytest.approx([4, 6, 5])  # another for each pair
    gated = nn.Linear(5, 5)

    def ffn(x):
        return nn.functional.silu(gated(x)) * x

    slope = collapse.largest_slope(ffn, first, second)
    change = (ffn(first) - ffn(second)).norm(dim=-1)
    assert (change <= slope * (first - second).norm(dim=-1) * 1.001).all()


def test_the_contexts_are_a_hundred_and_fifty_and_their_own():
    assert PAIRS.keys() == TEMPLATES.keys()
    templates = [template for group in TEMPLATES.values() for template in group]
    assert len(set(templates)) == 150
    assert all(len(set(pairs)) == len(pairs) and all(a != b for a, b in pairs) for pairs in PAIRS.values())


def test_the_footprint_is_the_estimates():
    shape = presets.get("tide-8e-1b").model
    rows = {(row["blocks"], row["bits"]): row for row in footprint(shape)["rows"]}
    assert rows[24, 4]["ssd_bytes"] == estimate.table_bytes(replace(shape, num_memory_blocks=24), 4)
    assert rows[0, 8]["ssd_bytes"] == 0
    assert round(rows[0, 8]["vram_bytes"] / 1e9, 2) == 1.03
    json.dumps(footprint(shape))
    assert rows[16, 8]["vram_bytes"] == estimate.resident_bytes(replace(shape, num_memory_blocks=16), 8)
