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
from pathlib import Path

import pytest
import torch
from command import tide_lm

from tide_lm.cli import serve
from tide_lm.run.optional import install

pytestmark = pytest.mark.skipif(importlib.util.find_spec("fastapi") is None, reason="needs the extra serve")


LONG = 100_000  # tokens that the model knows, which take longer than a test


def made(tiny_model, tokenizer):
    return tiny_model(vocab_size=len(tokenizer), eos_token_id=None, max_position_embeddings=LONG)


@pytest.fixture
def folder(tiny_model, tokenizer, tmp_path):
    """Whose shim would be seen if it ran."""
    export = tmp_path / "run" / "export"
    made(tiny_model, tokenizer).save_pretrained(export)
    tokenizer.save_pretrained(export)
    settings = {"model": {}, "data": {}, "optim": {}, "train": {}}
    (export.parent / "config.json").write_text(dumps(settings))
    for code in export / "modeling_tide.py", export.parent / "torch.py":
        code.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    return tmp_path / "run"


def answer(address, body=None, wait=600):
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
        *("--port", str(port), "--device", "cpu", "--name", "tide"),
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
    body = {"model": "tide", "prompt": "every layer", "max_tokens": 8, "temperature": 0}
    told = answer(f"http://127.0.0.1:{port}/v1/completions", body)["choices"][0]["text"]
    assert f"Ready. Try: curl http://127.0.0.1:{port}/v1/completions " in (tmp_path / "log").read_text()
    model, ids = made(tiny_model, tokenizer), tokenizer("every layer").input_ids
    done = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, len(ids) :]
    assert told == tokenizer.decode(done, skip_special_tokens=True)
    assert answer(f"http://127.0.0.1:{port}/v1/models")["data"][0]["id"] == "tide"
    with pytest.raises(TimeoutError):
        answer(f"http://127.0.0.1:{port}/v1/completions", body | {"max_tokens": LONG - 10}, wait=3)
    again = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert again.returncode == 1
    assert f"error: cannot listen at 127.0.0.1:{port} (Address already in use" in again.stderr
    process.send_signal(signal.SIGINT)  # while it still generates
    assert process.wait(600) == 130
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def started(monkeypatch):
    """Return `started(server, *words)`: the command line and environment of the server that is started."""

    def start(server, *words):
        asked = []
        there = {"vllm": ("vllm",), "transformers": ("fastapi", "uvicorn")}[server]
        monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: name in there or None)
        monkeypatch.setattr(serve.os, "execve", lambda *call: asked.append(call))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        done = tide_lm("serve", *words, "--port", port, "--", "--more", "yes")
        assert done.returncode == 0, done.stderr
        ((program, (first, *call), environment),) = asked
        assert program == first == sys.executable
        assert call[-6:] == ["--host", "127.0.0.1", "--port", str(port), "--more", "yes"]
        assert environment["PYTHONSAFEPATH"] == "1"
        return call[:-6], environment, done.stderr

    return start


def test_transformers_is_told_the_names_and_how_to_open_the_model(folder, started):
    """Hand on what follows `--` and the export of a run; modules beside it are not taken for its own."""
    call, _, _ = started("transformers", folder)
    assert call[:2] == ["-m", "tide_lm.interop.transformers_server"]
    assert call[3:] == ["serve", str(folder / "export")]
    told = loads(call[2])
    assert (told["folder"], told["opened"]) == (str(folder / "export"), {})
    assert told["names"] == ["run", str(folder / "export"), str(folder)]
    call, _, _ = started("transformers", folder / "export")
    assert loads(call[2])["names"] == ["run", str(folder / "export")]
    pack_of(folder)
    call, _, _ = started("transformers", folder, "--name", "tide", "--memory", "store:3", "--device", "cpu")
    assert call[3:] == ["serve", str(folder / "export"), "--device", "cpu"]
    told = loads(call[2])
    assert told["names"][0] == "tide"
    assert told["opened"] == {"memory": "store", "memory_cache_bytes": 3 << 20}
    assert '"model": "tide"' in told["ready"]


def test_vllm_is_told_the_names_and_where_rows_are(folder, started):
    call, environment, said = started("vllm", folder)
    export = str(folder / "export")
    assert call[:4] == ["-m", "vllm.entrypoints.openai.api_server", "--model", export]
    assert call[4:8] == ["--served-model-name", "run", export, str(folder)]
    assert call[8] == "--chat-template"
    assert "Assistant:" in Path(call[9]).read_text()
    assert environment.get("CUDA_VISIBLE_DEVICES") == os.environ.get("CUDA_VISIBLE_DEVICES")
    assert '"model": "run"' in said
    (folder / "export" / "chat_template.jinja").write_text("{{ messages }}")
    pack_of(folder)
    call, _, _ = started("vllm", folder, "--memory", "store:3", "--name", "tide")
    assert call[5] == "tide"
    rows = {"tide_memory": "store", "tide_memory_cache_bytes": 3 << 20}
    assert (call[8], loads(call[9]), len(call)) == ("--additional-config", rows, 10)
    done = tide_lm("serve", folder, "--device", "cpu")
    assert "vLLM runs on what it was built for" in done.said


def pack_of(folder):
    """Have a folder look packed."""
    path = folder / "export" / "config.json"
    store = {"file": "memory.tide", "fingerprint": "0" * 64}
    path.write_text(dumps(loads(path.read_text()) | {"memory_store": store}))


def test_rows_that_are_not_packed_cannot_be_elsewhere(folder):
    done = tide_lm("serve", folder, "--memory", "store")
    assert done.returncode == 1
    assert f"--memory store: {folder} is not packed: pack it first" in done.said


@pytest.mark.parametrize(
    ("model", "told"),
    [("no/such/folder", "there is no no/such/folder"), (".", ". has no config.json, so it is no model")],
)
def test_what_is_no_model_is_refused_at_once(tmp_path, monkeypatch, model, told):
    monkeypatch.chdir(tmp_path)
    done = tide_lm("serve", model)
    assert done.returncode == 1
    assert told in done.said


def test_without_a_server_it_says_what_to_install(folder, monkeypatch):
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: None)
    done = tide_lm("serve", folder)
    assert done.returncode == 1
    assert install("serve") in done.said
