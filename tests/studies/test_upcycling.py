"""A Llama and what it goes on as, trained in the small."""

import json
import lzma
from dataclasses import replace
from pydoc_data.topics import topics

import pytest

from studies import data
from studies.upcycling import WAYS, Plan, compare
from tide_lm.model import TideForCausalLM


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
