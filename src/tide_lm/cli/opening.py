"""Open a model for a command: a wrong call is refused before torch is loaded, which takes seconds."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tide_lm.cli.progress import working
from tide_lm.run.directory import (
    RunDirectory,
    check_exists,
    check_results,
    exported,
    owning_run,
    place_of_results,
)
from tide_lm.run.files import check_writable
from tide_lm.run.settings import RunConfig
from tide_lm.spec.config import Place, Residence

if TYPE_CHECKING:
    from tide_lm.model.opened import OpenedModel


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


def check_call(model: str, counts: Path | None = None, run: Path | None = None) -> Path:
    """Check that a model and its counts are there and that its results can be written; return their place."""
    check_exists(model)
    check_counts(counts)
    place = place_of_results(model, run)
    check_results(place, model)
    check_writable(place / "results")
    return place


def check_counts(counts: Path | None) -> None:
    if counts is not None and not counts.exists():
        raise ValueError(f"there is no {counts}: give prepared data or a file of counts as --counts")


def check_memory(model: str, what: str) -> None:
    """Check that a model has a memory, which `what` needs; of one on the Hub this is known later."""
    owner = owning_run(model)[0]
    if owner is not None and (export := RunDirectory(owner).export / "config.json").exists():
        blocks = _described(str(export.parent)).get("num_memory_blocks", 0)
    elif owner is not None:
        blocks = RunConfig.from_saved(RunDirectory(owner).read_config() or {}).model.shape().num_memory_blocks
    else:
        blocks = _described(model).get("num_memory_blocks", 0) if Path(model).exists() else 1
    if not blocks:
        raise ValueError(f"{model} has no memory, which {what} needs: give a TIDE model")


def check_residence(model: str, residence: Residence | None) -> None:
    """Check that a model is packed, if its rows are to be elsewhere than on its device."""
    if residence is not None and residence.place != Place.device:
        check_packed(model, f"--memory {residence.place}: ")


def check_packed(model: str, why: str = "") -> None:
    """Check that a model is packed; of one on the Hub this is known later."""
    folder = exported(model)
    if Path(folder).exists() and not _described(folder).get("memory_store"):
        raise ValueError(f"{why}{model} is not packed: pack it first, with `tide-lm pack`")


def _described(folder: str) -> dict[str, Any]:
    return json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))


def open_to_measure(
    model: str,
    counts: Path | None = None,
    run: Path | None = None,
    memory: Residence | None = None,
    **options: Any,
) -> "OpenedModel":
    """Open a model whose results will be written."""
    check_call(model, counts, run)
    check_residence(model, memory)
    with working(f"Opening {model}"):
        from tide_lm.model.opened import open_model

        opened = open_model(model, counts=counts, run=run, memory=memory, **options)
    say_checkpoint(opened)
    return opened


def say_checkpoint(opened: "OpenedModel") -> None:
    """Say which checkpoint stands for a run that has not ended."""
    if opened.newest is not None:
        typer.echo(f"{opened.path} has not ended: this is its checkpoint of step {opened.newest:,}", err=True)
