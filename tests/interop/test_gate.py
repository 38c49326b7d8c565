"""The gate before transformers' own server: names, errors, stop words; with the real server behind it."""

import importlib.util
import json

import pytest
import torch
from transformers import AutoTokenizer

from tide_lm.interop.gate import Stops
from tide_lm.model import TideConfig, TideForCausalLM

pytestmark = pytest.mark.skipif(importlib.util.find_spec("fastapi") is None, reason="needs the extra serve")
PROMPT = {"prompt": "every layer", "max_tokens": 12, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "every layer"}], "max_tokens": 12, "temperature": 0}
TEXT, TALK = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    """A model that writes letters, since its head has nothing for other characters."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = TideConfig(
        vocab_size=len(tokenizer),
        **sizes,
        num_memory_blocks=3,
        max_position_embeddings=512,
        initializer_range=0.5,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    model = TideForCausalLM(config).eval()
    for token in range(len(tokenizer)):
        if not tokenizer.decode(token).isalpha():
            model.lm_head.weight.data[token] = 0
    path = tmp_path_factory.mktemp("served") / "model"
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def server(folder):
    """Return a client of transformers' server behind the gate, without a socket."""
    import transformers
    import uvicorn
    from fastapi.testclient import TestClient
    from transformers.cli.serve import Serve

    from tide_lm.interop import transformers_server

    found = []

    class Server(transformers_server.Server):
        options = transformers_server.Options(folder, ["mine", folder], {}, "ready")

        def run(self) -> None:
            found.append(self.config.app)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn, "Server", Server)
        patch.setattr(transformers, "TideForCausalLM", TideForCausalLM, raising=False)
        Serve(force_model=folder, device="cpu")
    with TestClient(found[0], raise_server_exceptions=False) as client:
        yield client


def text_of(server, **more) -> str:
    done = server.post(TEXT, json=PROMPT | more)
    assert done.status_code == 200, done.text
    return done.json()["choices"][0]["text"]


def streamed(server, path, body) -> list[dict]:
    *lines, last, rest = server.post(path, json=body | {"stream": True}).text.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_the_model_has_a_short_name_and_its_path(server, folder):
    (model,) = server.get("/v1/models").json()["data"]
    assert model["id"] == server.get("/v1/models/mine").json()["id"] == "mine"
    answers = [server.post(TEXT, json=PROMPT | {"model": name}) for name in ("mine", folder)]
    assert [answer.json()["model"] for answer in answers] == ["mine", "mine"]
    assert {event["model"] for event in streamed(server, TALK, CHAT)} == {"mine"}


@pytest.mark.parametrize(("path", "body"), [(TEXT, PROMPT), (TALK, CHAT)], ids=["text", "chat"])
@pytest.mark.parametrize("headers", [{"content-type": "application/x-www-form-urlencoded"}, {}], ids=repr)
def test_a_request_is_json_whatever_its_header_says(server, path, body, headers):
    answer = server.post(path, content=json.dumps(body).encode(), headers=headers)
    assert answer.status_code == 200, answer.text


def test_text_is_what_the_model_generates(server, folder):
    tokenizer, model = AutoTokenizer.from_pretrained(folder), TideForCausalLM.from_pretrained(folder)
    ids = tokenizer("every layer", return_tensors="pt").input_ids
    done = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    wanted = tokenizer.decode(done, skip_special_tokens=True)
    assert len(wanted) >= 12
    assert text_of(server) == wanted
    assert "".join(event["choices"][0]["text"] for event in streamed(server, TEXT, PROMPT)) == wanted


def test_a_temperature_draws_and_a_seed_draws_again(server):
    first, again, other = (text_of(server, temperature=1.5, seed=seed) for seed in (7, 7, 4))
    assert first == again != other


def test_without_a_limit_an_answer_ends_where_the_model_does(server):
    """It knows 512 positions; transformers would go on for 1,024 tokens."""
    done = server.post(TEXT, json={"prompt": "every layer", "temperature": 0}).json()
    assert done["usage"]["total_tokens"] <= 512


def test_a_stop_word_is_left_out_even_in_a_stream(server):
    whole = text_of(server)
    word = whole[5:7]
    before = whole[: whole.index(word)]
    assert text_of(server, stop=word) == before
    from fastapi.testclient import TestClient

    strict = TestClient(server.app)  # which raises what the server raises after its answer too
    assert strict.post(TEXT, json=PROMPT | {"stop": word}).status_code == 200
    events = streamed(server, TEXT, PROMPT | {"stop": ["nowhere", word]})
    assert "".join(event["choices"][0]["text"] for event in events) == before
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    (answer,) = server.post(TALK, json=CHAT).json()["choices"]
    talk = answer["message"]["content"]
    events = streamed(server, TALK, CHAT | {"stop": talk[4:6]})
    told = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    assert told == talk[: talk.index(talk[4:6])]


