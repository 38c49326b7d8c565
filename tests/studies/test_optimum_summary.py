"""What runs say: planted losses, whose tokens saved, gains and errors are known."""

import json
import math

import numpy as np
import pytest

from studies import optimum_summary
from studies.optimum import layer_parameters
from studies.optimum_commands import app
from studies.optimum_summary import Mean, best, fit, gains, paired, pooled_deviation, saved, tokens_needed
from studies.test_reading import Piece

USUAL = (0.004, 0.99, 64, 0.1)
LAYERS = layer_parameters("6m")


def record(name="base", tokens=20.0, loss=4.0, seed=0, rate=0.004, beta2=0.99, batch=64, warmup=0.1, **more):
    return {
        "name": name,
        "model": "base" if name == "base" else "tide",
        "recipe": "paper",
        "size": "6m",
        "k": 0,
        "seed": seed,
        "tokens": int(tokens * LAYERS),
        "tokens_per_parameter": tokens,
        "passes": 1.0,
        "peak_rate": rate,
        "batch": batch,
        "warmup": warmup,
        "layer_parameters": LAYERS,
        "table_bytes": 0,
        "val_loss": loss,
        "loss_by_decile": [loss] * 10,
        "config": {"optim": {"beta2": beta2}},
        **more,
    }


def line(losses, error=0.0):
    return {tokens: Mean(loss, error, USUAL, ()) for tokens, loss in losses.items()}


def test_tokens_to_a_loss_are_read_off_a_line_over_their_logarithm():
    means = line({1: 5.0, 4: 4.0, 16: 3.5})
    assert tokens_needed(means, 4.5, 0.0) == (pytest.approx(2), 0.0)
    assert tokens_needed(means, 3.75, 0.0) == (pytest.approx(8), 0.0)
    for outside in (5.5, 3.0):
        with pytest.raises(ValueError, match=rf"{outside:.3f} is not within its runs, 5\.000 to 3\.500"):
            tokens_needed(means, outside, 0.0)


def test_a_loss_whose_seeds_are_not_known_has_no_error():
    assert tokens_needed(line({1: 5.0, 4: 4.0}, None), 4.5, 0.1) == (pytest.approx(2), None)


def test_the_error_of_tokens_is_that_of_drawn_losses():
    means = {5: Mean(4.2, 0.004, USUAL, ()), 20: Mean(3.8, 0.002, USUAL, ())}
    _, error = tokens_needed(means, 3.9, 0.003)
    generator = np.random.default_rng(0)
    drawn = []
    for high, low, loss in generator.normal([4.2, 3.8, 3.9], [0.004, 0.002, 0.003], (20_000, 3)):
        needed, _ = tokens_needed({5: Mean(high, 0, USUAL, ()), 20: Mean(low, 0, USUAL, ())}, loss, 0)
        drawn.append(math.log(needed))
    assert error == pytest.approx(np.std(drawn), rel=0.03)


def test_an_arm_counts_at_the_schedule_that_is_best_with_its_first_seed():
    records = [record(loss=4.0), record(loss=4.2, seed=1), record(loss=4.05, rate=0.008)]
    records += [record(loss=3.5, rate=0.016), record(loss=None, rate=0.016, seed=1)]  # not finite
    records += [record(name="best", loss=3.0), {**record(loss=3.0), "size": "small"}]
    assert best(records, "base", "6m")[20].loss == pytest.approx(4.1)
    records.append(record(loss=3.9, batch=32))
    assert best(records, "base", "6m")[20].schedule == (0.004, 0.99, 32, 0.1)
    records.append(record(loss=3.8, beta2=0.995, warmup=0.2))
    assert best(records, "base", "6m")[20].schedule == (0.004, 0.995, 64, 0.2)


def test_runs_of_other_batches_are_at_the_same_tokens():
    records = [record(loss=4.0), {**record(loss=3.9, batch=32), "tokens": int(20 * LAYERS) + 16_384}]
    assert list(best(records, "base", "6m")) == [20]


def test_a_run_that_was_repeated_to_read_the_test_split_counts_once():
    again = record(loss=4.1, test=[["a", 1.0, 1, 1]])
    assert best([again, record(loss=4.0)], "base", "6m")[20].records == (again,)


def test_one_seed_has_the_deviation_of_all_that_have_more():
    records = [record(loss=4.0 + step, seed=seed) for seed, step in enumerate((-0.01, 0, 0.01))]
    records += [record("best", loss=3.0 + step, seed=seed) for seed, step in enumerate((-0.02, 0.02))]
    records += [record("paper", loss=3.5)]
    pooled = math.sqrt((2 * 0.0001 + 0.0008) / 3)
    assert pooled_deviation(records, "6m") == pytest.approx(pooled)
    assert best(records, "paper", "6m")[20].error == pytest.approx(pooled)
    assert best(records, "base", "6m")[20].error == pytest.approx(0.01 / math.sqrt(3))
    assert pooled_deviation(records[-1:], "6m") is None


def test_an_arm_that_always_needs_half_the_tokens_saves_twice_of_them():
    def loss(tokens):
        return 5 - 0.3 * math.log(tokens)

    base = [record(tokens=n, loss=loss(n)) for n in (1, 5, 20)]
    arm = [record("best", tokens=n, loss=loss(2 * n)) for n in (0.5, 5, 20)]
    told = []
    found = saved([*base, *arm, record("paper", loss=3.9)], told.append)
    assert [(s["arm"], s["tokens_per_parameter"]) for s in found] == [("best", n) for n in (1, 5, 20)]
    assert [s["ratio"] for s in found] == pytest.approx([2, 2, 2])
    assert told == ["6m: no tokens saved, for want of runs with other tokens: paper"]
    assert len(saved(base + arm[1:], told.append)) == 1  # at 20: the line is drawn no further
    assert "base's loss at 1 tokens for each parameter, best: 5.000 is not within its runs" in told[1]


