"""What the README shows is what happens: its code runs, its numbers are those of the commands."""

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

from tide_lm import estimate, presets
from tide_lm.run_config import RunConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


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


def test_the_estimate_shown_is_the_estimate_printed():
    (shown,) = re.findall(r"```\n\$ tide-lm estimate tide-8e-1b\n(.*?)```", README, re.DOTALL)
    command = [sys.executable, "-m", "tide_lm", "estimate", "tide-8e-1b"]
    wide = {**os.environ, "COLUMNS": "100"}
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=wide).stdout
    assert shown.split() == printed.split()


def test_the_demos_numbers_are_those_of_its_json():
    result = json.loads((ROOT / "results" / "cpu" / "demo.json").read_text(encoding="utf-8"))
    base, tide = result["base"], result["tide"]
    pairs = {"all": (base["val_loss"], tide["val_loss"])}
    pairs |= {str(i): (base["loss_by_decile"][i], tide["loss_by_decile"][i]) for i in (0, 9)}
    for name, (before, after) in pairs.items():
        assert re.search(
            rf"\| {name}\b.* \| {before:.3f} \| {after:.3f} \| {after - before:+.3f} \|", README
        ), name
    assert f"{base['tokens']:,} tokens" in README
    assert f"{result['provenance']['machine']['cpu']}, {result['seconds'] / 60:.0f} minutes in all" in README


def test_every_file_and_command_named_exists():
    from tide_lm.cli import COMMANDS

    for path in re.findall(r"`((?:src|tests|docs)/[\w/.]+)`", README):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"\]\(((?!http)[\w/.-]+)", README):
        assert (ROOT / path).exists(), path
    assert set(re.findall(r"\| `tide-lm (\w+)", README)) == set(COMMANDS)


TRAINING = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")


def test_the_settings_shown_for_many_gpus_fit_each_number_of_them(tmp_path):
    (shown,) = re.findall(r"```toml\n(.*?)```", TRAINING, re.DOTALL)
    (tmp_path / "run.toml").write_text(shown)
    config = RunConfig.load(tmp_path / "run.toml")
    for gpus in (1, 8, 64):
        config.check_ranks(gpus)
    assert 200e9 < config.train.steps * config.train.batch * config.data.sequence < 200.01e9


def test_the_memory_shown_for_each_gpu_is_that_of_the_estimate():
    rows = re.findall(r"^\| `(.*?)` \| (.*?) \| (.*?) \| (.*?) \|$", TRAINING, re.MULTILINE)
    assert len(rows) == 6
    for name, *shown in rows:
        model = presets.get(name).model
        assert shown == [f"{sum(estimate.adam_bytes(model, gpus)) / 1e9:.1f}" for gpus in (1, 8, 64)]


def test_the_speeds_shown_are_those_of_the_json():
    runs = json.loads((ROOT / "results" / "h200" / "train.json").read_text(encoding="utf-8"))["runs"]
    speeds = {(run["preset"], run["plain"]): run for run in runs if run["preset"].endswith("-1b")}
    base = speeds["base-1b", False]["tokens_per_s"]
    for (preset, plain), run in speeds.items():
        name = preset + (", plain" if plain else "")
        if "out_of_memory" in run:
            assert f"| {name} | out of memory |" in TRAINING
            continue
        speed, share = run["tokens_per_s"], run["tokens_per_s"] / base
        cells = f"{name} | {speed:,.0f} | {share:.3f} | {100 * run['mfu']:.1f} % | {run['peak_gb']:.1f}"
        assert f"| {cells} |" in TRAINING
        if preset != "base-1b" and not plain:
            assert f"{share:.2f}" in README
    with_values = json.loads((ROOT / "results" / "h200" / "values.json").read_text(encoding="utf-8"))["runs"]
    before, after = (run for run in with_values if run["k"])
    assert f"from {before['step_ms']:.1f} to {after['step_ms']:.1f} ms a step" in TRAINING
    assert f"from {before['peak_gb']:.1f} to {after['peak_gb']:.1f} GB" in TRAINING


def test_the_speeds_of_generation_are_those_of_the_json():
    found = json.loads((ROOT / "results" / "h200" / "decode.json").read_text(encoding="utf-8"))
    names = {"base-1b": "base", "tide-8e-1b": "TIDE-8E", "tide-24e-1b": "TIDE-24E"}
    rows = {"device": "tables", "cpu": "4 bits, `cpu`"}
    others = {
        "compiled, static cache": "base, compiled and captured, static cache",
        "transformers": "base, `generate` of transformers",
        "transformers, static cache": "the same, static cache, compiled",
    }
    for run in found["runs"]:
        name, place = names[run["preset"]], rows.get(run["memory"]) if run["k"] else ""
        if run["batch"] == 32:
            assert f"{name} {'makes ' if not run['k'] else ''}{run['tokens_per_s']:,.0f}" in README
        elif run["by"] in others:
            memory = f"{run['vram_gb']:.2f}" if "vram_gb" in run else ""
            assert f"| {others[run['by']]} | | {run['ms_per_token']:.3f} | | {memory}".rstrip() in README
        elif place is not None:
            cells = f"{run['ms_per_token']:.3f} | {run['of_floor']:.0%}".replace("%", " %")
            line = f"| {name} | {place} | {cells} | {run['vram_gb']:.2f} |".replace("|  |", "| |")
            assert line in README
    base = found["runs"][0]
    far = next(run for run in found["runs"] if (run["k"], run["memory"]) == (24, "cpu"))
    store = found["store"]
    for told in (
        f"takes {base['ms_per_token']:.3f} ms, and with 24 tables",
        f"{far['ms_per_token']:.3f} ms and {far['vram_gb'] - base['vram_gb']:.2f} GB more",
        f"weights once takes {found['floor_ms']:.3f} ms",
        f"{store['hit_rate']:.0%} of its tokens".replace("%", " %"),
        f"take {store['hit_ms']:.3f} ms; others take {store['miss_ms']:.3f} ms",
        f"it is {store['device_ms']:.3f} ms",
    ):
        assert told in README
