"""What the README shows is what happens: its code and commands run, and what it names is there.

tests/studies/test_pages.py has its numbers.
"""

import gzip
import json
import lzma
import os
import re
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from tide_lm.run.settings import RunConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_python_examples_run_one_after_the_other(tmp_path):
    code = "\n".join(re.findall(r"```python\n(.*?)```", README, re.DOTALL))
    code += "\nprint(type(model).__name__, model.config.num_memory_blocks, len(tokens))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == "TideForCausalLM 4 2", done.stderr


COMMANDS = [
    line.split("  #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
] + re.findall(r"`(tide-lm (?:pack|presets|estimate) [^`A-Z]+)`", README)
SMALLER = {
    "--tokenizer llama3": "--tokenizer my-llama",
    "tide-8e-350m": "tide-2e-tiny --set train.steps=4 --set train.batch=4 --set data.sequence=32 "
    "--set optim.warmup_steps=0 --set train.checkpoint_every=2 --set train.validation_sequences=4",
    "train.steps=2000 --set optim.warmup_steps=100": "train.steps=2 --set optim.warmup_steps=0 "
    "--set train.batch=4 --set data.sequence=32",
    "--nproc-per-node=8": "--nproc-per-node=2",
}
RUN_ELSEWHERE = {  # by .ci/run or the tests named
    "make test": ".ci/run",
    "make demo": "tests/cli/test_commands.py",
    "pip install": "pyproject.toml",
    "vllm serve": "tests/with_vllm",
    "tide-lm serve": "tests/cli/test_serve_command.py",
    "tide-lm explore": "tests/explore/test_explorer_in_browser.py",
    "tide-lm evaluate runs/mine --benchmarks hub": "tests/evaluate/test_zero_shot.py",
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


@pytest.mark.slow
def test_the_commands_shown_work_one_after_the_other(tmp_path, tokenizer):
    """As they stand, but with smaller models and fewer steps."""
    _what_the_reader_has(tmp_path, tokenizer)
    here = [line for line in COMMANDS if not line.startswith(tuple(RUN_ELSEWHERE))]
    assert len(here) > 15
    for place in RUN_ELSEWHERE.values():
        assert (ROOT / place).exists()
    for before, after in SMALLER.items():
        assert any(before in line for line in here), before
        here = [line.replace(before, after) for line in here]
    first = next(line for line in here if line.startswith("tide-lm train") and "--dry-run" not in line)
    here.insert(
        here.index(first), first.replace("runs/mine", "runs/base").replace("tide-2e-tiny", "base-tiny")
    )
    for is_ours, lines in groupby(here, lambda line: line.startswith("tide-lm")):
        call = [sys.executable, "-c", ONE_PROCESS] if is_ours else ["bash", "-eu"]
        given = "\n".join(lines)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            call, input=given, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PATH": path}
        )
        assert done.returncode == 0, done.stderr[-3000:]
    for made in "runs/mine/export", "runs/more/export", "mine-4bit", "my-llama-again", "runs/mine/results":
        assert (tmp_path / made).is_dir(), made


def _what_the_reader_has(folder, tokenizer):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder / "my-llama")
    tokenizer.save_pretrained(folder / "my-llama")
    records = "\n".join(json.dumps({"text": topics[name]}) for name in sorted(topics)[:60]).encode()
    (folder / "my-texts").mkdir()
    (folder / "my-texts" / "some.jsonl.gz").write_bytes(gzip.compress(records))
    (folder / "abstracts.jsonl.xz").write_bytes(lzma.compress(records[: records.index(b"\n")]))
    (folder / "wiki.test.txt").write_text(topics["assert"], encoding="utf-8")


def test_every_file_and_command_named_exists():
    from tide_lm.cli import COMMANDS

    for path in re.findall(r"`((?:src|tests|docs)/[\w/.]+)`", README):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"\]\(((?!http)[\w/.-]+)", README):
        assert (ROOT / path).exists(), path
    assert set(re.findall(r"\| `tide-lm (\w+)", README)) == set(COMMANDS)


def test_the_settings_shown_for_many_gpus_fit_each_number_of_them(tmp_path):
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "run.toml").write_text(shown)
    config = RunConfig.load(tmp_path / "run.toml")
    for gpus in (1, 8, 64):
        config.check_ranks(gpus)
    assert 200e9 < config.train.steps * config.train.batch * config.data.sequence < 200.01e9
