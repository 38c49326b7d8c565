"""The README of an export, from what a run directory holds."""

import json

from report.conftest import results

from tide_lm.model import TideConfig, TideForCausalLM
from tide_lm.run.model_card import model_card
from tide_lm.run.settings import RunConfig

CONFIG = RunConfig.load(None, ["model.preset=tide-3e-tiny", "data.path=/home/someone/text"])


def test_the_card_of_an_export_is_of_its_validation():
    card = model_card("mine", CONFIG, 6000, {"validation": results(3)["validation"]})
    assert card.startswith("---\nlibrary_name: transformers\n")
    parameters = TideForCausalLM(TideConfig(**CONFIG.model.shape().to_transformers())).num_parameters()
    assert f"preset `tide-3e-tiny`, {parameters:,} parameters, " in card
    assert "for 20 steps on 6,000 tokens of `text`." in card
    assert "Held-out loss: 6.5950 nats per token (1,000 tokens)." in card
    assert (
        "\n\n| decile of the target's frequency | loss | tokens |\n|---|---|---|\n| 0 | 8.800 | 100 |\n"
        in card
    )
    assert "someone" not in card
    assert "perplexity" not in card
    assert json.loads(card.split("```json")[1].split("```")[0])["data"]["path"] == "text"


def test_the_card_of_a_measured_run_has_all_of_it():
    measured = results(3)
    texts = measured["perplexity"]["texts"]
    texts["a|b\nc"] = {**texts["wiki"], "perplexity": None, "bits_per_byte": None}
    measured["benchmarks"]["limit"] = 50
    card = model_card("mine", CONFIG, 6000, measured)
    assert "| text | perplexity per token | per word | bits per byte | window | stride |" in card
    assert "| wiki | 123.257 | 2,345.678 | 1.250 | 128 | 64 |" in card
    assert r"| a\|b c | - | 2,345.678 | - | 128 | 64 |" in card
    assert "of the first 50 samples of each task" in card
    rows = card.split("| task of lm-eval |")[1].split("\n\n")[0].split("\n")[2:]
    assert rows[0] == "| arc_challenge | 30.0 | 1.0 | acc | 50 | test |"
    assert [row.split()[1] for row in rows[:8]] == list(measured["benchmarks"]["tasks"])
    assert rows[8:] == ["| average | 33.5 |  |  |  |  |", "| LAMBADA perplexity | 98.77 |  |  |  |  |"]
