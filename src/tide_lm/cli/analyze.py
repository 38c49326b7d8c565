"""`tide-lm analyze`: the paper's diagnostics on any checkpoint."""

import math
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tide_lm.cli.output import AsJson, print_json
from tide_lm.cli.progress import working
from tide_lm.cli.texts import (
    Batch,
    Counts,
    Run,
    Stride,
    TextField,
    Texts,
    Window,
    chosen_texts,
    chosen_windows,
    named_texts,
)

if TYPE_CHECKING:
    from tide_lm.evaluate.subject import Subject


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


def command(
    what: Annotated[What, typer.Argument(help="What to look at.")],
    models: Annotated[list[str], typer.Argument(help="Runs, checkpoints, folders or names on the Hub.")],
    text: Texts = None,
    text_field: TextField = "text",
    counts: Counts = None,
    run: Run = None,
    window: Window = None,
    stride: Stride = None,
    batch: Batch = 8,
    delta: Annotated[
        float, typer.Option("--delta", min=0, help="collapse: how near, over the mean norm, is collapsed.")
    ] = 0.1,
    token: Annotated[
        list[str] | None, typer.Option("--token", help="neighbours: a word to list; repeatable.")
    ] = None,
    tokens: Annotated[
        float, typer.Option("--tokens", min=1, help="updates: the training budget in tokens.")
    ] = 200e9,
    as_json: AsJson = False,
) -> None:
    """Look into models as the paper does; each analysis writes results/WHAT.json of the model's run."""
    if run is not None and len(models) > 1:
        raise typer.BadParameter("--run takes the results of one model: leave it out, or give one model")
    if not math.isfinite(tokens):
        raise typer.BadParameter(f"--tokens is {tokens}: give a finite number")
    texts = named_texts(text)
    from tide_lm.evaluate.subject import open_subject

    found = {}
    for model in models:
        with working(f"Looking at {what} of {model}") as tell:
            subject = open_subject(model, counts=counts, run=run)
            found[model] = analyze(
                what, subject, texts, text_field, (window, stride, batch), delta, token or [], tokens, tell
            )
        typer.echo(f"results in {subject.run / 'results'}", err=True)
    if as_json:
        print_json(found)


def analyze(
    what: What,
    subject: "Subject",
    texts: dict[str, Path],
    text_field: str = "text",
    windows: tuple[int | None, int | None, int] = (None, None, 8),
    delta: float = 0.1,
    words: Sequence[str] = (),
    tokens: float = 200e9,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Looks, and writes the result."""
    result = _look(what, subject, texts, text_field, windows, delta, words, tokens, tell)
    subject.write(what.value, result)
    return result


def _look(
    what: What,
    subject: "Subject",
    texts: dict[str, Path],
    text_field: str,
    windows: tuple[int | None, int | None, int],
    delta: float,
    words: Sequence[str],
    tokens: float,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    match what:
        case What.norms:
            from tide_lm.analysis.norms import norms

            return norms(subject, tell)
        case What.updates:
            from tide_lm.analysis.updates import updates

            return updates(subject.bins, tokens, 8, 2048)
        case What.gradients:
            from tide_lm.analysis.gradients import gradients

            return gradients(subject.owner or subject.run, subject.bins)
        case What.collapse:
            from tide_lm.analysis.collapse import collapse

            return collapse(subject, delta, tell)
        case What.routing:
            from tide_lm.analysis.routing import routing

            if len(texts) > 1:
                raise typer.BadParameter("routing reads one text: give --text once")
            chosen = chosen_windows(subject, *windows)
            name, path = next(iter(chosen_texts(subject, texts).items()))
            seen = routing(subject, path, chosen, text_field, lambda tokens: tell(f"{tokens:,} tokens"))
            return {"text": name, "source": str(path), "window": chosen.size, **seen}
        case What.layer_drop:
            from tide_lm.analysis.layer_drop import layer_drop

            chosen = chosen_windows(subject, *windows)
            return layer_drop(subject, chosen_texts(subject, texts), chosen, text_field, tell)
        case What.distances:
            from tide_lm.analysis.tables import distances

            return distances(subject)
        case What.neighbours:
            from tide_lm.analysis.tables import neighbours

            return neighbours(subject, words)
        case What.footprint:
            from transformers import LlamaForCausalLM

            from tide_lm.analysis.footprint import footprint
            from tide_lm.config import ModelConfig

            if not isinstance(subject.model, LlamaForCausalLM):
                raise ValueError(f"{subject.name} is no Llama, and only that architecture is counted")
            return footprint(ModelConfig.from_values(subject.model.config.to_dict()))
