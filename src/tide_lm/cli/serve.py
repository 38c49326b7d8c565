"""`tide-lm serve`: a model behind an OpenAI-compatible server, that of vLLM or of transformers."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tide_lm.cli.options import check_address
from tide_lm.run.directory import check_exists, exported
from tide_lm.spec.config import ModelConfig


def command(
    model: Annotated[str, typer.Argument(help="A run, a folder or a name on the Hub.")],
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port.")] = 8000,
    more: Annotated[
        list[str] | None, typer.Argument(help="Options of the server itself, after --.", metavar="-- OPTIONS")
    ] = None,
) -> None:
    """Serve a model with the OpenAI API: by vLLM where it is installed, else by transformers.

    Example: tide-lm serve runs/mine --port 8000
    """
    where = ["--host", host, "--port", str(port), *(more or ())]
    folder = exported(model)
    if importlib.util.find_spec("vllm"):
        server, call = "vLLM", ["-m", "vllm.entrypoints.openai.api_server", "--model", folder, *where]
    elif all(importlib.util.find_spec(name) for name in ("fastapi", "uvicorn")):
        call = ["-m", "tide_lm.interop.transformers_server", "serve", folder, *where]
        server = "transformers"
    else:
        raise ValueError(
            "no server is installed: pip install -e '.[serve]' for that of transformers, or vllm"
        )
    check_exists(model)
    if Path(folder).exists():
        ModelConfig.from_folder(Path(folder))
    check_address(host, port)
    typer.echo(f"{server} serves the model {folder!r} at http://{host}:{port}/v1", err=True)
    # The server has this process's signals, and imports nothing from the folder in which it was called.
    os.execve(sys.executable, [sys.executable, *call], {**os.environ, "PYTHONSAFEPATH": "1"})
