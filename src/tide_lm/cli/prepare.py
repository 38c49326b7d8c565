"""`tide-lm prepare`: text to token shards."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tide_lm.cli.output import AsJson, print_json, print_table

if TYPE_CHECKING:
    from tide_lm.data.shards import Manifest

MOST_PROCESSES = 32  # more would wait for the one that reads and writes


def command(
    out: Annotated[Path, typer.Option("--out", help="The folder to make.")],
    source: Annotated[
        str,
        typer.Argument(
            help="builtin; hf:DATASET or hf:DATASET:CONFIG; or a file, a folder or a glob of .txt, .jsonl "
            "(also .gz, .xz, .zst) or .parquet."
        ),
    ] = "builtin",
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="A name on the Hugging Face Hub, a folder, or llama3.")
    ] = None,
    train_tokenizer: Annotated[
        int | None,
        typer.Option(
            "--train-tokenizer", min=258, show_default="4096", help="Or train a byte-level BPE of N tokens."
        ),
    ] = None,
    validation: Annotated[
        float, typer.Option("--validation", min=0, max=0.5, help="The part of the documents to hold out.")
    ] = 0.005,
    text_field: Annotated[
        str, typer.Option("--text-field", help="Where records of JSONL, Parquet or the Hub hold their text.")
    ] = "text",
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            min=1,
            show_default=f"one a core, at most {MOST_PROCESSES}",
            help="Processes that encode; the result is the same.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Turn text into token shards to train on, with a validation split, a manifest and token counts."""
    if tokenizer and train_tokenizer:
        raise typer.BadParameter("give either --tokenizer or --train-tokenizer")
    from tide_lm.data.prepare import prepare

    with _progress(f"Preparing {source}") as progress:
        manifest = prepare(
            source,
            out,
            tokenizer=tokenizer,
            train_tokenizer=train_tokenizer or 4096,
            validation=validation,
            text_field=text_field,
            processes=processes or min(os.cpu_count() or 1, MOST_PROCESSES),
            progress=progress,
        )
    result = _result(manifest, out)
    if as_json:
        print_json(result)
    else:
        rows = [(name, _cell(value)) for name, value in result.items() if name != "sha256"]
        print_table(f"Prepared {source}", ["what", "value"], rows, numbers=False)
        typer.echo(f"sha256 of the text: {result['sha256']}")


@contextmanager
def _progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """A line on stderr that counts on a terminal, and is written once elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status(f"{title} ...") as status:
        if not console.is_terminal:
            typer.echo(f"{title} ...", err=True)
        yield lambda documents, tokens: status.update(f"{title}: {documents:,} documents, {tokens:,} tokens")


def _result(manifest: "Manifest", out: Path) -> dict[str, Any]:
    source = manifest.source
    return {
        "documents": source["documents"],
        "tokens": {split: manifest.tokens(split) for split in manifest.splits},
        "bytes": source["bytes"],
        "sha256": source["sha256"],
        "vocabulary": manifest.vocab_size,
        "folder": str(out),
    }


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count:,} {split}" for split, count in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)
