"""Reading run directories."""

import pytest

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
    with pytest.raises(MissingError, match="has no 'rows'"):
        run.result("norms", "rows")


def test_a_broken_result_names_its_file(plant, tmp_path):
    path = plant(tmp_path / "x")
    (path / "results" / "norms.json").write_text("{")
    with pytest.raises(ValueError, match=r"norms\.json cannot be read"):
        open_runs([path])[0].result("norms")
    (path / "results" / "norms.json").write_text("[]")
    with pytest.raises(ValueError, match="holds no result but list"):
        open_runs([path])[0].result("norms")


def test_a_model_that_was_not_trained_here_has_no_settings(plant, tmp_path):
    path = plant(tmp_path / "x")
    (path / "config.json").unlink()
    (path / "metrics.jsonl").unlink()
    (run,) = open_runs([path])
    assert (run.config, run.parameters, run.tokens, run.blocks) == (None, None, None, 3)


def test_runs_whose_results_say_the_same_stand_together(two_runs):
    runs = open_runs(two_runs)
    assert list(alike(runs, "updates", "rows")) == ["base, tide"]
    assert list(alike(runs, "norms", "tables")) == ["base", "tide"]
