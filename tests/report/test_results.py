"""Reading run directories."""

import json
import math

import pytest

from tide_lm.report.catalogue import FIGURES
from tide_lm.report.results import MissingError, alike, open_runs


def test_a_run_says_what_it_is(two_runs):
    base, tide = open_runs(two_runs)
    assert (base.name, base.blocks, tide.blocks) == ("base", 0, 3)
    assert tide.parameters.total > base.parameters.total
    assert tide.tokens == 6000
    assert len(tide.metrics) == 60  # half a last line is left out
    assert list(tide.losses) == ["validation", "wiki"]


def test_runs_of_one_name_go_by_their_paths(plant, tmp_path):
    paths = [plant(tmp_path / part / "run") for part in "ab"]
    assert [run.name for run in open_runs(paths)] == [str(path) for path in paths]


def test_a_wrong_call_says_what_to_give(plant, tmp_path):
    with pytest.raises(ValueError, match="there is no run nowhere"):
        open_runs([tmp_path.relative_to(tmp_path) / "nowhere"])
    path = plant(tmp_path / "run")
    with pytest.raises(ValueError, match="given twice"):
        open_runs([path, path])


def test_a_missing_result_names_its_command(plant, tmp_path):
    (run,) = open_runs([plant(tmp_path / "x", without=("routing",))])
    with pytest.raises(
        MissingError, match=r"x has no results/routing.json: run `tide-lm analyze routing \S+x --text"
    ):
        run.result("routing")


@pytest.mark.parametrize(
    ("what", "content", "reason"),
    [
        ("norms", "{", "Expecting property name"),
        ("norms", "[]", "norms is '[]' and should be dict"),
        ("norms", '{"provenance": {"machine": 1}}', "norms.provenance.machine is '1' and should be dict"),
        ("norms", '{"subject": "x"}', "norms.subject is 'x'"),
        ("norms", '{"embedding": [0, 1]}', "norms.embedding has 2 items"),
        ("validation", '{"tokens": 1}', "validation has no 'loss'"),
        ("validation", '{"loss": "x", "tokens": 1}', "validation.loss is 'x' and should be int | float"),
        ("validation", '{"loss": 1, "tokens": 1, "loss_by_decile": []}', "loss_by_decile has 0 items"),
        ("perplexity", '{"texts": []}', "perplexity.texts is '[]'"),
        ("perplexity", '{"texts": {"x": {"loss": 1, "tokens": 1, "bytes": 1}}}', "has no 'window'"),
        ("routing", '{"text": "x", "tokens": [], "by_layer": []}', "routing.by_layer has 0 items"),
        ("routing", '{"text": "x", "tokens": [], "by_layer": "x"}', "routing.by_layer is 'x'"),
        ("updates", '{"tokens": 1, "batch": 1, "sequence": 1, "rows": {"0": {}}}', "rows.0 has no 'ids'"),
        ("footprint", '{"blocks": "x"}', "footprint.blocks is 'x' and should be int"),
    ],
)
def test_a_broken_result_names_its_file(what, content, reason, plant, tmp_path):
    path = plant(tmp_path / "x")
    (path / "results" / f"{what}.json").write_text(content)
    (run,) = open_runs([path])
    assert list(run.damaged) == [what]
    with pytest.raises(MissingError) as raised:
        run.result(what)
    assert f"results/{what}.json is damaged" in str(raised.value)
    assert reason in str(raised.value)
    assert run.result("distances")


def _without(*keys):
    """Return a function that takes out a part of a result, named by the keys that lead to it."""

    def take_out(result) -> None:
        for key in keys[:-1]:
            result = result[key]
        del result[keys[-1]]

    return take_out


PAIRS = ("categories", "homophones")


