"""`tide-lm demo`: train a base and a TIDE model of one transformer on real text, and compare them.

The text is the documentation that every installation carries: no network is needed.
"""

import json
import shutil
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tide_lm.cli.options import AsJson
from tide_lm.cli.output import number, print_json, print_next, print_table
from tide_lm.cli.progress import training_progress, working
from tide_lm.report import overview
from tide_lm.report.results import open_runs
from tide_lm.run import files
from tide_lm.run.directory import RunDirectory, results_folder, write_result
from tide_lm.run.settings import RunConfig

PRESETS = {"base": "base-tiny", "tide": "tide-4e-tiny"}
_RANKS = (f"16 bits, rank {rank}{way}" for way in ("", ", joint") for rank in (0.7, 0.3))
COMPRESSED = ["8 bits", "4 bits", "2 bits", *_RANKS]


def command(
    steps: Annotated[int, typer.Option(min=10, help="Training steps per model.")] = 300,
    run: Annotated[Path, typer.Option(help="The folder for data, runs and numbers.")] = Path("runs/demo"),
    as_json: AsJson = False,
) -> None:
    """Train a base and a TIDE model on the same real text and compare them; a few minutes on two cores.

    Example: tide-lm demo --steps 300 --run runs/demo
    """
    from tide_lm.report.page import write_report

    started = time.monotonic()
    if (run / "config.json").exists():
        raise ValueError(f"{run} holds a run of tide-lm train: choose another --run")
    results_folder(run)
    with files.locked(run / "lock", f"{run} is in use by another demo: wait for it, or choose another --run"):
        data = _prepare(run / "data")
        result: dict[str, Any] = {"steps": steps}
        for kind, preset in PRESETS.items():
            result[kind] = _train(preset, data, run / kind, steps)
        result["null_bank_by_decile"] = _look_into(run)
    result["seconds"] = round(time.monotonic() - started, 1)
    path = write_result(run, "demo", result, seed=0)
    print_json(result) if as_json else _print(run, result)
    page = write_report([run / kind for kind in PRESETS], run / "report" / "index.html")
    typer.echo(f"Runs and numbers: {path.parent.parent}; the report: {page}", err=True)
    print_next(f"tide-lm explore {run}")


def both_runs(folder: str) -> tuple[str, str] | None:
    """Return the TIDE run and the base run of a demo's folder, if it is one."""
    if not (Path(folder) / "results" / "demo.json").exists():
        return None
    tide, base = (Path(folder) / kind for kind in ("tide", "base"))
    return str(tide), str(base)


def tide_run(model: str) -> str:
    """Return the TIDE run of a demo's folder, and say so; return any other model as it is."""
    if both := both_runs(model):
        typer.echo(f"{model} is a demo: this is its TIDE run, {both[0]}", err=True)
        return both[0]
    return model


def _prepare(folder: Path) -> Path:
    """Prepare the builtin text in a vocabulary of 4,096, once."""
    from tide_lm.data.prepare import Settings, prepare
    from tide_lm.data.shards import MANIFEST

    if not (folder / MANIFEST).exists():
        typer.echo("Collecting the documentation of this installation ...", err=True)
        prepare(Settings("builtin", train_tokenizer=4096, validation=0.02), folder)
    return folder


def settings(preset: str, data: Path, steps: int) -> RunConfig:
    """Return the settings of a model: its preset's, for so many steps. Only the preset differs."""
    return RunConfig.load(
        None,
        [
            f"model.preset={preset}",
            f"data.path={json.dumps(str(data))}",
            f"optim.warmup_steps={steps // 10}",
            f"train.steps={steps}",
            "train.log_every=50",
            "train.record_gradients=true",
            f"train.validate_every={steps}",
            "train.validation_sequences=256",
            f"train.keep_every={max(steps // 3, 1)}",
        ],
    )


def _train(preset: str, data: Path, run: Path, steps: int) -> dict[str, Any]:
    from tide_lm.training.trainer import Trainer

    config = settings(preset, data, steps)
    before = RunDirectory(run).read_config()
    if run.exists() and (before or {}).get("data", {}).get("path") != config.data.path:
        raise ValueError(f"{run} is no run of the demo: move it, or choose another --run")
    shutil.rmtree(run, ignore_errors=True)
    typer.echo(f"Training {preset} ...", err=True)
    started = time.monotonic()
    with training_progress(steps) as (log, advance):
        trainer = Trainer(config, run, log, advance)
        validation = trainer.train()
    if not validation:
        raise typer.Abort  # stopped by a signal
    return {
        "preset": preset,
        "parameters": trainer.model.num_parameters(),
        "tokens": steps * trainer.config.train.batch * trainer.config.data.sequence,
        "val_loss": validation["loss"],
        "loss_by_decile": validation["loss_by_decile"],
        "unbinned_loss": validation["unbinned"]["loss"],
        "sample": " ".join(trainer.sample().split()),
        "seconds": round(time.monotonic() - started, 1),
    }


def _look_into(run: Path) -> list[float | None]:
    """Analyse both models for the report; return the null bank's weight in TIDE's last layer."""
    from tide_lm.analysis.analyze import OF_MEMORY, Analysis, AnalysisSettings, analyze
    from tide_lm.compress.forms import forms_named
    from tide_lm.compress.measure import measure
    from tide_lm.evaluation.texts import TextSettings
    from tide_lm.model.opened import open_model

    texts = TextSettings(window=128, stride=128, batch=32)
    found = {}
    for kind in PRESETS:
        opened = open_model(str(run / kind))
        for what in Analysis:
            if what not in OF_MEMORY or opened.has_memory:
                with working(f"Looking at {what} of {kind}") as log:
                    found[what] = analyze(what, opened, AnalysisSettings(texts), log)
                opened.write(what.value, found[what])
    with working("Compressing the tables") as log:
        opened.write("compression", measure(opened, texts, forms_named(COMPRESSED), log))
    return [row and row[-1] for row in found[Analysis.routing]["by_layer"][-1][:-1]]


def _print(run: Path, result: dict[str, Any]) -> None:
    for table in overview.losses(open_runs([run / kind for kind in PRESETS])):
        print_table(table.caption, table.columns, table.rows)
    unused = ", ".join(map(number, result["null_bank_by_decile"]))
    typer.echo(f"Weight of the null bank in TIDE's last layer, rarest to commonest decile: {unused}")
    for kind in PRESETS:
        typer.echo(f"{result[kind]['preset']} writes: {result[kind]['sample']}")
