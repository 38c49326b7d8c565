"""A Llama and what it goes on as: tables of records that are made up, and a training in the small."""

import json
import lzma
from dataclasses import asdict, replace
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from studies import data, upcycling_report
from studies.upcycling import WAYS, Plan, Way, compare
from tide_lm.model import TideForCausalLM
from tide_lm.run.provenance import write_record


def validation(loss):
    return {"loss": loss, "loss_by_decile": [loss + decile for decile in range(10)]}


@pytest.fixture
def kept(tmp_path):
    """Two files: three ways at one rate, with two seeds, and the first two at another rate, with one."""
    for name, rate, ways, seeds in (
        ("main", 0.3, {"Llama": 4.5, "TIDE": 4.3, "TIDE, Llama frozen": 4.6}, (0, 1)),
        ("rates", 1.0, {"Llama, first rate": 4.0, "TIDE, first rate": 3.9}, (0,)),
    ):
        found = [
            {
                "way": way,
                "seed": seed,
                "about": asdict(Way(way, not way.startswith("Llama"), rate=rate)),
                "validation": validation(loss - 0.2 * seed * (way == "TIDE")),
            }
            for way, loss in ways.items()
            for seed in seeds
        ]
        first = [{"seed": seed, "validation": validation(5.0)} for seed in seeds]
        write_record(tmp_path / f"{name}.json", {"tokens": 1234, "first": first, "runs": found})
    return upcycling_report.read(tmp_path)


def test_tables_have_each_way_beside_the_llama_of_its_seed_and_rate(kept, tmp_path):
    assert upcycling_report.in_short(kept).splitlines()[2:] == [
        "| Llama | 0.500 ± 0.000 | 100 % |  | 2 |",
        "| TIDE | 0.800 ± 0.141 | 160 % | 0.300 ± 0.141 | 2 |",
        "| TIDE, Llama frozen | 0.400 ± 0.000 | 80 % | -0.100 ± 0.000 | 2 |",
    ]
    assert upcycling_report.ways(kept).splitlines()[2:] == [
        "| Llama | 2 | 4.500 ± 0.000 | 0.500 ± 0.000 |  |",
        "| TIDE | 2 | 4.200 ± 0.141 | 0.800 ± 0.141 | 0.300 ± 0.141 |",
        "| TIDE, Llama frozen | 2 | 4.600 ± 0.000 | 0.400 ± 0.000 | -0.100 ± 0.000 |",
        "| Llama, first rate | 1 | 4.000 | 1.000 |  |",
        "| TIDE, first rate | 1 | 3.900 | 1.100 | 0.100 |",
    ]
    deciles = upcycling_report.deciles(kept).splitlines()[2:]
    assert deciles[0] == "| 0 | 5.000 ± 0.000 | 4.500 ± 0.000 | 4.200 ± 0.141 | 4.600 ± 0.000 |"
    assert deciles[9] == "| 9 | 14.000 ± 0.000 | 13.500 ± 0.000 | 13.200 ± 0.141 | 13.600 ± 0.000 |"
    assert (upcycling_report.tokens(kept), upcycling_report.first_seed(kept)) == ("1,234", "0.200")
    assert "TIDE 0.300 to 0.300; TIDE, Llama frozen -0.100 to -0.100" in upcycling_report.figure(kept)
    assert upcycling_report.write(kept, tmp_path / "docs") == tmp_path / "docs"
    assert (tmp_path / "docs" / "upcycling.svg").stat().st_size > 5000


def test_a_llama_goes_on_for_as_many_tokens_at_the_rate_of_its_way_in_another_order(
    prepared, tiny_config, tmp_path
):
    plan = Plan(prepared, tmp_path, "tiny", 2)
    way = Way("TIDE", parts="memory", rate=0.5, settings={"optim.gain_lr_multiple": 30})
    tiny_config().save_pretrained(tmp_path)  # of what it goes on from
    first, further = plan.llama(3), plan.further(way, 3, tmp_path)
    assert further.optim.max_lr == pytest.approx(0.5 * first.optim.max_lr)
    assert further.optim.min_lr == pytest.approx(further.optim.max_lr / 10)
    assert further.optim.gain_lr_multiple == 30
    assert (further.train.steps, further.train.batch) == (first.train.steps, first.train.batch)
    assert (further.train.seed, first.train.seed) == (103, 3)
    assert further.train.parts == "memory"


@pytest.fixture
def plan(tmp_path):
    texts = [topics[name][:3000] for name in sorted(topics)[:40]]
    for name, part in {"a_train": texts[:30], "a_valid": texts[30:]}.items():
        with lzma.open(tmp_path / f"{name}.jsonl.xz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in part)
    data.prepare(tmp_path, tmp_path / "data", vocabulary=600, tokenizer=None)
    return Plan(tmp_path / "data", tmp_path / "scratch", "tiny", 2)


@pytest.mark.slow
def test_all_ways_go_on_from_one_llama_for_as_many_tokens(plan):
    names = "Llama", "TIDE", "TIDE, Llama frozen"
    ways = [replace(way, seeds=1) for way in WAYS if way.name in names]
    lines = []
    found = compare(plan, ways, 1, lines.append)
    (first,) = found["first"]
    assert [run["way"] for run in found["runs"]] == [way.name for way in ways]
    assert lines[0] == "1 Llamas are there"
    before = first["validation"]["loss"]
    for run in found["runs"]:
        assert run["validation"]["step"] == first["validation"]["step"] > 10
        assert run["validation"]["loss"] < before
        assert len(run["validation"]["loss_by_decile"]) == 10
    configs = [
        json.loads((plan.scratch / name / "config.json").read_text())
        for name in ("llama-0", "on-tide-llama-frozen-0")
    ]
    assert configs[1]["optim"]["max_lr"] == pytest.approx(0.3 * configs[0]["optim"]["max_lr"])
    assert configs[1]["train"]["parts"] == "memory"
    frozen, llama = (
        TideForCausalLM.from_pretrained(plan.scratch / name / "export")
        for name in ("on-tide-llama-frozen-0", "llama-0")
    )
    assert frozen.model.embed_tokens.weight.equal(llama.model.embed_tokens.weight)
    assert frozen.model.memory.norm.weight.abs().max() > 0
    assert compare(plan, ways[:1], 1, lines.append)["runs"][0] == found["runs"][0]  # what is there is kept


def test_every_decile_gains_as_the_readme_says():
    found = upcycling_report.read(Path(__file__).parents[2] / "results" / "upcycling")
    by_seed = {(run.name, run.seed): run.after["loss_by_decile"] for run in found}
    for seed in range(3):
        pairs = zip(by_seed["Llama", seed], by_seed["TIDE", seed], strict=True)
        assert all(tide < llama for llama, tide in pairs)
