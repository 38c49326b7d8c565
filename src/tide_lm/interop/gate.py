"""Stand between clients of the OpenAI API and transformers' server, which trusts what it is sent.

The gate names the model, checks each request, has temperatures draw, cuts answers before a stop word, and
makes every error JSON with a sentence.
"""

import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from inspect import signature
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from tide_lm.spec.names import suggestion

CHAT = Path(__file__).with_name("chat.jinja")  # for tokenizers without a template
_CHAT_STOP = ["\nUser:"]
_LARGEST = 32 << 20  # bytes of a request
_POSTED = ("/v1/completions", "/v1/chat/completions")
_ONLY = {"n": 1, "best_of": 1, "logprobs": False, "top_logprobs": 0, "echo": False}
_RANGES = {
    "max_tokens": (1, 2**31 - 1),
    "temperature": (0, 2),
    "top_p": (0, 1),
    "seed": (0, 2**63 - 1),
    "frequency_penalty": (-0.99, 2),
}
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class RequestError(ValueError):
    """An error that a client is told of, with its status."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


def error_body(text: str, status: int) -> dict[str, Any]:
    """Return an error in the form of the OpenAI API, without the places in files that the text ends in."""
    text = text.partition('File "')[0].rstrip() or "the server failed, and its log says where"
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": text, "type": kind, "code": status, "param": None}}


class Gate:
    """An ASGI application around that of transformers, which serves the model of one folder."""

    def __init__(self, app: Any, folder: str, names: list[str]) -> None:
        from transformers.cli.serving.chat_completion import TransformersCompletionCreateParamsStreaming
        from transformers.cli.serving.completion import TransformersTextCompletionCreateParams

        self.app, self.folder, self.names = app, folder, names
        posted = (TransformersTextCompletionCreateParams, TransformersCompletionCreateParamsStreaming)
        self.fields = {path: [*kind.__annotations__] for path, kind in zip(_POSTED, posted, strict=True)}
        self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        self.positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 1 << 20
        try:
            usual = GenerationConfig.from_pretrained(folder)
        except OSError:
            usual = GenerationConfig.from_model_config(config)
        self.generation = usual.to_diff_dict()
        self.longest = max(map(len, self.tokenizer.get_vocab()))

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health":
            await self.app(scope, receive, send)
            return
        try:
            call = f"{scope['method']} {scope['path']}"
            if call.startswith("GET /v1/models"):
                await _answer(send, 200, self._models(scope["path"]))
            elif call.removeprefix("POST ") in _POSTED:
                body = await _read(receive)
                stops = self._check(scope["path"], body)
                again = _replay(json.dumps(body).encode(), receive)
                about_body = (b"content-length", b"content-type")  # which plain curl calls a form
                headers = [pair for pair in scope["headers"] if pair[0] not in about_body]
                headers.append((b"content-type", b"application/json"))
                await self.app({**scope, "headers": headers}, again, self._named(send, Stops(stops)))
            else:
                there = ", ".join(("GET /v1/models", "GET /health", *(f"POST {path}" for path in _POSTED)))
                raise RequestError(f"there is no {call}: this server has {there}", 404)
        except RequestError as error:
            await _answer(send, error.status, error_body(str(error), error.status))

    def _models(self, path: str) -> dict[str, Any]:
        model = {"id": self.names[0], "object": "model", "created": 0, "owned_by": "tide-lm"}
        model |= {"root": self.folder, "max_model_len": self.positions}
        wanted = path.removeprefix("/v1/models").strip("/")
        if not wanted:
            return {"object": "list", "data": [model]}
        self._check_name(wanted)
        return model

    def _check_name(self, model: Any) -> None:
        if model not in (None, *self.names):
            raise RequestError(f"there is no model {model!r:.200} here: ask for {self.names[0]!r}", 404)

    def _check(self, path: str, body: dict[str, Any]) -> list[str]:
        """Check a request and complete it for transformers; return the stop words of its answer."""
        self._check_name(body.get("model"))
        body["model"] = self.folder
        if (most := body.pop("max_completion_tokens", None)) is not None:
            body["max_tokens"] = most
        for name, (least, largest) in _RANGES.items():
            value = body.get(name)
            if value is not None and (type(value) not in (int, float) or not least <= value <= largest):
                raise RequestError(f"{name} is {value!r:.40}: it must be a number from {least} to {largest}")
        if any(type(body.get(name, 1)) is float for name in ("max_tokens", "seed")):
            raise RequestError("max_tokens and seed must be whole numbers")
        for name, only in _ONLY.items():
            if body.pop(name, None) not in (None, only):
                why = ", which gives one answer" if name in ("n", "best_of") else ""
                raise RequestError(f"{name} does nothing on this server{why}: leave it out")
        for name in sorted(body.keys() - self.fields[path]):
            near = suggestion(name[:40], self.fields[path], "leave it out")
            raise RequestError(f"{name!r:.40} is no field of {path}: {near}")
        count = self._count_chat(body) if path == "/v1/chat/completions" else self._count_prompt(body)
        room = self.positions - count
        if not count:
            raise RequestError("the prompt has no tokens: give a text to go on from")
        if room < (new := body.get("max_tokens") or 1):
            raise RequestError(
                f"the prompt has {count:,} tokens, which with {new:,} new are more than the "
                f"{self.positions:,} that this model knows: ask for fewer, or give a shorter prompt"
            )
        if body.get("generation_config") is None:
            drawn: dict[str, Any] = {"do_sample": True, "top_k": 0} if body.get("temperature") else {}
            if body.get("temperature") == 0:
                drawn = {"do_sample": False}
                for name in ("temperature", "top_p"):  # which would do nothing
                    body.pop(name, None)
            most = body.get("max_tokens") or min(room, 1024)
            body["generation_config"] = json.dumps({**self.generation, **drawn, "max_new_tokens": most})
        return self._stops(body)

    def _stops(self, body: dict[str, Any]) -> list[str]:
        stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop") or []
        if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
            raise RequestError(f"stop is {stops!r:.200}: give a text, or a list of texts, none of them empty")
        body["stop"] = stops or None
        return stops

    def _count_prompt(self, body: dict[str, Any]) -> int:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = body["prompt"] = prompt[0]
        if not isinstance(prompt, str):
            raise RequestError(
                "prompt must be a text: this server takes one text, not several and not token ids"
            )
        self._check_size(prompt)
        return len(self.tokenizer(prompt).input_ids)

    def _count_chat(self, body: dict[str, Any]) -> int:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise RequestError(
                'messages must be a list of messages, as in [{"role": "user", "content": "Hello"}]'
            )
        plain = [{**message, "content": _text_of(message)} for message in map(_message, messages)]
        self._check_size("".join(message["content"] for message in plain))
        options = body.get("chat_template_kwargs") or {}
        if not isinstance(options, dict):
            raise RequestError(f"chat_template_kwargs is {options!r:.40}: it must be an object")
        if own := options.keys() & signature(self.tokenizer.apply_chat_template).parameters.keys():
            raise RequestError(
                f"chat_template_kwargs has {', '.join(sorted(own))}: give only variables of the chat template"
            )
        if not self.tokenizer.chat_template:
            options = {"chat_template": CHAT.read_text(encoding="utf-8"), **options}
            body["stop"] = body.get("stop") or _CHAT_STOP
        body["chat_template_kwargs"] = options
        try:
            text = self.tokenizer.apply_chat_template(
                plain, tools=body.get("tools"), tokenize=False, add_generation_prompt=True, **options
            )
        except Exception as error:  # a template raises what it likes
            raise RequestError(f"the chat template does not take these messages: {error}") from error
        return len(self.tokenizer(text, add_special_tokens=False).input_ids)

    def _check_size(self, text: str) -> None:
        """Refuse what is too long for the model however it is cut, since cutting it takes seconds."""
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt is not text in Unicode ({error}): leave such characters out"
            ) from error
        if size > self.positions * self.longest:
            raise RequestError(
                f"the prompt has {len(text):,} characters, and this model knows {self.positions:,} tokens: "
                "give a shorter one"
            )

    def _named(self, send: Send, stops: "Stops") -> Send:
        """Return a `send` that writes the model's name for its path, and cuts at stop words."""
        start: Message = {}
        path, name = (json.dumps(one).encode() for one in (f"{self.folder}@main", self.names[0]))

        async def renamed(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.update(message, headers=dict(message["headers"]))  # which say how long the body is
                return
            body = message.get("body", b"").replace(path, name)
            is_stream = start["headers"][b"content-type"].startswith(b"text/event-stream")
            if is_stream:
                body = stops.cut_events(body)
            elif stops.words and body:
                body = stops.cut_answer(body)
            if is_stream and not message.get("more_body"):
                body += b"data: [DONE]\n\n"
            if "type" in start:
                if b"content-length" in start["headers"]:
                    start["headers"][b"content-length"] = str(len(body)).encode()
                await send({**start, "headers": [*start["headers"].items()]})
                del start["type"]
            await send({**message, "body": body})

        return renamed


class Stops:
    """Cuts an answer before the first of some words, although it comes in pieces."""

    def __init__(self, words: list[str]) -> None:
        self.words, self.held, self.ended = words, "", False

    def cut(self, text: str, last: bool) -> str:
        """Return what can be sent now: a text that may become a stop word is held."""
        text = "" if self.ended else self.held + text
        places = [place for word in self.words if (place := text.find(word)) >= 0]
        self.ended = self.ended or bool(places)
        text = text[: min(places)] if places else text
        held = 0
        if not (self.ended or last):
            starts = (word[:size] for word in self.words for size in range(1, len(word)))
            held = max((len(start) for start in starts if text.endswith(start)), default=0)
        self.held = text[len(text) - held :]
        return text[: len(text) - held]

    def cut_answer(self, body: bytes) -> bytes:
        answer = json.loads(body)
        for choice in answer.get("choices", ()):
            self._cut_choice(choice, last=True)
        return json.dumps(answer).encode()

    def cut_events(self, body: bytes) -> bytes:
        """Cut the events of a stream, which are whole; its end is for the gate to send."""
        events = body.split(b"\n\n")
        return b"".join(self._cut_event(event) for event in events if event not in (b"", b"data: [DONE]"))

    def _cut_event(self, event: bytes) -> bytes:
        error = re.fullmatch(rb'data: {"error": "(.*)"}', event, re.DOTALL)  # which need not be JSON
        if error is not None:
            answer = error_body(error[1].decode(errors="replace"), 500)
        else:
            answer = json.loads(event.removeprefix(b"data: "))
            for choice in answer["choices"]:
                self._cut_choice(choice, last=choice.get("finish_reason") is not None)
        return b"data: " + json.dumps(answer).encode() + b"\n\n"

    def _cut_choice(self, choice: dict[str, Any], last: bool) -> None:
        if "text" in choice:
            choice["text"] = self.cut(choice["text"], last)
        else:
            part = choice.get("message") or choice.setdefault("delta", {})
            if part.get("content") is not None or (last and self.held):
                part["content"] = self.cut(part.get("content") or "", last)
        if self.ended and last:
            choice["finish_reason"] = "stop"


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f"a message is {message!r:.100}: it must have a role and a content, both text")
    return message


def _text_of(message: dict[str, Any]) -> str:
    """Return the text of a message, which may be in parts; one that calls tools may have none."""
    content = message.get("content")
    if content is None and "tool_calls" in message:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        return " ".join(part["text"] for part in content)
    raise RequestError(f"the content of a message is {content!r:.100}: this model reads only text")


async def _read(receive: Receive) -> dict[str, Any]:
    """Read a request's body, an object in JSON."""
    found, more = bytearray(), True
    while more:
        message = await receive()
        found += message.get("body", b"")
        more = message.get("more_body", False)
        if len(found) > _LARGEST:
            raise RequestError(f"the request is larger than {_LARGEST >> 20} MiB: give a shorter prompt", 413)
    try:
        body = json.loads(found)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request is not JSON ({error}): send an object in JSON") from error
    if not isinstance(body, dict):
        raise RequestError("the request is not an object in JSON: send one with a prompt or messages")
    return body


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body, and then waits as before for the client to go away."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return waiting.pop() if waiting else await receive()

    return again


async def _answer(send: Send, status: int, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": HTTPStatus(status).value, "headers": headers})
    await send({"type": "http.response.body", "body": content})
