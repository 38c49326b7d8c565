"""The README and the pages of docs/ keep their word: their commands run, and what they name is there.

tests/studies/test_pages.py has their numbers.
"""

import gzip
import json
import lzma
import os
import re
import subprocess
import sys
from itertools import chain, groupby
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from tide_lm.run.settings import RunConfig

ROOT = Path(__file__).parents[1]
BOOKS = {  # pages whose commands a reader runs one after the other, in one folder
    "README": ["README.md"],
    "docs": [
        f"docs/{name}.md"
        for name in ("getting-started", "concepts", "training", "upcycling", "serving", "store", "evaluation")
    ],
}
TESTED_ELSEWHERE = {
    "recipes.md": "tests/test_recipes.py",
    "store-format.md": "tests/compress/test_pack.py",
    "api.md": "tests/test_api.py",
}
SMALLER = {
    "--tokenizer llama3": "--tokenizer my-llama",
    "-350m": "-tiny --set train.steps=4 --set train.batch=4 --set data.sequence=32 "
    "--set train.checkpoint_every=2 --set train.validation_sequences=4",
    "train.steps=2000": "train.steps=2 --set train.batch=4 --set data.sequence=32",
    "--run runs/story": "--run runs/story --set train.steps=2 --set train.batch=4",
    "--nproc-per-node=8": "--nproc-per-node=2",
    'preset = "tide-8e-1b"': 'preset = "tide-2e-tiny"',
    "batch = 512": "validation_sequences = 4\nbatch = 4",
    "micro_batch = 8": "micro_batch = 2",
    "steps = 190735": "steps = 4",
    "compile = true": "",
    "[data]": "[data]\nsequence = 32",
}
RUN_ELSEWHERE = {  # by .ci/run or the tests named
    "make test": ".ci/run",
    "make demo": "tests/cli/test_commands.py",
    "source .venv": ".ci/run",
    "pip install": "pyproject.toml",
    "torchrun --nnodes": "tests/test_recipes.py",
    "vllm serve": "tests/with_vllm",
    "tide-lm serve": "tests/cli/test_serve_command.py",
    "tide-lm explore": "tests/explore/test_explorer_in_browser.py",
    "tide-lm evaluate runs/mine --benchmarks hub": "tests/evaluation/test_zero_shot.py",
}
ONE_PROCESS = """
import shlex, sys
from tide_lm.cli import main
for line in sys.stdin.read().splitlines():
    print("$", line, file=sys.stderr)
    sys.argv = shlex.split(line)
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
"""


def text_of(page: str | Path) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def steps(book: str) -> list[tuple[str, str]]:
    """Return what a reader does: lines of a shell, blocks of Python, and settings that go into a file."""
    found = []
    for page in BOOKS[book]:
        text = text_of(page)
        for language, block in re.findall(
            r"^```(sh|python|toml)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE
        ):
            if language != "sh":
                found.append((language, block))
                continue
            lines = (line.split("  #")[0].strip() for line in block.replace("\\\n", " ").splitlines())
            found += [("sh", line) for line in lines if line and not line.startswith("#")]
        named = re.findall(r"`(tide-lm (?:pack|presets|estimate) [^`A-Z]+)`", text)
        found += [("sh", line) for line in named if "..." not in line]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("book", BOOKS)
def test_what_is_shown_works_one_after_the_other(book, tmp_path, tokenizer):
    """As it stands, but with smaller models and fewer steps."""
    _what_the_reader_has(tmp_path, tokenizer)
    for place in RUN_ELSEWHERE.values():
        assert (ROOT / place).exists()
    here = [step for step in steps(book) if not step[1].startswith(tuple(RUN_ELSEWHERE))]
    assert len(here) >= (10 if book == "README" else 25)
    for before, after in SMALLER.items():
        here = [(language, text.replace(before, after)) for language, text in here]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for kind, group in groupby(here, _kind):
        given = "\n".join(text for _, text in group)
        if kind == "toml":
            (tmp_path / "run.toml").write_text(given)
            continue
        call = {"tide-lm": [sys.executable, "-c", ONE_PROCESS], "python": [sys.executable]}
        done = subprocess.run(
            call.get(kind, ["bash", "-eu"]),
            input=given,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
        )
        assert done.returncode == 0, f"{given}\n{done.stderr[-3000:]}"
    made = {"README": "tiny-tide", "docs": "my-llama-again runs/base/export runs/large/export"}
    shared = "runs/mine/export runs/more/export mine-4bit runs/mine/results"
    for name in f"{shared} {made[book]}".split():
        assert (tmp_path / name).is_dir(), name


