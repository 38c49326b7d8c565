"""`tide-lm bench`: how fast this machine trains."""

import json
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any

import typer

from tide_lm.cli.output import AsJson, print_json, print_table
from tide_lm.cli.progress import working

app = typer.Typer(help="Time what this machine does, on made-up data.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps `train` a command of its own."""


@app.command("train")
def train(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="Presets to time; `PRESET:IDS` has a vocabulary of so many ids, and `PRESET+values` rows in "
            "attention's values too.",
            show_default="base-1b tide-8e-1b tide-24e-1b",
        ),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences of a step.")] = 8,
    sequence: Annotated[int, typer.Option("--sequence", min=2, help="Tokens of a sequence.")] = 2048,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to time, after 20 to warm up.")] = 40,
    peers: Annotated[
        bool, typer.Option("--peers", help="Beside each PRESET without IDS, it in a plain compiled loop.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="A JSON file to write, with versions and machine.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tokens a second, MFU, peak memory and the parts of a training step."""
    from tide_lm import runs
    from tide_lm.train.benchmark import measure, shape_of

    try:
        wanted = models or ["base-1b", "tide-8e-1b", "tide-24e-1b"]
        for model in wanted:
            shape_of(model)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if out is not None:
        if out.is_dir():
            raise typer.BadParameter(f"--out {out} is a folder: name a file in it")
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out.parent):  # whether there can be one is better known before the timing
            pass
    found: list[dict[str, Any]] = []
    for model in wanted:
        for plain in (False, True) if peers and ":" not in model else (False,):
            with working(f"Timing {model}{', plain' if plain else ''}"):
                found.append(measure(model, batch, sequence, steps, plain))
    result = {"runs": found, "provenance": runs.provenance()}
    if out is not None:
        runs.write_atomically(out, json.dumps(result, indent=2) + "\n")
    if as_json:
        print_json(result)
    else:
        columns = ["model", "ids", "tokens/s", "MFU", "ms a step", "peak GB"]
        print_table(f"Training, {batch} x {sequence:,} tokens a step", columns, map(_row, found))
        timed = [run for run in found if "parts_ms" in run]
        parts = list(dict.fromkeys(part for run in timed for part in run["parts_ms"]))
        print_table("Parts of a step, ms", ["model", "ids", *parts], (_parts(run, parts) for run in timed))


def _model(run: dict[str, Any]) -> tuple[str, str]:
    return run["preset"] + (", plain" if run["plain"] else ""), f"{run['vocab']:,}"


def _parts(run: dict[str, Any], parts: list[str]) -> tuple[str, ...]:
    return *_model(run), *(f"{run['parts_ms'].get(part, 0):,.1f}" for part in parts)


def _row(run: dict[str, Any]) -> tuple[str, ...]:
    model = _model(run)
    if "out_of_memory" in run:
        return *model, "out of memory", "-", "-", "-"
    return (
        *model,
        f"{run['tokens_per_s']:,.0f}",
        "-" if run["mfu"] is None else f"{run['mfu']:.1%}",
        f"{run['step_ms']:,.1f}",
        "-" if run["peak_gb"] is None else f"{run['peak_gb']:.1f}",
    )
