"""The command `tide-lm`. Commands import what is heavy when they run, so help answers at once."""

import importlib
import os
import sys
from collections.abc import Iterable

import typer

from tide_lm.cli.output import let_first_speak

COMMANDS = (
    "presets",
    "estimate",
    "doctor",
    "train",
    "prepare",
    "evaluate",
    "analyze",
    "figure",
    "report",
    "compress",
    "pack",
    "bench",
    "demo",
)


def commands(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """These commands, and no others: each takes time to import, and typer works at the options of all."""
    app = typer.Typer(
        name="tide-lm",
        help="TIDE language models: every layer knows the token beneath the context.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback(invoke_without_command=True)(_version)
    for name in names:
        module = importlib.import_module(f"tide_lm.cli.{name}")
        if name == "bench":  # which has commands of its own
            app.add_typer(module.app, name=name)
        else:
            app.command(name)(module.command)
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
        commands([name for name in COMMANDS if name in sys.argv[1:2]] or COMMANDS)()
    except (ValueError, OSError) as error:
        let_first_speak()
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
