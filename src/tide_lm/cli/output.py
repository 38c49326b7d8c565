"""Results go to stdout, as a table or as JSON; everything else goes to stderr."""

import json
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import typer

from tide_lm.run.torchrun import started_by_torchrun


def print_json(result: Any) -> None:
    typer.echo(json.dumps(result, indent=2, ensure_ascii=False))


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    numbers: bool = True,
    width: int | None = None,
) -> None:
    """Print a title and a table; with `numbers`, the columns after the first are aligned right.

    Without a `width` it is as wide as the terminal, which folds the title itself.
    """
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for position, column in enumerate(columns):
        table.add_column(escape(column), justify="right" if position and numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    console = Console()
    # In a narrow one, numbers would be cut; and a file has no width.
    console.width = width or (max(console.width, 80) if console.is_terminal else 120)
    folded = textwrap.fill(title, width, break_long_words=False, break_on_hyphens=False) if width else title
    console.print(escape(folded), style="bold", highlight=False, emoji=False, soft_wrap=True)
    console.print(table)


def number(value: float | None, form: str = ",.3f") -> str:
    """Format a number; one that is not known is a dash, and one beyond a million has a power of ten."""
    return "-" if value is None else f"{value:{form}}" if abs(value) < 1e6 else f"{value:.2e}"


def pairs(result: dict[str, Any], *left_out: str) -> list[tuple[str, str]]:
    """Return the rows of a table of names and values."""
    return [(name.replace("_", " "), _cell(value)) for name, value in result.items() if name not in left_out]


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count:,} {name}" for name, count in value.items())
    if isinstance(value, float):
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def print_next(command: str) -> None:
    """Name the command that a user would type next."""
    typer.echo(f"Next: {command}", err=True)


def defer_to_first() -> None:
    """Wait before an error that all processes of torchrun may have met."""
    if started_by_torchrun():
        from tide_lm.run import process_group

        process_group.defer_to_first()
