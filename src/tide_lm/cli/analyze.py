"""`tide-lm analyze`: the paper's diagnostics on any checkpoint."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tide_lm.cli.output import AsJson, print_json
from tide_lm.cli.progress import working
from tide_lm.cli.summary import print_summary
from tide_lm.cli.texts import (
    Batch,
    Counts,
    Memory,
    Reading,
    Run,
    Stride,
    TextField,
    Texts,
    Window,
    named_texts,
    refuse_others,
    tell_reads,
)
from tide_lm.run.directory import results_folder

if TYPE_CHECKING:
    from tide_lm.model.opened import OpenedModel


class What(StrEnum):
    norms = "norms"
    updates = "updates"
    gradients = "gradients"
    collapse = "collapse"
    routing = "routing"
    layer_drop = "layer-drop"
    distances = "distances"
    neighbours = "neighbours"
    footprint = "footprint"


# The options that each analysis reads, beside those of all.
OF_ALL = {"what", "models", "run", "memory", "as_json"}
READS = {
    What.norms: {"counts"},
    What.updates: {"counts", "tokens", "batch", "sequence"},
    What.gradients: {"counts"},
    What.collapse: {"delta"},
    What.routing: {"text", "text_field", "counts", "window", "batch"},
    What.layer_drop: {"text", "text_field", "window", "stride", "batch"},
    What.distances: {"counts"},
    What.neighbours: {"counts", "token"},
    What.footprint: set(),
}

OF_MEMORY = {What.routing, What.layer_drop, What.distances, What.neighbours}


@dataclass(frozen=True)
class Options:
    reading: Reading = field(default_factory=Reading)
    delta: float = 0.1
    words: Sequence[str] = ()
    tokens: float = 200e9
    train_batch: int = 8
    sequence: int = 2048


def command(
    context: typer.Context,
    what: Annotated[What, typer.Argument(help="What to look at.")],
    models: Annotated[list[str], typer.Argument(help="Runs, checkpoints, folders or names on the Hub.")],
    text: Texts = None,
    text_field: TextField = "text",
    counts: Counts = None,
    run: Run = None,
    window: Window = None,
    stride: Stride = None,
    batch: Batch = 8,
    memory: Memory = None,
    delta: Annotated[
        float, typer.Option("--delta", min=0, help="collapse: how near, over the mean norm, is collapsed.")
    ] = 0.1,
    token: Annotated[
        list[str] | None, typer.Option("--token", help="neighbours: a word to list; repeatable.")
    ] = None,
    tokens: Annotated[
        float, typer.Option("--tokens", min=1, help="updates: the training budget in tokens.")
    ] = 200e9,
    sequence: Annotated[
        int, typer.Option("--sequence", min=1, help="updates: the tokens of a training sequence.")
    ] = 2048,
    as_json: AsJson = False,
) -> None:
    """Look into models as the paper does; each analysis writes results/WHAT.json of the model's run."""
    refuse_others(context, READS[what] | OF_ALL, what.value)
    if run is not None and len(models) > 1:
        raise typer.BadParameter("--run takes the results of one model: leave it out, or give one model")
    if len(set(models)) < len(models):
        raise typer.BadParameter(f"a model is given twice in {', '.join(models)}: give each once")
    if not math.isfinite(tokens + delta):
        raise typer.BadParameter(f"--tokens is {tokens} and --delta {delta}: give finite numbers")
    options = Options(
        Reading(named_texts(text), text_field, window, stride, batch),
        delta,
        token or (),
        tokens,
        train_batch=batch,
        sequence=sequence,
    )
    if what is What.routing and len(options.reading.texts) > 1:
        raise typer.BadParameter("routing reads one text: give --text once")
    from tide_lm.model.opened import open_model

    found = {}
    for model in models:
        opened = open_model(model, counts=counts, run=run, memory=memory)
        results_folder(opened.run)
        with working(f"Looking at {what} of {model}") as tell:
            found[model] = analyze(what, opened, options, tell)
        if not as_json:
            print_summary(what.value, f"{what} of {model}", found[model])
        if memory is not None:
            tell_reads(opened)
        typer.echo(f"results in {opened.run / 'results'}", err=True)
    if as_json:
        print_json(found)


def analyze(
    what: What,
    opened: "OpenedModel",
    options: Options,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Looks, and writes the result."""
    result = _look(what, opened, options, tell)
    opened.write(what.value, result)
    return result


def _look(what: What, opened: "OpenedModel", options: Options, tell: Callable[[str], None]) -> dict[str, Any]:
    reading = options.reading
    if what in OF_MEMORY:
        opened.check_memory()
    match what:
        case What.norms:
            from tide_lm.analysis.norms import norms

            return norms(opened, tell)
        case What.updates:
            from tide_lm.analysis.updates import updates

            return updates(opened.bins, options.tokens, options.train_batch, options.sequence)
        case What.gradients:
            from tide_lm.analysis.gradients import gradients

            return gradients(opened.owner or opened.run, opened.bins)
        case What.collapse:
            from tide_lm.analysis.collapse import collapse

            return collapse(opened, options.delta, tell)
        case What.routing:
            from tide_lm.analysis.routing import routing

            windows = reading.windows_of(opened)
            name, path = next(iter(reading.texts_of(opened).items()))
            seen = routing(opened, path, windows, reading.text_field, lambda n: tell(f"{n:,} tokens"))
            return {"text": name, "source": str(path), "window": windows.size, **seen}
        case What.layer_drop:
            from tide_lm.analysis.layer_drop import layer_drop

            texts, windows = reading.texts_of(opened), reading.windows_of(opened)
            return layer_drop(opened, texts, windows, reading.text_field, tell)
        case What.distances:
            from tide_lm.analysis.tables import distances

            return distances(opened)
        case What.neighbours:
            from tide_lm.analysis.tables import neighbours

            return neighbours(opened, options.words)
        case What.footprint:
            from transformers import LlamaConfig

            from tide_lm.analysis.footprint import footprint
            from tide_lm.spec.config import ModelConfig

            if not isinstance(opened.config, LlamaConfig):
                raise ValueError(f"{opened.name} is no Llama, and only that architecture is counted")
            return footprint(ModelConfig.from_values(opened.config.to_dict()))