@pytest.mark.parametrize(
    ("what", "spoil", "reason"),
    [
        ("collapse", _without(*PAIRS, "distance"), "categories.homophones has no 'distance'"),
        ("collapse", _without(*PAIRS, "collapse_set"), "categories.homophones has no 'collapse_set'"),
        ("collapse", _without(*PAIRS, "ffn"), "categories.homophones has no 'ffn'"),
        ("collapse", _without(*PAIRS, "ffn", "slope"), "homophones.ffn has no 'slope'"),
        ("collapse", _without(*PAIRS, "relative", 0), "relative has 1 items and should have 2"),
        ("compression", _without("forms", 1, "texts", "wiki"), "forms[1].texts has no 'wiki'"),
        ("checkpoints", _without("points", 0, "perplexity", "wiki"), "points[0].perplexity has no 'wiki'"),
        ("neighbours", _without("rare", "jaccard", 0), "rare.jaccard has 2 items and should have 3"),
        ("neighbours", _without("words", "asynchronously", "neighbours", 0), "has 3 items and should have 4"),
        ("distances", _without("distance", 1, 0), "distance[1] has 3 items and should have 4"),
        ("routing", _without("by_layer", 0, 3, 0), "by_layer[0][3] has 3 items and should have 4"),
        ("norms", _without("spread", "edges", 0), "histogram has 3 items and should have 2"),
        ("routing", lambda result: result["tokens"].append(1), "routing.tokens has 12 items"),
        ("layer-drop", lambda result: result["texts"].clear(), "layer-drop.texts is empty"),
        ("compression", lambda result: result["forms"].clear(), "compression.forms has 0 items"),
        ("updates", _without("rows", "rare"), "updates.rows has no 'rare'"),
        ("updates", _without("rows", "rare", "ids"), "updates.rows.rare has no 'ids'"),
        ("norms", lambda result: result.update(embedding=[math.nan] * 10), "it holds NaN"),
    ],
)
def test_a_result_that_lacks_what_a_figure_draws_names_the_part_and_the_command(
    what, spoil, reason, plant, tmp_path
):
    path = plant(tmp_path / "x")
    file = path / "results" / f"{what}.json"
    result = json.loads(file.read_text())
    spoil(result)
    file.write_text(json.dumps(result))
    (run,) = open_runs([path])
    readers = [figure for figure in FIGURES.values() if figure.reads == what]
    assert readers
    for said in (run.damaged[what], *(figure.missing(run) for figure in readers)):
        assert f"{file} is damaged (" in said
        assert reason in said
        assert f"make it again with `{run.maker(what)}`" in said


def test_a_damaged_file_is_not_made_again_by_a_command_that_does_not_exist(plant, tmp_path):
    path = plant(tmp_path / "x")
    for name in ("demo", "routing-00000100"):
        (path / "results" / f"{name}.json").write_text("{")
    (run,) = open_runs([path])
    assert run.damaged["demo"].endswith(f"remove it, or make it again with `tide-lm demo --run {path}`")
    assert run.damaged["routing-00000100"].endswith("): remove it")


@pytest.mark.parametrize("line", ["{", "[]", '{"step": 1}', '{"step": 1, "tokens": "x"}'])
def test_broken_metrics_are_named_and_left_out(line, plant, tmp_path):
    path = plant(tmp_path / "x")
    (path / "metrics.jsonl").write_text(line + "\n")
    (run,) = open_runs([path])
    assert (run.metrics, run.tokens) == ([], None)
    assert "metrics.jsonl has a line that is no record" in str(run.damaged["metrics"])


def test_a_folder_without_results_is_no_run(tmp_path):
    (tmp_path / "empty" / "results").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"empty holds no results"):
        open_runs([tmp_path / "empty"])


