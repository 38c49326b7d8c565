"""Options that evaluation and analysis share: what to read, how, whose frequencies count, where rows are."""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tide_lm.spec.config import Residence

if TYPE_CHECKING:
    from tide_lm.evaluate.perplexity import Windows
    from tide_lm.model.opened import OpenedModel

Texts = Annotated[
    list[str] | None,
    typer.Option(
        "--text",
        show_default="the held-out part of the run's data",
        help="A file, folder or glob to read, prepared data, or NAME=FILE; repeatable.",
    ),
]
TextField = Annotated[str, typer.Option("--text-field", help="Where records hold their text.")]
Counts = Annotated[
    Path | None,
    typer.Option("--counts", help="Prepared data or a file of counts, instead of those of the run's data."),
]
Window = Annotated[
    int | None,
    typer.Option("--window", min=2, show_default="the training sequence", help="Tokens of a window."),
]
Stride = Annotated[
    int | None, typer.Option("--stride", min=1, show_default="half a window", help="Tokens between windows.")
]
Batch = Annotated[int, typer.Option("--batch", min=1, help="Sequences at once.")]
Run = Annotated[
    Path | None,
    typer.Option("--run", show_default="the model's run, or runs/NAME", help="Whose results/ to fill."),
]


def _residence(text: str) -> Residence:
    try:
        return Residence.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


Memory = Annotated[
    Residence | None,
    typer.Option(
        "--memory",
        metavar="device|cpu|store[:MIB]",
        parser=_residence,
        show_default="device",
        help="Where the rows of a packed model are, and MiB of a store's that stay in memory (64).",
    ),
]


def named_texts(texts: list[str] | None) -> dict[str, Path]:
    """Each text under its name: that given, or the file's."""
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
    return found


@dataclass(frozen=True)
class Reading:
    """Which texts are read, and how."""

    texts: dict[str, Path] = field(default_factory=dict)
    text_field: str = "text"
    window: int | None = None
    stride: int | None = None
    batch: int = 8

    def texts_of(self, opened: "OpenedModel") -> dict[str, Path]:
        """Return the given texts, which must be there, or what the model's run holds out."""
        from tide_lm.data import shards, sources

        for path in self.texts.values():
            if not (path / shards.MANIFEST).exists():
                sources.parts(str(path), self.text_field)
        if self.texts:
            return self.texts
        if opened.data is None or not opened.data.exists():
            where = f" at {opened.data.absolute()}" if opened.data else " known"
            raise typer.BadParameter(
                f"the data that {opened.name} was trained on are not{where}: give --text"
            )
        return {"held-out": opened.data}

    def windows_of(self, opened: "OpenedModel") -> "Windows":
        from tide_lm.evaluate.perplexity import Windows

        longest = getattr(opened.config.get_text_config(), "max_position_embeddings", None)
        size = self.window or opened.sequence or min(longest or 2048, 2048)
        if longest is not None and size > longest:
            raise typer.BadParameter(
                f"--window is {size:,}, and {opened.name} can take {longest:,} tokens: give at most that"
            )
        stride = self.stride or max(size // 2, 1)
        if stride > size:
            raise typer.BadParameter(
                f"--stride is {stride:,}, and the window {size:,}: a longer stride would skip tokens"
            )
        return Windows(size, stride, self.batch)


def tell_reads(opened: "OpenedModel") -> None:
    """What a store was asked for, if the model was opened and its rows are in one."""
    memory = getattr(opened.model.base_model, "memory", None) if "model" in vars(opened) else None
    reads = getattr(memory, "counters", None)
    if reads is not None and reads.hits + reads.misses:
        typer.echo(
            f"rows from the store: {reads.hits:,} were in memory and {reads.misses:,} were read, "
            f"{reads.bytes / 1e6:,.1f} MB; {reads.waits:,} waits, {reads.seconds:.2f} s",
            err=True,
        )


def refuse_others(context: typer.Context, used: Collection[str], what: str) -> None:
    """Names an option that was given and that `what` would not read."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE" and parameter.name not in used:
            raise typer.BadParameter(f"{parameter.opts[0]} is not of {what}: leave it out")
