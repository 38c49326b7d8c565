"""README.md and docs/*.md have the numbers of results/, in every generated block; their prose is free."""

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from studies import pages
from studies.__main__ import app
from studies.blocks import names, rewritten
from tide_lm.report.catalogue import FIGURES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BEST = "small-tide-8e-best-seed-0"  # a run


@pytest.fixture(scope="module")
def blocks():
    return pages.blocks(ROOT / "results")


@pytest.fixture(scope="module")
def texts(blocks):
    return {name: make() for name, make in blocks.items()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_numbers_are_those_of_the_results(page, texts):
    """If this fails, `python -m studies pages` writes them."""
    text = page.read_text(encoding="utf-8")
    assert text == rewritten(text, {name: lambda made=made: made for name, made in texts.items()})


def test_every_block_is_on_a_page(blocks):
    assert {name for page in PAGES for name in names(page.read_text(encoding="utf-8"))} == blocks.keys()


def test_no_block_is_empty(texts):
    for name, text in texts.items():
        assert text.strip() == text, name
        assert text, name
        assert not text.startswith("|") or text.count("\n") >= 2, name  # a row, below columns and rule


def halved(value):
    """Halve each float of a JSON file."""
    if isinstance(value, dict):
        return {key: halved(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [halved(inner) for inner in value]
    return value * 0.5 if isinstance(value, float) else value


def measured(what, change):
    """Change one of the results of a run."""

    def changed(record):
        results = record["results"]
        return {**record, "results": {**results, what: change(results[what])}}

    return changed


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """Results of which a test may change a file, if it puts it back."""
    return shutil.copytree(ROOT / "results", tmp_path_factory.mktemp("copied") / "results")


CHANGES = {
    "demo": ("cpu/demo.json", halved, "demo demo-setting demo-texts demo-words waiting-times"),
    "waiting": ("cpu/waiting_times.json", halved, "waiting-times"),
    "decode": (
        "h200/decode.json",
        halved,
        "decoding-in-short generation generation-from-store generation-in-batches generation-in-short",
    ),
    "values": ("h200/values.json", halved, "rows-in-values"),
    "train": ("h200/train.json", halved, "training training-memory-in-short"),
    "train, TIDE alone": (
        "h200/train.json",
        lambda found: {"runs": [halved(run) if run["k"] else run for run in found["runs"]]},
        "training training-in-short training-memory-in-short",
    ),
    "cache": ("study/cache.json", halved, "cache-figure cache-hits cache-with-default"),
    "store": ("study/cache.json", lambda found: {**found, "row_bytes": 9}, "cache-store"),
    "upcycling": (
        "upcycling/main.json",
        lambda found: {**found, "runs": [halved(run) if run["seed"] else run for run in found["runs"]]},
        "upcycling-deciles upcycling-figure upcycling-in-short upcycling-ways",
    ),
    "upcycling, seed 0": (
        "upcycling/main.json",
        lambda found: {**found, "runs": [run if run["seed"] else halved(run) for run in found["runs"]]},
        "upcycling-deciles upcycling-figure upcycling-first-seed upcycling-in-short upcycling-ways",
    ),
    "upcycling, tokens": ("upcycling/main.json", lambda found: {**found, "tokens": 9}, "upcycling-tokens"),
    "loss": (
        BEST,
        lambda found: {**found, "val_loss": found["val_loss"] - 0.1},
        "study-beside-controls study-claims study-claims-in-short study-figure-gains study-gains "
        "study-gains-by-recipe study-losses study-losses-by-k study-noise study-texts",
    ),
    "norms": (BEST, measured("norms", halved), "study-rows"),
    "tasks": (BEST, measured("benchmarks", halved), "study-claims study-claims-in-short study-zero-shot"),
    "texts": (BEST, measured("perplexity", halved), "study-best-by-text study-claims study-texts"),
    "smaller tables": (
        BEST,
        measured("compression", lambda found: {**found, "forms": halved(found["forms"])}),
        "smaller-tables smaller-tables-in-short study-claims study-claims-in-short",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_changed_result_changes_its_blocks_and_no_other(case, copied, texts):
    """Blocks of runs are made for changes of runs alone, and not for others, since they take longer."""
    name, change, changed = CHANGES[case]
    of_runs = name == BEST
    path = copied / ("study/runs.jsonl" if of_runs else name)
    before = path.read_text(encoding="utf-8")
    part = next(line for line in before.splitlines() if name in line) if of_runs else before
    path.write_text(before.replace(part, json.dumps(change(json.loads(part)))))
    try:
        made = {
            name: make()
            for name, make in pages.blocks(copied).items()
            if name.startswith(("study-", "smaller-")) == of_runs and name != "estimate"
        }
    finally:
        path.write_text(before)
    assert {name for name, text in made.items() if text != texts[name]} == set(changed.split())


def test_the_command_mends_a_number_and_keeps_what_was_written_by_hand(copied):
    root = copied.parent
    shutil.copyfile(ROOT / "README.md", root / "README.md")
    shutil.copytree(ROOT / "docs", root / "docs")
    readme = (root / "README.md").read_text(encoding="utf-8")
    by_hand = readme.replace("# TIDE\n", "# TIDE\n\nIt costs 0.987654 nats.\n", 1)
    (number,) = set(re.findall(r"\| the paper's \| (\d\.\d+)", readme))
    (root / "README.md").write_text(by_hand.replace(f"paper's | {number}", "paper's | 9.999"))
    done = CliRunner().invoke(app, ["pages", str(root)])
    assert (done.exit_code, done.output.split()) == (0, [str(root / "README.md")])
    assert (root / "README.md").read_text(encoding="utf-8") == by_hand


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("h200/decode.json", r"h200/decode\.json cannot be read .*git.*LOG\.md"),
        ("study/cache.json", r"study/cache\.json cannot be read .*git.*LOG\.md"),
        ("upcycling", r"upcycling holds no results: .*studies upcycle"),
        ("study/runs.jsonl", r"study/runs\.jsonl has no run of the base.*run the study"),
    ],
)
def test_a_result_that_is_not_there_is_named(file, said, copied):
    away = (copied / file).rename(copied / "away")
    try:
        with pytest.raises(ValueError, match=said):
            pages.blocks(copied)
    finally:
        away.rename(copied / file)


def test_the_study_shows_every_figure_of_the_paper_and_all_that_are_drawn():
    shown = set(
        re.findall(r"\]\(study/(.+?)\.svg\)", (ROOT / "docs" / "STUDY.md").read_text(encoding="utf-8"))
    )
    assert shown >= FIGURES.keys()
    assert shown == {path.stem for path in (ROOT / "docs" / "study").iterdir()}