def test_a_tokenizer_without_a_template_has_a_plain_one(server, folder):
    """Which ends with the name of who answers; tokens are counted as transformers counts them."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "every layer"}]
    text = f"{tokenizer.bos_token}System: Be brief.\n\nUser: every layer\n\nAssistant:"
    done = server.post(TALK, json=CHAT | {"messages": messages}).json()
    assert done["usage"]["prompt_tokens"] == len(tokenizer(text, add_special_tokens=False).input_ids)
    parts = [{"type": "text", "text": "every layer"}]
    one, other = (
        server.post(TALK, json=CHAT | {"messages": [{"role": "user", "content": content}]}).json()["choices"]
        for content in ("every layer", parts)
    )
    assert one == other


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}], ids=repr)
def test_a_message_that_calls_a_tool_needs_no_text(server, content):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [*CHAT["messages"], {"role": "assistant", "tool_calls": [call], **content}, *CHAT["messages"]]
    answer = server.post(TALK, json=CHAT | {"messages": messages})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        (TEXT, PROMPT | {"model": "gpt"}, 404, "there is no model 'gpt' here: ask for 'mine'"),
        (TEXT, {"max_tokens": 3}, 400, "prompt must be a text"),
        (TEXT, PROMPT | {"prompt": ["a", "b"]}, 400, "prompt must be a text"),
        (TEXT, PROMPT | {"prompt": ""}, 400, "the prompt has no tokens"),
        (TEXT, PROMPT | {"prompt": "\ud800"}, 400, "not text in Unicode"),
        (TEXT, PROMPT | {"prompt": "a " * 5_000_000}, 400, "the prompt has 10,000,000 characters"),
        (TEXT, PROMPT | {"prompt": "a" * (33 << 20)}, 413, "larger than 32 MiB"),
        (TEXT, PROMPT | {"max_tokens": 5000}, 400, "which with 5,000 new are more than the"),
        (TEXT, PROMPT | {"max_tokens": 0}, 400, "max_tokens is 0"),
        (TEXT, PROMPT | {"max_tokens": 1.5}, 400, "must be whole numbers"),
        (TEXT, PROMPT | {"temperature": "hot"}, 400, "temperature is 'hot'"),
        (TEXT, PROMPT | {"stop": [""]}, 400, "none of them empty"),
        (TEXT, PROMPT | {"n": 2}, 400, "n does nothing on this server, which gives one answer: leave"),
        (TEXT, PROMPT | {"logprobs": 2}, 400, "logprobs does nothing on this server: leave it out"),
        (TEXT, PROMPT | {"echo": True}, 400, "echo does nothing on this server: leave it out"),
        (
            TEXT,
            PROMPT | {"mx_tokens": 2},
            400,
            "'mx_tokens' is no field of /v1/completions: did you mean 'max_",
        ),
        (TALK, CHAT | {"zzz": 2}, 400, "'zzz' is no field of /v1/chat/completions: leave it out"),
        (TEXT, PROMPT | {"generation_config": "{"}, 400, "Expecting property name"),
        (TALK, CHAT | {"messages": []}, 400, "messages must be a list of messages"),
        (TALK, CHAT | {"messages": ["every"]}, 400, "a message is 'every'"),
        (TALK, CHAT | {"messages": [{"role": "user"}]}, 400, "the content of a message is None"),
        (TALK, CHAT | {"logit_bias": {"a": 1}}, 400, "invalid literal for int()"),
        (TALK, CHAT | {"chat_template_kwargs": {"messages": 1}}, 400, "multiple values"),
        (
            TALK,
            CHAT | {"chat_template_kwargs": {"chat_template": "", "max_length": 9}},
            400,
            "chat_template_kwargs has chat_template, max_length: give only variables",
        ),
        (TEXT, b"{bad", 400, "the request is not JSON"),
        (TEXT, b"[]", 400, "the request is not an object"),
        (
            "/load_model",
            {"model": "gpt2"},
            404,
            "there is no POST /load_model: this server has GET /v1/models",
        ),
    ],
    ids=lambda value: repr(value)[:50],
)
def test_a_bad_request_is_answered_by_a_sentence(server, path, body, status, said):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = server.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert said in answer.json()["error"]["message"]


def test_events_without_a_choice_pass_and_the_end_is_left_to_the_gate():
    usage = b'data: {"choices": [], "usage": {"total_tokens": 3}}\n\n'
    assert Stops(["word"]).cut_events(usage + b"data: [DONE]\n\n") == usage


def test_a_fault_of_the_server_is_json_too(server, monkeypatch):
    from transformers.cli.serving.completion import CompletionHandler

    def fail(*arguments, **named):
        raise RuntimeError("the disk is on fire")

    monkeypatch.setattr(CompletionHandler, "_build_generation_config", fail)
    answer = server.post(TEXT, json=PROMPT)
    assert answer.status_code == 500
    assert "RuntimeError: the disk is on fire" in answer.json()["error"]["message"]


@pytest.mark.parametrize("fault", [RuntimeError, ValueError])
def test_no_error_shows_a_path_of_the_machine(server, monkeypatch, fault):
    from transformers.cli.serving.completion import CompletionHandler

    def fail(*arguments, **named):
        raise fault('no such layer\n  File "/home/me/model.py", line 3')

    monkeypatch.setattr(CompletionHandler, "_build_generation_config", fail)
    said = server.post(TEXT, json=PROMPT).json()["error"]["message"]
    assert said.endswith("no such layer")
    monkeypatch.undo()
    monkeypatch.setattr("tide_lm.model.TideForCausalLM.generate", fail)
    (event,) = streamed(server, TEXT, PROMPT)
    assert event["error"]["message"] == "no such layer"


def test_a_fault_in_the_middle_of_a_stream_is_json_too(server, monkeypatch):
    def fail(*arguments, **named):
        raise RuntimeError('of a "quoted"\nword')

    monkeypatch.setattr("tide_lm.model.TideForCausalLM.generate", fail)
    (event,) = streamed(server, TEXT, PROMPT)
    assert event["error"]["message"] == 'of a "quoted"\nword'