def test_a_gain_that_falls_as_a_power_is_fitted():
    points = [
        {"tokens_per_parameter": n, "gain": 0.5 * n**-0.4, "error": error}
        for n, error in ((1, 0.02), (5, 0.01), (10, 0.004), (20, 0.002))
    ]
    found = fit(points)
    assert (found["a"], found["b"]) == (pytest.approx(0.5), pytest.approx(-0.4))
    assert found["gain_at_200"] == pytest.approx(0.5 * 200**-0.4)
    assert found["misfit"] == pytest.approx(0, abs=1e-9)
    generator = np.random.default_rng(0)
    drawn = [
        fit([{**point, "gain": generator.normal(point["gain"], point["error"])} for point in points])
        for _ in range(2000)
    ]
    for name in ("a", "b", "gain_at_200"):
        assert found[f"{name}_error"] == pytest.approx(np.std([d[name] for d in drawn]), rel=0.1)


def test_a_fit_to_points_that_lie_off_it_has_larger_errors():
    def of(step):
        return fit(
            [
                {"tokens_per_parameter": n, "gain": 0.5 / n + off, "error": 0.001}
                for n, off in ((1, 0), (2, step), (4, 0), (8, 0))
            ]
        )

    assert of(0.02)["misfit"] > 10
    assert of(0.02)["b_error"] > 3 * of(0)["b_error"]
    assert fit([{"tokens_per_parameter": n, "gain": -0.1, "error": 0.1} for n in (1, 2, 3)]) is None
    assert fit([{"tokens_per_parameter": n, "gain": 0.1, "error": 0.1} for n in (1, 2)]) is None


def test_a_gain_has_the_errors_of_both_arms():
    records = [record(loss=4.0 + step, seed=seed) for seed, step in enumerate((-0.03, 0, 0.03))]
    records += [record("best", loss=3.8 + step, seed=seed) for seed, step in enumerate((-0.04, 0, 0.04))]
    ((point,),) = [arm["points"] for arm in gains(records)]
    assert point["gain"] == pytest.approx(0.2)
    assert point["error"] == pytest.approx(0.05 / math.sqrt(3))


def test_the_bootstrap_of_a_mean_has_its_standard_error():
    generator = np.random.default_rng(1)
    pieces = [Piece("a", 0, 100, 1)] * 400 + [Piece("book-b", 0, 100, 1)] * 100
    gained = generator.normal(10, 5, 500)
    found = paired(pieces, gained)
    for name, of in (
        ("articles", gained[:400]),
        ("chapters", gained[400:]),
        ("both", gained),
    ):
        assert found[name]["pieces"] == len(of)
        assert found[name]["gain"] == pytest.approx(of.mean() / 100)
        error = of.std(ddof=1) / math.sqrt(len(of)) / 100
        assert found[name]["error"] == pytest.approx(error, rel=0.05)
        low, high = found[name]["interval"]
        assert high - low == pytest.approx(2 * 1.96 * error, rel=0.06)


def test_what_was_read_of_the_test_split_is_compared_piece_by_piece_over_seeds():
    def read(*nats):
        return [[f"book-{i}" if i else "a", value, 10, 50] for i, value in enumerate(nats)]

    records = [
        record(test=read(50, 40, 30)),
        record(seed=1, test=read(52, 42, 32)),
        record("best", loss=3.8, test=read(40, 31, 21)),
        record("paper", loss=3.9),
    ]
    base, arm = optimum_summary.tested(records)
    assert (base["arm"], base["seeds"], base["gain"]) == ("base", 2, None)
    assert base["test_loss"] == pytest.approx(123 / 30)
    assert (arm["arm"], arm["test_loss"]) == ("best", pytest.approx(92 / 30))
    assert arm["gain"]["both"]["gain"] == pytest.approx(31 / 30)
    assert arm["gain"]["chapters"]["gain"] == pytest.approx(1)
    assert "articles" not in arm["gain"]  # one alone


def test_the_summary_has_what_the_study_is_quoted_by(tmp_path, capsys):
    records = [record(tokens=n, loss=5 - 0.3 * math.log(n)) for n in (1, 20)]
    records += [record("best", tokens=n, loss=4.8 - 0.3 * math.log(n), rate=0.002) for n in (1, 20)]
    records[-1]["test"] = [["a", 30.0, 10, 50], ["b", 20.0, 10, 50]]
    kept, out = tmp_path / "optimum.jsonl", tmp_path / "summary.json"
    kept.write_text("".join(json.dumps(record) + "\n" for record in records))
    app(["summary", str(kept), "--out", str(out)], standalone_mode=False)
    found = json.loads(out.read_text())
    assert [run["test_loss"] for run in found["runs"]] == [None, None, None, 2.5]
    assert found["runs"][0].keys() >= {"name", "model", "peak_rate", "beta2", "loss_by_decile", "passes"}
    (entry,) = found["tokens_saved"]
    assert entry["ratio"] == pytest.approx(math.exp(0.2 / 0.3))
    assert found["tries"] == {"6m": {"base": 1, "best": 1}}
    assert "commit" in found["provenance"]
    summed_up = capsys.readouterr().out
    app(["show", str(kept)], standalone_mode=False)
    said = f"the base's tokens are {entry['ratio']:.2f} times those of best"
    assert said in summed_up
    assert said in capsys.readouterr().out
