"""Options that several commands share, and checks of what is given to a command."""

import socket
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tide_lm.run.devices import check_device
from tide_lm.spec.config import Residence
from tide_lm.spec.names import suggestion

if TYPE_CHECKING:
    from tide_lm.model.opened import OpenedModel

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@contextmanager
def usage_errors(kind: type[ValueError] = ValueError) -> Iterator[None]:
    """Make an error of this kind one of the call: exit status 2 instead of 1, with the command's usage."""
    try:
        yield
    except kind as error:
        raise typer.BadParameter(str(error)) from error


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    """Return a parser of a word that must be one of these names."""

    known = [str(name) for name in names]

    def parse(word: str) -> str:
        if word not in known:
            raise typer.BadParameter(f"{word!r} is unknown: {suggestion(word, known)}")
        return word

    return parse


def _residence(text: str) -> Residence:
    with usage_errors():
        return Residence.parse(text)


def _device(text: str) -> str:
    with usage_errors():
        return check_device(text)


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Model = Annotated[str, typer.Argument(help="A run, a checkpoint, a folder or a name on the Hub.")]
Texts = Annotated[
    list[str] | None,
    typer.Option(
        "--text",
        metavar="FILE",
        show_default="the held-out part of the run's data",
        help="A file, folder or glob to read, prepared data, or NAME=FILE; repeatable.",
    ),
]
TextField = Annotated[str, typer.Option(metavar="NAME", help="The field of a record that holds its text.")]
Counts = Annotated[
    Path | None,
    typer.Option(help="Prepared data or a file of token counts, instead of the run's data."),
]
Window = Annotated[
    int | None, typer.Option(min=2, show_default="the training sequence", help="Tokens per window.")
]
Stride = Annotated[
    int | None, typer.Option(min=1, show_default="half a window", help="Tokens from one window to the next.")
]
Batch = Annotated[int, typer.Option(min=1, help="Sequences per batch.")]
Run = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN", show_default="the model's run, or runs/NAME", help="The run whose results/ to fill."
    ),
]
Memory = Annotated[
    Residence | None,
    typer.Option(
        metavar="device|cpu|store[:MIB]",
        parser=_residence,
        show_default="device",
        help="Where a packed model keeps its rows; MIB is the cache of a store, 64 by default.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="cpu|cuda[:N]|mps",
        parser=_device,
        show_default="cuda if there is one, else cpu",
        help="Where the model runs.",
    ),
]


def named_texts(texts: list[str] | None, field: str = "text") -> dict[str, Path]:
    """Return each text, which must be there, by its name: the one given, or the file's."""
    found: dict[str, Path] = {}
    for text in texts or ():
        name, equals, path = text.partition("=")
        if equals and not (name and path):
            raise typer.BadParameter(f"--text {text!r} is not NAME=FILE: write both")
        if not equals or Path(text).exists():
            name, path = Path(text).name.split(".")[0], text
        if name in found:
            raise typer.BadParameter(f"two texts are called {name!r}: name them, as in --text {name}2={path}")
        found[name] = Path(path)
    for place in map(str, found.values()):
        if not Path(place, "manifest.json").exists() and not place.startswith("hf:"):
            from tide_lm.data import sources

            with usage_errors():
                sources.parts(place, field)
    return found


def check_windows(window: int | None, stride: int | None) -> None:
    if window and stride and stride > window:
        raise typer.BadParameter(f"--stride is {stride} and --window {window}: lower the stride")


def refuse_others(context: typer.Context, used: Collection[str], what: str) -> None:
    """Name an option that was given although `what` does not read it."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE" and parameter.name not in used:
            raise typer.BadParameter(f"{parameter.opts[0]} does nothing with {what}: leave it out")


def print_reads(opened: "OpenedModel") -> None:
    """Print what was read from a store, if the model's rows are in one."""
    memory = getattr(opened.model.base_model, "memory", None) if "model" in vars(opened) else None
    reads = getattr(memory, "counters", None)
    if reads is not None and reads.hits + reads.misses:
        typer.echo(
            f"rows from the store: {reads.hits:,} were in memory and {reads.misses:,} were read, "
            f"{reads.bytes / 1e6:,.1f} MB in {reads.seconds:.2f} s",
            err=True,
        )


def check_address(host: str, port: int) -> None:
    """Check that the port is free, before a model is loaded for nothing."""
    if not host:
        raise ValueError("--host is empty: give an address, such as 127.0.0.1")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[0]
        cause = f"cannot listen at {host}:{port} ({reason})"
        raise ValueError(f"{cause}: choose another --port or --host") from error
