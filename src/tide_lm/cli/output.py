"""Results go to stdout, as a table or as JSON; everything else goes to stderr."""

import json
import os
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def print_json(result: Any) -> None:
    typer.echo(json.dumps(result, indent=2, ensure_ascii=False))


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], numbers: bool = True
) -> None:
    """A table; if its columns after the first hold numbers, they are aligned right."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        title=escape(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1)
    )
    for position, column in enumerate(columns):
        table.add_column(escape(column), justify="right" if position and numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    console = Console()
    # In a narrow one, numbers would be cut; and a file has no width.
    console.width = max(console.width, 80) if console.is_terminal else 120
    console.print(table)


def defer_to_first() -> None:
    """Wait before an error that all processes of torchrun may have met."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from tide_lm.run import process_group

        process_group.defer_to_first()
