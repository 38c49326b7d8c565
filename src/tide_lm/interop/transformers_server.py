"""Run transformers' own OpenAI server with the classes of this package, so that no code of a folder runs.

The server looks classes up by name in transformers itself. The words are OPTIONS `serve FOLDER ...`, where
OPTIONS are those of `Options` in JSON, and the others those of `transformers serve`.
"""

import os
import signal

if __name__ == "__main__":  # Ctrl-C ends the many seconds of imports and loading at once
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))

import json
import sys
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from huggingface_hub.constants import HF_HUB_CACHE
from starlette.exceptions import HTTPException

from tide_lm.interop.gate import Gate, error_body
from tide_lm.model import TideForCausalLM

GRACE = 5.0  # seconds that requests have to finish after a signal


@dataclass(frozen=True)
class Options:
    """What transformers' server does not know: names of the model, how to open it, and what to print."""

    folder: str
    names: list[str]
    opened: dict[str, Any]
    ready: str


class Server(uvicorn.Server):
    """Puts a gate before the application, says when it is ready, and ends soon after a signal.

    Otherwise a signal would wait for a thread that generates.
    """

    stopped_by = 0
    options: Options

    def __init__(self, config: uvicorn.Config) -> None:
        _answer_errors_in_json(config.app)  # type: ignore[arg-type]
        config.app = Gate(config.app, self.options.folder, self.options.names)
        super().__init__(config)

    async def startup(self, *arguments: Any, **named: Any) -> None:
        await super().startup(*arguments, **named)
        if self.started:
            print(self.options.ready, file=sys.stderr, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not Server.stopped_by:
            Server.stopped_by = sig
            timer = threading.Timer(GRACE, os._exit, [128 + sig])
            timer.daemon = True
            timer.start()
        super().handle_exit(sig, frame)


def _answer_errors_in_json(app: FastAPI) -> None:
    """Have what the gate lets through, and transformers cannot do, answered by a sentence."""

    def answer(status: int, error: Any) -> JSONResponse:
        text = " ".join(str(error).split()) or type(error).__name__
        return JSONResponse(error_body(text[:1000], status), status)

    def refused(request: Request, error: Any) -> JSONResponse:
        return answer(error.status_code, error.detail)

    def wrong(request: Request, error: Any) -> JSONResponse:
        return answer(400, error)

    def failed(request: Request, error: Any) -> JSONResponse:
        return answer(500, f"the server failed, and its log says where: {type(error).__name__}: {error}")

    app.add_exception_handler(HTTPException, refused)
    for kind in (RequestValidationError, ValueError, TypeError, KeyError):
        app.add_exception_handler(kind, wrong)
    app.add_exception_handler(Exception, failed)


if __name__ == "__main__":
    Server.options = Options(**json.loads(sys.argv.pop(1)))
    opens = partial(TideForCausalLM.from_pretrained, **Server.options.opened)
    sys.modules["transformers"].TideForCausalLM = SimpleNamespace(from_pretrained=opens)  # type: ignore[attr-defined]
    uvicorn.Server = Server  # type: ignore[misc]
    Path(HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)  # which it may look into
    from transformers.cli.transformers import main  # which is to find the class there

    try:
        main()
    finally:
        if Server.stopped_by:
            os._exit(128 + Server.stopped_by)
