"""`tide-lm serve`: a model behind an OpenAI-compatible server, that of vLLM or of transformers."""

import importlib.util
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from tide_lm.cli.opening import check_residence, tide_run
from tide_lm.cli.options import Device, Memory, check_address
from tide_lm.run.directory import check_exists, exported, name_of
from tide_lm.run.optional import install
from tide_lm.spec.config import ModelConfig, Residence

_CHAT = Path(__file__).parents[1] / "interop" / "chat.jinja"


def command(
    model: Annotated[str, typer.Argument(help="A run, a folder or a name on the Hub, or a demo.")],
    name: Annotated[
        str | None,
        typer.Option(show_default="the folder's or run's", help="The name that requests give the model."),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port.")] = 8000,
    memory: Memory = None,
    device: Device = None,
    more: Annotated[
        list[str] | None, typer.Argument(help="Options of the server itself, after --.", metavar="-- OPTIONS")
    ] = None,
) -> None:
    """Serve a model with the OpenAI API: by vLLM where it is installed, else by transformers.

    Example: tide-lm serve runs/mine --port 8000
    """
    model = tide_run(model)
    check_exists(model)
    folder, residence = exported(model), memory or Residence()
    name = name or (name_of(model) if Path(model).exists() else model)
    if Path(folder).exists():
        ModelConfig.from_folder(Path(folder))
        check_residence(model, residence)
    names = [name, *dict.fromkeys(other for other in (folder, model) if other != name)]
    where = ["--host", host, "--port", str(port), *(more or ())]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}  # so nothing is imported from where it was called
    ready = f"Ready. Try: {_request(name, host, port)}"
    if importlib.util.find_spec("vllm"):
        rows = {"tide_memory": residence.place, "tide_memory_cache_bytes": residence.cache_bytes}
        options = ["--model", folder, "--served-model-name", *names]
        options += ["--additional-config", json.dumps(rows)] if memory else []
        options += ["--chat-template", str(_CHAT)] if Path(folder).exists() and not _has_chat(folder) else []
        kind, _, number = (device or "cuda").partition(":")
        if kind != "cuda":
            raise typer.BadParameter(f"vLLM runs on what it was built for, so leave --device {device} out")
        environment |= {"CUDA_VISIBLE_DEVICES": number} if number else {}
        call, server = ["-m", "vllm.entrypoints.openai.api_server", *options, *where], "vLLM"
        ready = f"Once it is ready, try: {_request(name, host, port)}"
    elif all(importlib.util.find_spec(package) for package in ("fastapi", "uvicorn")):
        opened = {"memory": residence.place, "memory_cache_bytes": residence.cache_bytes} if memory else {}
        told = {"folder": folder, "names": names, "opened": opened, "ready": ready}
        chosen = ["--device", device] if device else []
        call = ["-m", "tide_lm.interop.transformers_server", json.dumps(told), "serve", folder]
        call, server = [*call, *chosen, *where], "transformers"
        # The check would advise versions that are not tested.
        environment.setdefault("HF_HUB_DISABLE_UPDATE_CHECK", "1")
    else:
        raise ValueError(f"no server is installed: {install('serve')} for that of transformers, or vllm")
    check_address(host, port)
    typer.echo(f"{server} serves {folder!r} as {name!r} at {_address(host, port)}/v1", err=True)
    if server == "vLLM":
        typer.echo(ready, err=True)
    # The server has this process's signals.
    os.execve(sys.executable, [sys.executable, *call], environment)


def _has_chat(folder: str) -> bool:
    """Look for the template of chats that a tokenizer may have."""
    try:
        kept = json.loads((Path(folder) / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        kept = {}
    return (Path(folder) / "chat_template.jinja").exists() or bool(kept.get("chat_template"))


def _address(host: str, port: int) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _request(name: str, host: str, port: int) -> str:
    """Return a command that asks the server for a text."""
    body = json.dumps({"model": name, "prompt": "The tide comes in", "max_tokens": 32}, ensure_ascii=False)
    header = "'Content-Type: application/json'"
    return f"curl {_address(host, port)}/v1/completions -H {header} -d {shlex.quote(body)}"
