"""`tide-lm serve` without vLLM: transformers' own server, with no code of the folder."""

import importlib.util
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from json import dumps, loads

import pytest
import torch
from typer.testing import CliRunner

from tide_lm.cli import commands, serve

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


def answer(address, body=None):
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(address, None if body is None else dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as found:
        return loads(found.read())


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
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    given_up = time.monotonic() + 120
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
    process.terminate()
    process.wait(30)
    assert not (tmp_path / "ran").exists()


def test_without_a_server_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: None)
    done = CliRunner().invoke(commands(["serve", "doctor"]), ["serve", "model"])
    assert "pip install 'tide-lm[serve]'" in str(done.exception)
