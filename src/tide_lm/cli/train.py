"""`tide-lm train`: prepared tokens in, a Hugging Face folder out."""

import json
from pathlib import Path
from typing import Annotated

import typer

from tide_lm import estimate, presets
from tide_lm.cli.output import AsJson, print_json
from tide_lm.run_config import RunConfig


def command(
    config: Annotated[Path | None, typer.Argument(help="The run's settings, a TOML file.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value; wins over the file; repeatable.")
    ] = None,
    run: Annotated[Path, typer.Option("--run", help="The run directory.")] = Path("runs/train"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the run stands.")] = False,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Resume although settings differ.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print settings and costs; write nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a base or a TIDE model on prepared data; resumable to the bit."""
    try:
        chosen = RunConfig.load(config, settings or ())
        shape = presets.get(chosen.model.preset).model
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if dry_run:
        resident, tables = estimate.adam_bytes(shape)
        print_json(
            {
                "config": chosen.to_dict(),
                "parameters": estimate.count_parameters(shape).total,
                "adam_bytes": resident + tables,
                "flops_per_token": estimate.train_flops(shape, chosen.data.sequence),
                "tokens": chosen.train.steps * chosen.train.batch * chosen.data.sequence,
            }
        )
        return

    from tide_lm.train.trainer import Trainer

    trainer = Trainer(chosen, run, lambda line: typer.echo(line, err=True))
    validation = trainer.train(resume, allow_changes)
    if as_json:
        print_json(validation)
    elif validation:
        typer.echo(f"validation loss {json.dumps(validation['loss'])} after {trainer.step:,} steps, in {run}")
