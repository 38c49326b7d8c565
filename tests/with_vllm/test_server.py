"""`vllm serve` with a TIDE model, as clients meet it: many at once, gone, or wrong."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from tide_lm.model import TideForCausalLM

NAME = "tide"


@pytest.fixture(scope="module")
def server(saved, tmp_path_factory):
    """Its address and folder. It is started by `tide-lm serve`, and ends with a signal."""
    folder = saved(memory_values=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "tide_lm",
        "serve",
        str(folder),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        *("--name", NAME, "--memory", "device"),
    ]
    command += [
        "--",
        "--dtype",
        "float32",
        "--max-model-len",
        "256",
        "--enforce-eager",
    ]
    log = tmp_path_factory.mktemp("log") / "server.txt"
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    address = f"http://127.0.0.1:{port}"
    given_up = time.monotonic() + 600
    while True:
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < given_up, log.read_text()[-4000:]
        try:
            if httpx.get(f"{address}/health", timeout=2).status_code == 200:
                break
        except httpx.HTTPError:
            time.sleep(0.5)
    yield address, folder
    process.terminate()
    assert process.wait(600) in (0, -15, 143), log.read_text()[-4000:]


def asked(prompt, **more) -> dict:
    return {"model": NAME, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True} | more


def expected(folder, prompt, tokens=12) -> list[int]:
    model = TideForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([prompt])
    done = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, eos_token_id=None
    )
    return done[0, len(prompt) :].tolist()


def test_two_hundred_requests_at_once_are_all_answered_as_our_model_does(server):
    address, folder = server
    prompts = [[0, 3 + i % 40, 5 + i % 7, *range(10, 10 + i % 30)] for i in range(200)]

    async def ask_all():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=300, limits=limits) as client:
            body = {"return_token_ids": True}
            calls = [client.post(f"{address}/v1/completions", json=asked(one, **body)) for one in prompts]
            return await asyncio.gather(*calls)

    answers = asyncio.run(ask_all())
    assert {answer.status_code for answer in answers} == {200}
    found = [answer.json()["choices"][0]["token_ids"] for answer in answers]
    assert all(len(tokens) == 12 for tokens in found)
    for i in range(0, 200, 25):
        assert found[i] == expected(folder, prompts[i])


def test_text_is_streamed_and_is_the_text_of_the_tokens(server):
    address, folder = server
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "every layer knows"
    with httpx.stream(
        "POST", f"{address}/v1/completions", json=asked(text, stream=True), timeout=600
    ) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    told = "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])
    assert told == tokenizer.decode(expected(folder, tokenizer(text).input_ids))


def test_a_client_that_goes_away_leaves_room_for_others(server):
    address, folder = server
    for _ in range(8):
        body = asked([0, 5, 6], stream=True, max_tokens=200)
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=600) as answer:
            next(answer.iter_lines())
    given_up = time.monotonic() + 600
    while _running(address):
        assert time.monotonic() < given_up
        time.sleep(0.2)
    answer = httpx.post(
        f"{address}/v1/completions", json=asked([0, 5, 6], return_token_ids=True), timeout=600
    )
    assert answer.json()["choices"][0]["token_ids"] == expected(folder, [0, 5, 6])


def _running(address) -> float:
    lines = httpx.get(f"{address}/metrics", timeout=600).text.splitlines()
    (count,) = (line.split()[-1] for line in lines if line.startswith("vllm:num_requests_running{"))
    return float(count)


@pytest.mark.parametrize(
    "body",
    [
        b"{not json",
        json.dumps({"model": NAME}).encode(),
        json.dumps(asked([0, 99_999])).encode(),
        json.dumps(asked([0] * 400)).encode(),
        json.dumps(asked([0], max_tokens=-1)).encode(),
        json.dumps(asked([0], model="another")).encode(),
    ],
    ids=["no json", "no prompt", "unknown token", "too long", "no tokens", "another model"],
)
def test_a_wrong_request_is_refused_and_harms_no_other(server, body):
    address, folder = server
    headers = {"content-type": "application/json"}
    refused = httpx.post(f"{address}/v1/completions", content=body, headers=headers, timeout=600)
    assert 400 <= refused.status_code < 500
    answer = httpx.post(f"{address}/v1/completions", json=asked([0, 7], return_token_ids=True), timeout=600)
    assert answer.json()["choices"][0]["token_ids"] == expected(folder, [0, 7])


def test_it_says_which_model_it_is(server):
    address, folder = server
    model, by_path = httpx.get(f"{address}/v1/models", timeout=600).json()["data"]
    assert (model["id"], by_path["id"]) == (NAME, str(folder))
    assert Path(model["root"]) == folder


def test_a_tokenizer_without_a_template_has_a_plain_one(server):
    body = {"model": NAME, "messages": [{"role": "user", "content": "every layer"}], "max_tokens": 4}
    answer = httpx.post(f"{server[0]}/v1/chat/completions", json=body, timeout=600)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] <= 4
