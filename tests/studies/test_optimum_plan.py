"""The plan: which run an entry means, what is next, and how long it takes."""

import pytest

from studies import optimum_plan
from studies.optimum import FLOPS, LOST, SIDE_BY_SIDE, START, Tuned
from studies.optimum_plan import left, plan, resolve, train_plan, wanted
from tide_lm.spec import presets
from tide_lm.spec.estimate import train_flops


def record(run, loss=4.0):
    """The least that a record has for the plan."""
    run = Tuned.named(run) if isinstance(run, str) else run
    return {
        "name": run.arm,
        "size": run.size,
        "batch": run.batch,
        "seed": run.seed,
        "warmup": run.warmup,
        "tokens_per_parameter": run.tokens,
        "peak_rate": run.rate,
        "config": {"optim": {"beta2": run.beta2}},
        "val_loss": loss,
        **({"test": []} if run.test else {}),
    }


def names(runs):
    return [run.name for run in runs]


def test_a_name_says_what_a_record_is_of():
    for name in (
        "base, 0.004",
        "best, 0.002, size small, batch 64, seed 2, tokens 0.5, warmup 0.2, beta2 0.995, test",
    ):
        run = Tuned.named(name)
        assert run.name == name
        assert Tuned.of(record(run)) == run


def test_a_grid_grows_until_its_best_rate_is_inside():
    entry = "base, rates 0.002 to 0.008, beta2 0.99"
    start = [f"base, {rate}, beta2 0.99" for rate in (0.002, 0.004, 0.008)]
    assert names(resolve(entry, [])) == start
    records = [record(name, loss) for name, loss in zip(start, (4.0, 3.9, None), strict=True)]
    assert names(resolve(entry, records)) == start
    records = [record(name, loss) for name, loss in zip(start, (3.8, 3.9, 4.0), strict=True)]
    assert names(resolve(entry, records)) == ["base, 0.001, beta2 0.99", *start]
    records = [record(name, loss) for name, loss in zip(start, (4.0, 3.9, 3.8), strict=True)]
    assert names(resolve(entry, records)) == [*start, "base, 0.016, beta2 0.99"]
    records.append(record("base, 0.016", 3.7))  # of another beta2
    assert names(resolve(entry, records))[-1] == "base, 0.016, beta2 0.99"


def test_a_best_rate_is_that_of_the_records():
    records = [record("base, 0.002, beta2 0.99, batch 32", 3.9), record("base, 0.004", 4.0)]
    assert names(resolve("base, best rate, seed 1", records)) == [
        "base, 0.002, batch 32, seed 1, beta2 0.99",
    ]
    assert names(resolve("base, twice the best rate at 20, tokens 5, batch 16", records)) == [
        "base, 0.004, batch 16, tokens 5, beta2 0.99"
    ]
    with pytest.raises(LookupError, match="nothing is known of best, size 6m, 20 tokens"):
        resolve("best, best rate", records)


def test_a_best_rate_is_of_the_nearest_fewer_tokens_that_are_known():
    records = [record("base, 0.002, tokens 2"), record("base, 0.004, tokens 20")]
    assert resolve("base, best rate, tokens 10", records)[0].rate == 0.002
    assert resolve("base, best rate, tokens 1", records)[0].rate == 0.002
    assert resolve("base, best rate at 20, tokens 10", records)[0].rate == 0.004


def test_a_best_rate_waits_for_runs_before_it_that_may_change_it():
    entries = ["base, rates 0.002 to 0.008", "base, best rate, seed 1", "base, best rate at 20, tokens 5"]
    entries += ["base, best rate, tokens 5, seed 1"]
    records = [record("base, 0.002", 4.0), record("base, 0.004", 3.9)]
    runs, waiting = wanted(entries, records)
    assert names(runs) == ["base, 0.008"]
    assert waiting == {
        "the best of base, size 6m, 20 tokens, is not decided": entries[1:3],
        "the best of base, size 6m, 5 tokens, is not decided": entries[3:],
    }
    records.append(record("base, 0.008", 4.0))
    assert names(wanted(entries, records).runs) == ["base, 0.004, seed 1", "base, 0.004, tokens 5"]
    records.append(record("base, 0.004, tokens 5"))
    runs, waiting = wanted(entries, records)
    assert names(runs) == ["base, 0.004, seed 1", "base, 0.004, seed 1, tokens 5"]
    assert not waiting


