"""The command `tide-lm`. Commands import what is heavy when they run, so help answers at once."""

import importlib
import os
import sys
from itertools import chain

import typer

from tide_lm.cli.help import Command, Group
from tide_lm.cli.output import defer_to_first
from tide_lm.run.files import sentence

COMMANDS = {  # each a file of this folder, under a heading of the help
    "Plan": ("presets", "estimate", "doctor"),
    "Train": ("prepare", "train", "upcycle", "demo"),
    "Measure": ("evaluate", "analyze", "compress", "bench"),
    "Show": ("figure", "report", "explore"),
    "Use": ("pack", "generate", "serve"),
}


def commands(only: str | None = None) -> typer.Typer:
    """Return an app of all commands, or of one, which spares the imports of the others."""
    app = typer.Typer(
        name="tide-lm",
        cls=Group,
        help="TIDE language models: every layer knows the token beneath the context.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback(invoke_without_command=True)(_version)
    for heading, names in COMMANDS.items():
        for name in names:
            if only not in (None, name):
                continue
            module = importlib.import_module(f"tide_lm.cli.{name}")
            if name == "bench":  # which has commands of its own
                app.add_typer(module.app, name=name, cls=Group, rich_help_panel=heading)
            else:
                app.command(name, cls=Command, rich_help_panel=heading)(module.command)
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
        called = "".join(sys.argv[1:2])
        commands(called if called in chain(*COMMANDS.values()) else None)()
    except (ValueError, OSError) as error:
        defer_to_first()
        line = sentence(error) if isinstance(error, OSError) and not isinstance(error, ValueError) else error
        typer.echo(f"error: {line}", err=True)
        sys.exit(1)
