"""`tide-lm analyze`: the paper's diagnostics on any checkpoint."""

import math
from typing import Annotated

import typer

from tide_lm.analysis.analyze import Analysis, AnalysisSettings, analyze
from tide_lm.cli import options
from tide_lm.cli.output import print_json
from tide_lm.cli.progress import working
from tide_lm.cli.summary import print_summary
from tide_lm.run.directory import results_folder

# The options that each analysis reads, beside those of all.
OF_ALL = {"what", "models", "run", "memory", "device", "as_json"}
READS = {
    Analysis.norms: {"counts"},
    Analysis.updates: {"counts", "tokens", "batch", "sequence"},
    Analysis.gradients: {"counts"},
    Analysis.collapse: {"delta"},
    Analysis.routing: {"text", "text_field", "counts", "window", "batch"},
    Analysis.layer_drop: {"text", "text_field", "window", "stride", "batch"},
    Analysis.distances: {"counts"},
    Analysis.neighbours: {"counts", "token"},
    Analysis.footprint: set(),
}


def command(
    context: typer.Context,
    what: Annotated[Analysis, typer.Argument(help="What to look at.")],
    models: Annotated[list[str], typer.Argument(help="Runs, checkpoints, folders or names on the Hub.")],
    text: options.Texts = None,
    text_field: options.TextField = "text",
    counts: options.Counts = None,
    run: options.Run = None,
    window: options.Window = None,
    stride: options.Stride = None,
    batch: options.Batch = 8,
    memory: options.Memory = None,
    device: options.Device = None,
    delta: Annotated[
        float, typer.Option(min=0, help="collapse: the distance over the mean norm that counts as collapsed.")
    ] = 0.1,
    token: Annotated[
        list[str] | None, typer.Option(help="neighbours: a word whose neighbours to list; repeatable.")
    ] = None,
    tokens: Annotated[float, typer.Option(min=1, help="updates: the tokens of a training.")] = 200e9,
    sequence: Annotated[int, typer.Option(min=1, help="updates: the tokens of a training sequence.")] = 2048,
    as_json: options.AsJson = False,
) -> None:
    """Look into models as the paper does; each analysis writes results/WHAT.json of the model's run.

    Example: tide-lm analyze norms runs/mine runs/base
    """
    options.refuse_others(context, READS[what] | OF_ALL, what.value)
    if run is not None and len(models) > 1:
        raise typer.BadParameter("--run takes the results of one model: leave it out, or give one model")
    if len(set(models)) < len(models):
        raise typer.BadParameter(f"a model is given twice in {', '.join(models)}: give each once")
    if not math.isfinite(tokens + delta):
        raise typer.BadParameter(f"--tokens is {tokens} and --delta {delta}: give finite numbers")
    if what is Analysis.routing and len(text or ()) > 1:
        raise typer.BadParameter("routing reads one text: give --text once")
    from tide_lm.evaluation.texts import TextSettings, TextSettingsError
    from tide_lm.model.opened import open_model

    texts = TextSettings(options.named_texts(text), text_field, window, stride, batch)
    settings = AnalysisSettings(texts, delta, token or (), tokens, batch, sequence)
    found = {}
    for model in models:
        opened = open_model(model, counts=counts, run=run, memory=memory, device=device)
        results_folder(opened.run)
        with working(f"Looking at {what} of {model}") as log, options.usage_errors(TextSettingsError):
            found[model] = analyze(what, opened, settings, log)
        opened.write(what.value, found[model])
        if not as_json:
            print_summary(what.value, model, found[model], opened.run)
        if memory is not None:
            options.print_reads(opened)
        typer.echo(f"results in {opened.run / 'results'}", err=True)
    if as_json:
        print_json(found)
