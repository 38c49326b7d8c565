"""The blocks of docs/recipes.md do what the page says, in a folder with texts, a Llama and a benchmark.

They run as they stand, but on free ports. The Hub's block, which needs an account, is only compiled.
"""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tide_lm.interop.upcycle import open_source, strip
from tide_lm.model import TideForCausalLM

EXPORT = "runs/mine/export"
SHELL, PYTHON = ("bash", "-euc"), (sys.executable, "-c")
HAS_VLLM = importlib.util.find_spec("vllm") is not None


def free_ports(count: int) -> list[int]:
    """Return ports below those that the kernel gives to others, since they are used only minutes later."""
    found: list[int] = []
    port = 20_000 + os.getpid() % 4_000 * count
    while len(found) < count:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        port += 1
    return found


pytestmark = pytest.mark.slow
PORTS = dict(zip(("6006", "8000", "29500"), map(str, free_ports(3)), strict=True))
PAGE = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text(encoding="utf-8")
PAGE = re.sub(rf"\b({'|'.join(PORTS)})\b", lambda found: PORTS[found[0]], PAGE)
BLOCKS = {
    section.partition("\n")[0]: re.findall(r"^```\w+\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    for section in PAGE.removeprefix("# ").split("\n## ")
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with what the page asks for, and what its first block makes."""
    folder = tmp_path_factory.mktemp("recipes")
    for name in ("bin", "texts", "benchmarks"):
        (folder / name).mkdir()
    command = folder / "bin/tide-lm"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tide_lm "$@"\n')
    command.chmod(0o755)
    for name in sorted(topics)[:40]:
        (folder / "texts" / f"{name}.txt").write_text(topics[name], encoding="utf-8")
    records = [{"goal": f"{i}", "sol1": "the", "sol2": "the" * (i + 2), "label": i % 2} for i in range(9)]
    (folder / "benchmarks/piqa_validation.jsonl").write_text("\n".join(map(json.dumps, records)))
    run(folder, *SHELL, *BLOCKS["Other tools"])
    AutoTokenizer.from_pretrained(folder / EXPORT).save_pretrained(folder / "my-llama")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=4096, **sizes)).save_pretrained(folder / "my-llama")
    return folder


@contextlib.contextmanager
def started(place, *call):
    """A process that finds this Python's commands; it and all that it has started end with the context."""
    path = os.pathsep.join([str(place / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    more = {"PATH": path, "HF_HOME": str(place / "cache"), "FIRST_MACHINE": "localhost"}
    options = {"env": os.environ | more, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen(call, cwd=place, **options)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def run(place, *call) -> str:
    with started(place, *call) as process:
        told = process.communicate(timeout=400)[0]
    assert process.returncode == 0  # pytest shows what it said of it
    return told


def answer(process, address, body=None):
    """What a server says in JSON, once it says something."""
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    for _ in range(800):
        assert process.poll() is None, "the server has ended"
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=60) as found:
            if told := json.loads(found.read()):
                return told
        time.sleep(0.5)
    raise AssertionError(f"{address} says nothing")


def losses(folder) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def changed(before, after) -> set[str]:
    old, new = (load_file(folder / "model.safetensors") for folder in (before, after))
    return {name for name in old.keys() | new.keys() if not torch.equal(old[name], new[name])}


def written(folder) -> str:
    """What our model writes after the prompt of the page."""
    model, tokenizer = TideForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("The tide comes in", return_tensors="pt").input_ids
    done = model.generate(ids, max_new_tokens=16, do_sample=False)
    return tokenizer.decode(done[0, ids.shape[1] :], skip_special_tokens=True)


def test_every_block_is_known_here_and_the_first_trains(place):
    assert [len(blocks) for blocks in BLOCKS.values()] == [1, 1, 1, 2, 3, 1, 1, 1, 1], "test the new one too"
    compile(*BLOCKS["The Hub"], "recipes.md", "exec")
    assert losses(place / "runs/mine")[-1] < losses(place / "runs/mine")[0] - 0.5


def test_trainer(place):
    run(place, *PYTHON, *BLOCKS["Trainer of transformers"])
    state = json.loads((place / "runs/trainer/checkpoint-10/trainer_state.json").read_text())
    found = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert sum(found[-3:]) < sum(found[:3]) - 0.5
    groups = torch.load(place / "runs/trainer/checkpoint-10/optimizer.pt", weights_only=True)["param_groups"]
    assert [(group["initial_lr"], group["weight_decay"]) for group in groups][-1] == (5e-3, 0.0)
    assert found[0] < losses(place / "runs/mine")[0] - 0.5  # it goes on from there
    assert "model.memory.weight" in changed(place / EXPORT, place / "runs/trainer/export")


def test_lora(place):
    from peft import PeftModel

    run(place, *PYTHON, *BLOCKS["LoRA with PEFT"])
    tokenizer = AutoTokenizer.from_pretrained(place / "merged/mine")
    ids = tokenizer("The tide comes in, and the tide goes out.", return_tensors="pt").input_ids
    before, merged = (TideForCausalLM.from_pretrained(place / name) for name in (EXPORT, "merged/mine"))
    assert merged(ids, labels=ids).loss < before(ids, labels=ids).loss - 0.2
    adapted = PeftModel.from_pretrained(before, place / "adapters/mine")
    torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-4)
    moved = {name.split(".")[-2] for name in changed(place / EXPORT, place / "merged/mine")}
    layers = {f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")}
    assert moved == layers | {"router", "value_gate"}


def test_lm_eval(place):
    pytest.importorskip("lm_eval")
    run(place, *SHELL, BLOCKS["lm-eval"][0])
    found = json.loads((place / "runs/mine/results/benchmarks.json").read_text())["tasks"]["piqa"]
    assert (found["samples"], 0 < found["score"] < 1) == (9, True)
    assert float(run(place, *PYTHON, BLOCKS["lm-eval"][1]).split()[-1]) == pytest.approx(found["score"])


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_vllm(place):
    body = b'{"model": "mine-4bit", "prompt": "The tide comes in", "temperature": 0}'
    with started(place, *SHELL, BLOCKS["vLLM"][0]) as server:
        told = answer(server, f"http://127.0.0.1:{PORTS['8000']}/v1/completions", body)["choices"][0]["text"]
    assert told == written(place / "mine-4bit")
    assert told in run(place, *PYTHON, BLOCKS["vLLM"][1])


@pytest.mark.skipif(not shutil.which("curl"), reason="there is no curl")
def test_serve(place):
    pytest.importorskip("fastapi")
    told = run(place, *SHELL, BLOCKS["vLLM"][2])  # between lines of the server's
    found, _ = json.JSONDecoder().raw_decode(told, told.index('{"id"'))
    assert found["choices"][0]["text"] == written(place / EXPORT)


@pytest.mark.torchrun
def test_torchrun(place):
    (block,) = BLOCKS["torchrun on several machines"]
    told = run(place, *SHELL, f"{{\n{block}}} &\n{block}wait $!")  # two machines
    assert told.count("validation loss") == 1
    assert losses(place / "runs/spread") == pytest.approx(losses(place / "runs/mine"), rel=1e-5)


def test_tensorboard(place):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(place / "runs/mine/tensorboard")).Reload().Scalars("loss")
    assert [event.value for event in events] == pytest.approx(losses(place / "runs/mine"))
    with started(place, *SHELL, *BLOCKS["TensorBoard"]) as server:
        tags = answer(server, f"http://localhost:{PORTS['6006']}/data/plugin/scalars/tags")
    assert {"loss", "validation/loss", "learning_rate"} <= tags["mine/tensorboard"].keys()


def test_upcycle(place):
    run(place, *SHELL, *BLOCKS["Upcycle a Llama and train on"])
    llama, ids = LlamaForCausalLM.from_pretrained(place / "my-llama"), torch.arange(3, 60)[None]
    assert torch.equal(TideForCausalLM.from_pretrained(place / "my-tide")(ids).logits, llama(ids).logits)
    assert not changed(place / "my-llama", place / "my-llama-again")
    found = losses(place / "runs/memory")
    assert found[-1] < found[0] - 0.01
    moved = changed(place / "my-tide", place / "runs/memory/export")
    assert {"model.memory.weight", "model.memory.norm.weight"} <= moved
    assert not any("_proj" in name or "embed" in name or "layernorm" in name for name in moved)
    with pytest.raises(ValueError, match="give --anyway to drop the memory"):
        strip(open_source(str(place / "runs/memory/export")), place / "refused")
