"""`tide-lm prepare`: text to token shards."""

import json
import shlex
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tide_lm.cli.options import AsJson, one_of, usage_errors
from tide_lm.cli.output import pairs, print_json, print_next, print_table
from tide_lm.cli.progress import working
from tide_lm.run import files
from tide_lm.run.settings import MANY_EPOCHS, ModelSection, RunConfig
from tide_lm.spec import presets
from tide_lm.spec.estimate import count_parameters

if TYPE_CHECKING:
    from tide_lm.data.prepare import Settings
    from tide_lm.data.shards import Manifest


SIZES = ("tide-8e-6m", "tide-8e-small", "tide-8e-medium")  # of a run of minutes to a day
TOKENS_PER_PARAMETER = 4  # with fewer, a smaller model learns as much


class Executor(StrEnum):
    local = "local"
    ray = "ray"
    slurm = "slurm"


def command(
    out: Annotated[Path, typer.Option(help="The folder to make.")],
    source: Annotated[
        str,
        typer.Argument(
            help="stories; builtin, the documentation of Python; hf:DATASET or hf:DATASET:CONFIG; or a file, "
            "a folder or a glob of .txt, .jsonl (also .gz, .xz, .zst) or .parquet."
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
        float,
        typer.Option(min=0, max=0.5, help="The share of documents to hold out, or more of a small text."),
    ] = 0.005,
    text_field: Annotated[str, typer.Option(help="The field of a record that holds its text.")] = "text",
    executor: Annotated[
        str | None,
        typer.Option(
            parser=one_of(Executor),
            metavar="|".join(Executor),
            help="Run as tasks of datatrove, here or on many machines; the result is the same.",
        ),
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
    files.check_free(out)
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
    settings: "Settings", out: Path, executor: str, tasks: int, options: dict[str, Any], as_json: bool
) -> None:
    from tide_lm.data.distributed import OptionError, Submitted, prepare

    typer.echo(f"Preparing {settings.source} ...", err=True)
    try:
        made = prepare(settings, out, executor=executor, tasks=tasks, options=options)
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
    source, held_out = manifest.source, manifest.tokens("validation")
    if not held_out:
        typer.echo("warning: no document was held out, and training validates: raise --validation", err=True)
    elif split := source.get("split"):
        what = "whole documents" if split["cut"] < 0 else "the end of a document"
        if split["cut"] >= 0 and split["below"]:
            what = f"whole documents and {what}"
        typer.echo(
            f"Held out to validate on: {held_out:,} tokens, {what}; a share of {source['validation']:g} "
            "would leave too little to validate on, or to train on",
            err=True,
        )
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
    if held_out:
        print_next(_train_command(manifest, out))


def _train_command(manifest: "Manifest", out: Path) -> str:
    """Return a call that trains the largest small model that the data are enough for."""
    tokens, chosen = manifest.tokens("train"), presets.get(ModelSection.preset)
    for name in SIZES:
        larger = presets.get(name)
        if count_parameters(larger.model).backbone * TOKENS_PER_PARAMETER <= tokens:
            chosen = larger
    settings = [f"data.path={out}", f"model.preset={chosen.name}"]
    if manifest.vocab_size != chosen.model.vocab_size:
        settings.append(f"model.vocab_size={manifest.vocab_size}")
    config = RunConfig.load(None, settings)
    steps = MANY_EPOCHS * tokens // (config.train.batch * config.data.sequence)
    if steps < config.train.steps:
        settings.append(f"train.steps={steps}")
    words = [word for setting in settings for word in ("--set", setting)]
    return shlex.join(["tide-lm", "train", "--run", f"runs/{out.name}", *words])
