"""`tide-lm prepare`: text to token shards."""

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tide_lm.cli.options import AsJson, usage_errors
from tide_lm.cli.output import pairs, print_json, print_table
from tide_lm.cli.progress import working

if TYPE_CHECKING:
    from tide_lm.data.prepare import Settings
    from tide_lm.data.shards import Manifest


class Executor(StrEnum):
    local = "local"
    ray = "ray"
    slurm = "slurm"


def command(
    out: Annotated[Path, typer.Option(help="The folder to make.")],
    source: Annotated[
        str,
        typer.Argument(
            help="builtin; hf:DATASET or hf:DATASET:CONFIG; or a file, a folder or a glob of .txt, .jsonl "
            "(also .gz, .xz, .zst) or .parquet."
        ),
    ] = "builtin",
    tokenizer: Annotated[
        str | None, typer.Option(help="A name on the Hugging Face Hub, a folder, or llama3.")
    ] = None,
    train_tokenizer: Annotated[
        int | None,
        typer.Option(min=258, show_default="4096", help="Or train a byte-level BPE of N tokens."),
    ] = None,
    validation: Annotated[
        float, typer.Option(min=0, max=0.5, help="The share of documents to hold out.")
    ] = 0.005,
    text_field: Annotated[str, typer.Option(help="The field of a record that holds its text.")] = "text",
    executor: Annotated[
        Executor | None,
        typer.Option(help="Run as tasks of datatrove, here or on many machines; the result is the same."),
    ] = None,
    tasks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tasks for the executor; those beyond the number of files or dataset shards are idle.",
        ),
    ] = None,
    executor_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="For datatrove's executor: partition, time, cpus_per_task, workers ...; may be repeated.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Turn text into token shards to train on, with a validation split, a manifest and token counts.

    Example: tide-lm prepare 'texts/*.txt' --tokenizer llama3 --out data/mine
    """
    with usage_errors():
        if tokenizer and train_tokenizer:
            raise ValueError("--tokenizer and --train-tokenizer are both given: give one")
        if executor is None and (tasks or executor_option):
            raise ValueError("--tasks and --executor-option are for --executor: add it, or leave them out")
        if executor and not tasks:
            raise ValueError(f"--executor {executor} needs the number of tasks: add --tasks N")
        options = _options(executor_option or [])
    from tide_lm.data.prepare import Settings, prepare

    settings = Settings(source, tokenizer, train_tokenizer or 4096, validation, text_field)
    if executor and tasks:
        _prepare_in_tasks(settings, out, executor, tasks, options, as_json)
        return
    with working(f"Preparing {source}") as log:

        def progress(documents: int, tokens: int) -> None:
            log(f"{documents:,} documents, {tokens:,} tokens")

        manifest = prepare(settings, out, progress)
    _print(manifest, out, as_json)


def _options(pairs: Sequence[str]) -> dict[str, Any]:
    """Read values as JSON or text: `cpus_per_task=4`, `time=2:00:00`, `sbatch_args={"account": "me"}`."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise ValueError(f"--executor-option {pair!r} is not KEY=VALUE: write it as time=2:00:00")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return options


def _prepare_in_tasks(
    settings: "Settings", out: Path, executor: Executor, tasks: int, options: dict[str, Any], as_json: bool
) -> None:
    from tide_lm.data.distributed import OptionError, Submitted, prepare

    typer.echo(f"Preparing {settings.source} ...", err=True)
    try:
        made = prepare(settings, out, executor=executor.value, tasks=tasks, options=options)
    except OptionError as error:
        raise typer.BadParameter(str(error)) from None
    if not isinstance(made, Submitted):
        _print(made, out, as_json)
    elif as_json:
        print_json({"jobs": made.jobs, "logs": str(made.logs), "folder": str(out)})
    else:
        typer.echo(f"Slurm jobs {', '.join(made.jobs)}: {out} will appear when the last has ended.")
        typer.echo(
            f"Logs: {made.logs}. If a job fails, mend the cause and give the same call again to go on."
        )


def _print(manifest: "Manifest", out: Path, as_json: bool) -> None:
    if not manifest.tokens("validation"):
        typer.echo("warning: no document was held out, and training validates: raise --validation", err=True)
    source = manifest.source
    result = {
        "documents": source["documents"],
        "tokens": {split: manifest.tokens(split) for split in manifest.splits},
        "bytes": source["bytes"],
        "sha256": source["sha256"],
        "vocabulary": manifest.vocab_size,
        "folder": str(out),
    }
    if as_json:
        print_json(result)
    else:
        print_table(f"Prepared {source['source']}", ["what", "value"], pairs(result), numbers=False)