def test_a_config_that_holds_no_settings_is_told(plant, tmp_path):
    path = plant(tmp_path / "x")
    (path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json is \[\], and no settings of a run: restore it"):
        open_runs([path])


def test_a_command_is_one_that_can_be_run(plant, tmp_path):
    path = plant(tmp_path / "a run")
    assert open_runs([path])[0].maker("validation") == f"tide-lm train --resume --run '{path}'"
    (path / "config.json").unlink()
    (elsewhere,) = open_runs([path])
    assert elsewhere.maker("collapse") == f"tide-lm analyze collapse MODEL --run '{path}'"
    assert elsewhere.cure("validation") == "only a run of `tide-lm train` can have it"
    norms = json.loads((path / "results" / "norms.json").read_text())
    (path / "results" / "norms.json").write_text(json.dumps({**norms, "subject": {"model": "org/model"}}))
    (elsewhere,) = open_runs([path])
    assert elsewhere.maker("norms") == f"tide-lm analyze norms org/model --run '{path}' --counts DATA"
    assert elsewhere.maker("perplexity") == f"tide-lm evaluate org/model --run '{path}' --text FILE"


def test_gradients_that_were_not_recorded_cannot_be_analysed(plant, tmp_path):
    path = plant(tmp_path / "x", without=("gradients",))
    assert open_runs([path])[0].cure("gradients") == f"run `tide-lm analyze gradients {path}`"
    settings = json.loads((path / "config.json").read_text())
    settings["train"]["record_gradients"] = False
    (path / "config.json").write_text(json.dumps(settings))
    assert "the run did not record it" in open_runs([path])[0].cure("gradients")


def test_a_model_that_was_not_trained_here_has_no_settings(plant, tmp_path):
    path = plant(tmp_path / "x")
    (path / "config.json").unlink()
    (path / "metrics.jsonl").unlink()
    (run,) = open_runs([path])
    assert (run.config, run.parameters, run.tokens, run.blocks) == (None, None, None, 3)


def test_runs_whose_results_say_the_same_stand_together(two_runs):
    runs = open_runs(two_runs)
    assert list(alike(runs, "updates")) == ["base, tide"]
    runs[1].result("updates")["rows"]["0"] = None
    assert list(alike(runs, "updates")) == ["base", "tide"]


def _measured_at(path, what, tokens, step=None) -> None:
    """Rewrite a result as one of a checkpoint, or of an export if `tokens` is None."""
    file = path / "results" / f"{what}.json"
    subject = {"model": str(path), "step": step, "tokens": tokens}
    file.write_text(json.dumps({**json.loads(file.read_text()), "subject": subject}))


def test_a_result_of_an_earlier_checkpoint_is_left_out(plant, tmp_path):
    path = plant(tmp_path / "x")
    for what, tokens in {"perplexity": 2048, "norms": 5900, "distances": 6000, "updates": None}.items():
        _measured_at(path, what, tokens)
    (path / "results" / "routing.json").rename(path / "results" / "routing-00000012.json")
    _measured_at(path, "routing-00000012", 1200, step=12)
    (run,) = open_runs([path])
    perplexity = f"{path}/results/perplexity.json was measured at 2,048 of 6,000 tokens"
    assert run.stale == {
        "perplexity": f"{perplexity}: run `tide-lm evaluate {path}` again",
        "norms": f"{path}/results/norms.json was measured at 5,900 of 6,000 tokens: "
        f"run `tide-lm analyze norms {path}` again",
    }
    assert not run.damaged
    assert run.results.keys() >= {"distances", "updates", "routing-00000012", "validation", "checkpoints"}
    assert list(run.losses) == ["validation"]
    with pytest.raises(MissingError, match=r"norms\.json was measured at"):
        run.result("norms")
    assert FIGURES["loss-by-decile"].missing(run) is None  # it still has the held-out text


def test_a_run_that_has_not_ended_is_measured_at_its_newest_checkpoint(plant, tmp_path):
    path = plant(tmp_path / "x", only=("perplexity", "norms"))
    for step in (40, 50):
        (path / "checkpoints" / f"{step:08d}").mkdir(parents=True)
    _measured_at(path, "perplexity", 5000)
    _measured_at(path, "norms", 4000)
    (run,) = open_runs([path])
    assert list(run.results) == ["perplexity"]
    assert "4,000 of 5,000 tokens" in run.stale["norms"]
    (path / "export").mkdir()
    (run,) = open_runs([path])
    assert "5,000 of 6,000 tokens" in run.stale["perplexity"]
