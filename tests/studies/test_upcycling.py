"""A Llama and what it goes on as, trained in the small."""

import json
import lzma
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from studies import data, upcycling_report
from studies.results import Spread
from studies.upcycling import WAYS, Plan, compare
from tide_lm import runs
from tide_lm.model import TideForCausalLM

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("upcycling")
    texts = [topics[name][:3000] for name in sorted(topics)[:40]]
    for name, part in {"a_train": texts[:30], "a_valid": texts[30:]}.items():
        with lzma.open(folder / f"{name}.jsonl.xz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in part)
    data.prepare(folder, folder / "data", vocabulary=600, tokenizer=None, processes=1)
    return Plan(folder / "data", folder / "scratch", "tiny", 2)


def test_all_ways_go_on_from_one_llama_for_as_many_tokens(plan):
    names = "Llama", "TIDE, Llama frozen", "TIDE, Llama changed by LoRA"
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


def test_the_page_has_each_way_beside_the_llama_of_its_seed_and_rate(plan, tmp_path):
    ways = [replace(way, seeds=1) for way in WAYS if way.name in ("Llama", "TIDE", "TIDE, Llama frozen")]
    found = compare(plan, ways, 1, lambda line: None)
    runs.write_record(tmp_path / "some.json", found)
    read = upcycling_report.read(tmp_path)
    llama, tide, frozen = (run["validation"] for run in found["runs"])
    row = next(line for line in upcycling_report.page(read).splitlines() if line.startswith("| TIDE |"))
    before = found["first"][0]["validation"]["loss"]
    numbers = tide["loss"], before - tide["loss"], llama["loss"] - tide["loss"]
    assert row == "| TIDE | 1 | " + " | ".join(f"{number:.3f}" for number in numbers) + " |"
    rarest = [
        losses["loss_by_decile"][0] for losses in (found["first"][0]["validation"], llama, tide, frozen)
    ]
    assert "| 0 | " + " | ".join(f"{loss:.3f}" for loss in rarest) + " |" in upcycling_report.page(read)
    assert upcycling_report.write(read, tmp_path / "docs").exists()
    assert (tmp_path / "docs" / "upcycling.svg").stat().st_size > 5000


def test_docs_and_readme_have_the_numbers_that_were_measured():
    kept = upcycling_report.read(ROOT / "results" / "upcycling")
    assert (ROOT / "docs" / "upcycling.md").read_text(encoding="utf-8") == upcycling_report.page(kept)
    by_seed = {(run.way.name, run.seed): run for run in kept}
    gains = [by_seed["Llama", seed].after["loss"] - by_seed["TIDE", seed].after["loss"] for seed in range(3)]
    moved = {
        name: sum(by_seed[name, seed].before["loss"] - by_seed[name, seed].after["loss"] for seed in range(3))
        for name in ("Llama", "TIDE, Llama frozen")
    }
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"ends {Spread.of(gains)} nats below the same Llama" in readme
    assert f"brings {100 * moved['TIDE, Llama frozen'] / moved['Llama']:.0f} % of what training" in readme
    for decile in range(10):
        losses = [
            [by_seed[name, seed].after["loss_by_decile"][decile] for name in ("Llama", "TIDE")]
            for seed in range(3)
        ]
        assert all(tide < llama for llama, tide in losses)  # every decile gains
