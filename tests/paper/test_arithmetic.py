"""The paper's numbers come out of `estimate` and `presets`, and the counts are those of real models."""

from dataclasses import replace

import pytest
import torch

from tide_lm import TideConfig, TideForCausalLM
from tide_lm.spec import estimate, presets

GB = 1e9
# Section 2: 200B tokens, B = 8, T = 2048; a token that WikiText-103 holds once has f = 8.3e-9.
TOKENS, BATCH, SEQUENCE, PER_COUNT = 200e9, 8, 2048, 8.3e-9


@pytest.mark.parametrize(("bits", "gigabytes"), [(16, "4.20"), (8, "2.10"), (4, "1.05")])
def test_eight_blocks_take_the_papers_gigabytes(bits: int, gigabytes: str) -> None:
    assert f"{estimate.table_bytes(presets.get('tide-8e-1b').model, bits) / GB:.2f}" == gigabytes


def test_twenty_four_blocks_take_the_papers_gigabytes_in_4_bits() -> None:
    assert f"{estimate.table_bytes(presets.get('tide-24e-1b').model, 4) / GB:.3f}" == "3.152"


def test_the_base_takes_the_papers_gigabytes_in_8_bits() -> None:
    assert f"{estimate.count_parameters(presets.get('base-1b').model).total / GB:.2f}" == "1.03"


@pytest.mark.parametrize("blocks", presets.PAPER_BLOCKS)
def test_what_stays_in_memory_is_the_base_within_one_percent(blocks: int) -> None:
    """Figure vram-ssd: K moves the tables alone."""
    tide = estimate.count_parameters(presets.get(f"tide-{blocks}e-1b").model)
    base = estimate.count_parameters(presets.get("base-1b").model)
    assert tide.backbone == base.total
    assert base.total < tide.resident < 1.01 * base.total


@pytest.mark.parametrize(
    ("size", "millions"), [("350m", "348.4"), ("750m", "751.5"), ("1b", "1033.5"), ("3b", "3212.7")]
)
def test_presets_have_the_parameters_that_their_names_promise(size: str, millions: str) -> None:
    parameters = estimate.count_parameters(presets.get(f"base-{size}").model)
    assert f"{parameters.total / 1e6:.1f}" == millions
    assert parameters.total == parameters.backbone


def test_the_largest_rank_that_saves_space_is_the_papers() -> None:
    model = presets.get("tide-8e-1b").model
    V, D = model.vocab_size, model.hidden_size
    rank = estimate.rank_bound(V, D)
    assert rank == 2015
    assert rank * (V + D) <= V * D < (rank + 1) * (V + D)


@pytest.mark.parametrize(("count", "updates"), [(1, 1660), (4, 6640), (10, 16_600)])
def test_rare_tokens_get_the_papers_expected_updates(count: int, updates: int) -> None:
    exact, occurrences = estimate.expected_updates(count * PER_COUNT, TOKENS, BATCH, SEQUENCE)
    assert occurrences == pytest.approx(updates, rel=1e-9)
    assert exact == pytest.approx(updates, rel=1e-3)


def test_the_commonest_tokens_are_updated_at_every_step_however_often_they_occur() -> None:
    """The paper's 1.66e9 is occurrences; its exact formula saturates at the number of steps."""
    exact, occurrences = estimate.expected_updates(1e6 * PER_COUNT, TOKENS, BATCH, SEQUENCE)
    steps = TOKENS / (BATCH * SEQUENCE)
    assert f"{occurrences:.2e}" == "1.66e+09"
    assert f"{exact:.2e}" == f"{steps:.2e}" == "1.22e+07"
    assert exact <= steps


def test_the_gradient_ratio_bound_is_its_formula_not_the_ratio_of_frequencies() -> None:
    """The paper prints epsilon / c = 1e-6, but kappa is 1 here, so BT stays in the bound (eq:grad_ratio)."""
    bound = estimate.gradient_ratio_bound(PER_COUNT, 1e6 * PER_COUNT, BATCH, SEQUENCE)
    assert f"{bound:.2e}" == "1.36e-04"
    spread_bound = estimate.gradient_ratio_bound(PER_COUNT, 1e6 * PER_COUNT, BATCH, SEQUENCE, spread=10)
    assert f"{spread_bound:.2e}" == "1.36e-03"


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": False}, {"memory_values": True}, {"memory_pair_rows": 7}],
    ids=["tied", "untied", "values", "pairs"],
)
@pytest.mark.parametrize(
    "name", ["base-1b", "tide-8e-1b", "tide-24e-3b", "tide-2e-750m", "base-350m", "tide-4e-tiny"]
)
def test_counts_are_those_of_the_real_model(name: str, changes: dict[str, bool]) -> None:
    with torch.device("meta"):
        model = TideForCausalLM(TideConfig.from_preset(name, recipe="paper", **changes))
    found = {"backbone": 0, "routers": 0, "value_gates": 0, "gains": 0, "tables": 0}
    for parameter_name, parameter in model.named_parameters():
        if parameter_name == "model.memory.weight":
            part = "tables"
        elif parameter_name == "model.memory.norm.weight":
            part = "gains"
        elif ".router." in parameter_name:
            part = "routers"
        elif ".value_gate." in parameter_name:
            part = "value_gates"
        else:
            part = "backbone"
        found[part] += parameter.numel()

    counted = estimate.count_parameters(replace(presets.get(name).model, **changes))
    assert counted == estimate.Parameters(**found)
    assert counted.total == model.num_parameters()
