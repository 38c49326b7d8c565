"""`tide-lm train`: prepared tokens in, a Hugging Face folder out."""

import shlex
import sys
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from tide_lm.cli.options import AsJson
from tide_lm.cli.output import defer_to_first, print_json, print_next, print_table
from tide_lm.cli.progress import training_progress
from tide_lm.run.directory import RunDirectory
from tide_lm.run.settings import flat
from tide_lm.run.torchrun import started_by_torchrun


def command(
    config: Annotated[Path | None, typer.Argument(help="The run's settings, a TOML file.")] = None,
    start: Annotated[
        Path | None,
        typer.Option("--from", help="A TIDE or Llama folder, or a run, to start from: model.start."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value; wins over the file; repeatable.")
    ] = None,
    run: Annotated[Path, typer.Option(help="The run directory.")] = Path("runs/train"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run; its settings need not be given.")
    ] = False,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Resume with settings that differ.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print settings and costs; write nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a base or a TIDE model on prepared data, or continue a run.

    Example: tide-lm train run.toml --run runs/mine --set train.steps=2000
    """
    folder = RunDirectory(run)
    try:
        chosen = folder.settings(config, settings or (), start, resume)
    except ValueError as error:
        defer_to_first()
        raise typer.BadParameter(str(error)) from None
    if not started_by_torchrun():  # where another process may have made the run already
        from tide_lm.training.checks import check_data, check_run

        if dry_run:
            check_data(chosen.data, chosen.model)
        else:
            check_run(folder, chosen, resume, allow_changes)
    from tide_lm.run import process_group

    if dry_run:
        from tide_lm.training.dry_run import dry_run as try_out

        rank, count = process_group.started()
        if rank == 0:
            result = try_out(chosen, count, folder.last_metrics().get("step", 0) if resume else 0)
            print_json(result) if as_json else _print_dry_run(result)
        if count == 1:
            print_next(shlex.join(["tide-lm", *(word for word in sys.argv[1:] if word != "--dry-run")]))
        return

    from tide_lm.training.trainer import Trainer

    with process_group.joined():
        with training_progress(chosen.train.steps, shown=process_group.is_first()) as (log, advance):
            trainer = Trainer(chosen, run, log, advance, resume, allow_changes)
            validation = trainer.train()
        if as_json and process_group.is_first():
            print_json(validation)
        elif validation and process_group.is_first():
            typer.echo(f"validation loss {validation['loss']:.4f} at step {validation['step']:,}, in {run}")
        if trainer.step == chosen.train.steps and process_group.is_first():
            print_next(shlex.join(["tide-lm", "generate", str(run), "The"]))
    process_group.leave(trainer.status)
    raise typer.Exit(trainer.status)


def _print_dry_run(result: dict[str, Any]) -> None:
    settings = [
        (name, f"{value:.6g}" if isinstance(value, float) else value)
        for name, value in flat(result["config"]).items()
    ]
    print_table("Settings", ["setting", "value"], settings, numbers=False)
    each = f" of each of {result['processes']} processes" if result["processes"] > 1 else ""
    costs = [
        *((f"ids of the {part}", f"{count:,}") for part, count in result["vocabulary"].items()),
        *((f"parameters, {part}", f"{count:,}") for part, count in result["parameters"].items()),
        *((f"memory{each}, {part}", f"{count / 1e9:,.3f} GB") for part, count in result["bytes"].items()),
        ("FLOPs per token", f"{result['flops_per_token']:.3e}"),
        ("tokens", f"{result['tokens']:,}"),
        ("epochs of the data", f"{result['epochs']:,}"),
    ]
    print_table("Costs", ["what", "cost"], costs)
    time = result["time"]
    typer.echo(f"Time: about {timedelta(seconds=round(time['seconds']))}, estimated from {time['from']}")
    for doubt in result["doubts"]:
        typer.echo(f"Warning: {doubt}")
    typer.echo(f"Tables: {result['table_policy']}")
    first = result["first_batch"]
    typer.echo(f"First batch: {first['shape']}, {first['distinct_tokens']:,} distinct tokens; it begins")
    typer.echo(f"{first['first_ids']}\n{first['first_text']!r}")
