"""The command `tide-lm`. Commands import what is heavy when they run, so help answers at once."""

import importlib
import os
import sys
from collections.abc import Iterable

import typer

from tide_lm.cli.output import defer_to_first

COMMANDS = {  # with what their help begins with
    "presets": "List the paper's models and tiny ones: what the paper states of them, and what is assumed.",
    "estimate": "Estimate parameters, FLOPs, VRAM, SSD and optimiser bytes of a model.",
    "doctor": "Show what is installed, the GPU and the disk; exit status 1 if something required is missing.",
    "train": "Train a base or a TIDE model on prepared data, or continue a run.",
    "prepare": "Turn text into token shards to train on.",
    "evaluate": "Measure perplexity by token and word, and loss by frequency decile.",
    "analyze": "Look into models as the paper does.",
    "figure": "Draw a figure of the paper as NAME.svg and NAME.png.",
    "report": "Write a self-contained HTML page that compares runs, beside the paper.",
    "compress": "Measure smaller forms of a model's tables.",
    "pack": "Put a trained model's tables into a store, to be read from there row by row, or check one.",
    "upcycle": "Make a Llama a TIDE model that computes exactly the same and can be trained on, or go back.",
    "serve": "Serve a model with the OpenAI API: by vLLM where it is installed, else by transformers.",
    "generate": "Generate text.",
    "bench": "Time what this machine does, on made-up data.",
    "explore": "Look into a model in the browser: texts by token, the vocabulary, pairs, its results.",
    "demo": "Train a base and a TIDE model on the same real text and compare them.",
}


def commands(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """Return an app of these commands alone: importing a command and reading its options take time."""
    app = _app()
    for name in names:
        module = importlib.import_module(f"tide_lm.cli.{name}")
        if name == "bench":  # which has commands of its own
            app.add_typer(module.app, name=name)
        else:
            app.command(name)(module.command)
    return app


def listing() -> typer.Typer:
    """Return an app that lists all commands with their help, without importing them."""
    app = _app()
    for name, help in COMMANDS.items():
        app.command(name, help=help)(lambda: None)
    return app


def _app() -> typer.Typer:
    app = typer.Typer(
        name="tide-lm",
        help="TIDE language models: every layer knows the token beneath the context.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback(invoke_without_command=True)(_version)
    return app


def _version(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from tide_lm import __version__

        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """Exit status: 0 done, 1 the work failed, 2 the call is wrong."""
    if sys.platform == "win32":
        sys.exit("tide-lm runs on Linux and macOS; on Windows, use it in WSL")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # the bars of other libraries are for terminals
    try:
        named = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
        (commands([named]) if named in COMMANDS else listing())()
    except (ValueError, OSError) as error:
        defer_to_first()
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
