"""The command `tide-lm`. Commands import what is heavy when they run, so help answers at once."""

import copy
import os
import sys

import typer

from tide_lm.cli import (
    analyze,
    bench,
    demo,
    doctor,
    estimate,
    evaluate,
    figure,
    prepare,
    presets,
    report,
    train,
)
from tide_lm.cli.output import let_first_speak

app = typer.Typer(
    name="tide-lm",
    help="TIDE language models: every layer knows the token beneath the context.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("presets")(presets.command)
app.command("estimate")(estimate.command)
app.command("doctor")(doctor.command)
app.command("train")(train.command)
app.command("prepare")(prepare.command)
app.command("evaluate")(evaluate.command)
app.command("analyze")(analyze.command)
app.command("figure")(figure.command)
app.command("report")(report.command)
app.add_typer(bench.app, name="bench")
app.command("demo")(demo.command)


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from tide_lm import __version__

        typer.echo(__version__)
        raise typer.Exit


def _asked_for() -> typer.Typer:
    """The commands, or the one that is called: typer works at the options of all it has, at every start."""
    asked = [command for command in app.registered_commands if command.name in sys.argv[1:2]]
    if not asked:
        return app
    alone = copy.copy(app)
    alone.registered_commands, alone.registered_groups = asked, []
    return alone


def main() -> None:
    """Exit status: 0 done, 1 the work failed, 2 the call is wrong."""
    if sys.platform == "win32":
        sys.exit("tide-lm runs on Linux and macOS; on Windows, use it in WSL")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # the bars of other libraries are for terminals
    try:
        _asked_for()()
    except (ValueError, OSError) as error:
        let_first_speak()
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
