"""`tide-lm serve` without vLLM: transformers' own server, with no code of the folder."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from json import dumps, loads

import pytest
import torch
from command import tide_lm

from tide_lm.cli import serve

pytestmark = pytest.mark.skipif(importlib.util.find_spec("fastapi") is None, reason="needs the extra serve")


@pytest.fixture
def folder(tiny_model, tokenizer, tmp_path):
    """Whose shim would be seen if it ran."""
    export = tmp_path / "run" / "export"
    tiny_model(vocab_size=len(tokenizer), eos_token_id=None).save_pretrained(export)
    tokenizer.save_pretrained(export)
    for code in export / "modeling_tide.py", export.parent / "torch.py":
        code.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    return tmp_path / "run"


def answer(address, body=None, wait=60):
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(address, None if body is None else dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=wait) as found:
        return loads(found.read())


@pytest.mark.slow
def test_transformers_serves_where_vllm_is_not(folder, tokenizer, tiny_model, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-P",
        "-m",
        "tide_lm",
        "serve",
        str(folder),
        "--port",
        str(port),
        "--",
        "--device",
        "cpu",
    ]
    with (tmp_path / "log").open("w") as log:
        environment = {**os.environ, "HF_HOME": str(tmp_path / "cache")}
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=environment)
    given_up = time.monotonic() + 600
    while True:
        assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
        assert time.monotonic() < given_up, (tmp_path / "log").read_text()[-3000:]
        try:
            answer(f"http://127.0.0.1:{port}/health")
            break
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
    name = str(folder / "export")
    body = {"model": name, "prompt": "every layer", "max_tokens": 8, "temperature": 0}
    told = answer(f"http://127.0.0.1:{port}/v1/completions", body)["choices"][0]["text"]
    model, ids = tiny_model(vocab_size=len(tokenizer), eos_token_id=None), tokenizer("every layer").input_ids
    done = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, len(ids) :]
    assert told == tokenizer.decode(done, skip_special_tokens=True)
    assert answer(f"http://127.0.0.1:{port}/v1/models")["data"] == []  # no cache of the Hub is no error
    with pytest.raises(TimeoutError):
        answer(f"http://127.0.0.1:{port}/v1/completions", body | {"max_tokens": 10**6}, wait=3)
    again = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert again.returncode == 1
    assert f"error: cannot listen at 127.0.0.1:{port} (Address already in use" in again.stderr
    process.send_signal(signal.SIGINT)  # while it still generates
    assert process.wait(600) == 130
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("has_vllm", [True, False])
def test_the_server_that_is_there_takes_the_place_of_the_process(folder, monkeypatch, has_vllm):
    """Hand on what follows `--` and the export of a run; modules beside it are not taken for its own."""
    asked = []
    monkeypatch.setattr(
        serve.importlib.util, "find_spec", lambda name: True if has_vllm else name != "vllm" or None
    )
    monkeypatch.setattr(serve.os, "execve", lambda *call: asked.append(call))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = tide_lm("serve", folder, "--port", port, "--", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    ((program, (first, *words), environment),) = asked
    assert program == first == sys.executable
    module = "vllm.entrypoints.openai.api_server" if has_vllm else "tide_lm.interop.transformers_server"
    assert words[:2] == ["-m", module]
    assert words[-7:] == [
        str(folder / "export"),
        *("--host", "127.0.0.1", "--port", str(port), "--device", "cpu"),
    ]
    assert environment["PYTHONSAFEPATH"] == "1"


@pytest.mark.parametrize(
    ("model", "told"), [("no/such/folder", "there is no no/such/folder"), (".", "cannot read a model config")]
)
def test_what_is_no_model_is_refused_at_once(tmp_path, monkeypatch, model, told):
    monkeypatch.chdir(tmp_path)
    done = tide_lm("serve", model)
    assert done.returncode == 1
    assert told in done.said


def test_without_a_server_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: None)
    done = tide_lm("serve", "model")
    assert done.returncode == 1
    assert "pip install -e '.[serve]'" in done.said
