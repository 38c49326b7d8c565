"""`tide-lm serve`: a model behind an OpenAI-compatible server, that of vLLM or of transformers."""

import importlib.util
import os
import sys
from typing import Annotated

import typer

from tide_lm import runs

# Its server takes a class by name from transformers itself. With this one it needs no code of the folder's.
_TRANSFORMERS = """
import sys
from tide_lm.model import TideForCausalLM
from transformers.cli.transformers import main
sys.modules["transformers"].TideForCausalLM = TideForCausalLM
main()
"""


def command(
    model: Annotated[str, typer.Argument(help="A run, a folder or a name on the Hub.")],
    host: Annotated[str, typer.Option("--host", help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="The port.")] = 8000,
    more: Annotated[
        list[str] | None, typer.Argument(help="After --, options of the server itself.", metavar="-- OPTIONS")
    ] = None,
) -> None:
    """Serve a model with the OpenAI API: by vLLM where it is installed, else by transformers."""
    folder = runs.exported(model)
    where = ["--host", host, "--port", str(port), *(more or ())]
    if importlib.util.find_spec("vllm"):
        call = ["-m", "vllm.entrypoints.openai.api_server", "--model", folder, *where]
    elif all(importlib.util.find_spec(name) for name in ("fastapi", "uvicorn")):
        call = ["-c", _TRANSFORMERS, "serve", folder, *where]
    else:
        raise ValueError(
            "there is no server here: pip install 'tide-lm[serve]', for transformers' own, or vllm"
        )
    # The server has this process's signals, and imports nothing from the folder in which it was called.
    os.execve(sys.executable, [sys.executable, *call], {**os.environ, "PYTHONSAFEPATH": "1"})