def _kind(step: tuple[str, str]) -> str:
    language, text = step
    return "tide-lm" if language == "sh" and text.startswith("tide-lm") else language


def _what_the_reader_has(folder, tokenizer):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder / "my-llama")
    tokenizer.save_pretrained(folder / "my-llama")
    records = "\n".join(json.dumps({"text": topics[name]}) for name in sorted(topics)[:60]).encode()
    (folder / "my-texts").mkdir()
    (folder / "my-texts" / "some.jsonl.gz").write_bytes(gzip.compress(records))
    (folder / "my-texts" / "story.txt").write_text(records.decode(), encoding="utf-8")
    (folder / "abstracts.jsonl.xz").write_bytes(lzma.compress(records[: records.index(b"\n")]))
    (folder / "wiki.test.txt").write_text(topics["assert"], encoding="utf-8")


def test_every_change_for_the_test_is_of_something_shown():
    shown = "\n".join(text for book in BOOKS for _, text in steps(book))
    for text in (*SMALLER, *RUN_ELSEWHERE):
        assert text in shown, text


def test_every_page_with_code_is_tested():
    pages = [*TESTED_ELSEWHERE, *(Path(page).name for page in BOOKS["docs"])]
    for page in (ROOT / "docs").glob("*.md"):
        if re.search(r"^```(sh|python|toml)$", text_of(page), re.MULTILINE):
            assert page.name in pages, f"name {page.name} in BOOKS, or where its code is tested"
    for page, test in TESTED_ELSEWHERE.items():
        assert page in text_of(test)


def test_the_readme_fits_one_screen():
    assert len(text_of("README.md").splitlines()) <= 150
    assert len(text_of("README.md").encode()) <= 9 * 1024


def test_every_file_and_command_named_exists():
    from tide_lm.cli import COMMANDS

    for page in (
        "README.md",
        "CONTRIBUTING.md",
        *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
    ):
        if page == "docs/LOG.md":  # which tells of files that are gone
            continue
        for path in re.findall(r"`((?:src|tests|docs|studies)/[\w/.]+)`", text_of(page)):
            assert (ROOT / path).exists(), (page, path)
        for path in re.findall(r"\]\(((?!http)[\w/.-]+)", text_of(page)):
            assert (ROOT / page).parent.joinpath(path).exists(), (page, path)
    assert set(re.findall(r"\| `tide-lm (\w+)", text_of("docs/commands.md"))) == set(
        chain(*COMMANDS.values())
    )


def test_the_paper_map_names_code_and_tests_that_exist():
    page = text_of("docs/paper-map.md")
    for path in re.findall(r"`([\w/]+/\w+\.py)`", page):
        assert (ROOT / path).exists() or (ROOT / "src" / "tide_lm" / path).exists(), path
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    for name in re.findall(r"`(test_\w+)`", page):
        assert f"def {name}(" in tests, name


def test_the_settings_shown_for_many_gpus_fit_each_number_of_them(tmp_path):
    (shown,) = (text for language, text in steps("docs") if language == "toml")
    (tmp_path / "run.toml").write_text(shown)
    config = RunConfig.load(tmp_path / "run.toml")
    for gpus in (1, 8, 64):
        config.check_processes(gpus)
    assert 200e9 < config.train.steps * config.train.batch * config.data.sequence < 200.01e9