def test_a_run_that_read_the_test_split_stands_for_the_one_that_did_not():
    assert wanted(["base, 0.004", "base, 0.004, test"], [record("base, 0.004, test")]).runs == []
    assert names(wanted(["base, 0.004, test"], [record("base, 0.004")]).runs) == ["base, 0.004, test"]


def test_the_whole_plan_comes_to_an_end():
    records, rounds = [], 0
    while runs := wanted(plan(), records).runs:
        for run in runs:
            assert Tuned.named(run.name) == run
            records.append(record(run, 4 + abs(run.rate - 0.002) - 0.1 * run.tokens))
        rounds += 1
    assert not wanted(plan(), records).waiting
    assert rounds < 10
    assert len(records) >= len(plan())


def test_the_time_of_a_run_is_that_of_its_flops():
    run = Tuned.named("base, 0.004")
    flops = train_flops(presets.get("base-6m").model, 512) * run.steps * 64 * 512
    assert run.seconds(1) == pytest.approx(START + flops / FLOPS)
    assert run.seconds(6, run.steps // 2) == pytest.approx(START + 3 * flops / FLOPS, rel=1e-3)
    assert Tuned.named("best, 0.004").seconds() > 1.3 * run.seconds()


@pytest.mark.parametrize(
    "name", ["base, 0.004", "base dense, 0.004", "paper, 0.004, size medium, tokens 1.5"]
)
def test_a_killed_run_loses_two_minutes_at_most(name, prepared):
    run = Tuned.named(name)
    every = run.config(prepared, gpu=False).train.checkpoint_every
    a_step = (run.seconds(SIDE_BY_SIDE) - START) / run.steps
    assert LOST - a_step < every * a_step <= LOST


@pytest.fixture
def instant(monkeypatch, tmp_path):
    """Runs that take no time, in a made-up world; `train` says what was begun."""
    begun, records = [], []

    def train_kept(run, data, scratch, kept, tell, quiet):
        begun.append(run.name)
        if run.arm == "paper":
            raise RuntimeError("out of memory")
        records.append(record(run, 4 + abs(run.rate - 0.004)))
        return True

    def train(entries, until, processes=6, known=()):
        records[:] = list(known)
        train_plan(entries, lambda: records, (tmp_path,) * 3, until, processes, print)
        return begun

    train.begun = begun
    monkeypatch.setattr(optimum_plan, "train_kept", train_kept)
    monkeypatch.setattr(optimum_plan.time, "time", lambda: 0.0)
    return train


def test_what_is_found_decides_what_is_next(instant):
    begun = instant(["base, rates 0.002 to 0.008", "base, best rate, seed 1"], 1e9)
    assert begun == ["base, 0.002", "base, 0.004", "base, 0.008", "base, 0.004, seed 1"]


def test_no_run_is_begun_that_does_not_end_in_time(instant):
    long, short = "base, 0.004", "base, 0.004, tokens 1"
    assert instant([long, short], Tuned.named(long).seconds(6) - 1) == [short]


def test_a_run_that_fails_is_left_out(instant, capsys):
    with pytest.raises(ValueError, match=r"these runs failed: paper, 0\.004"):
        instant(["paper, 0.004", "base, 0.004"], 1e9)
    assert "paper, 0.004 failed: out of memory" in capsys.readouterr().out
    assert instant.begun == ["paper, 0.004", "base, 0.004"]


def test_a_run_that_goes_on_needs_only_the_rest_of_its_time(instant, tmp_path):
    run = Tuned.named("base, 0.004")
    (tmp_path / run.slug / "checkpoints" / str(run.steps - 100)).mkdir(parents=True)
    assert instant([run.name], 60) == [run.name]


def test_what_is_left_is_counted(tmp_path):
    lines = left(["base, 0.004", "base, best rate, seed 1"], [], tmp_path, 6)
    assert lines[0] == f"base, 0.004: {Tuned.named('base, 0.004').seconds() / 60:.0f} minutes"
    assert lines[-1].startswith("1 runs are left that can begin, 1 minutes of 6 processes, and 1 that wait")
