"""`tide-lm analyze`: the paper's diagnostics on any checkpoint."""

import math
import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tide_lm.analysis.analyze import OF_MEMORY, READS, Analysis, AnalysisSettings, analyze
from tide_lm.cli import options
from tide_lm.cli.opening import check_call, check_memory, check_residence, open_to_measure, tide_run
from tide_lm.cli.output import print_json, print_next
from tide_lm.cli.progress import working
from tide_lm.cli.summary import print_summary

if TYPE_CHECKING:
    from tide_lm.model.opened import OpenedModel

OF_ALL = {"what", "models", "run", "memory", "device", "as_json"}
NAMES = ["all", *map(str, Analysis)]


def command(
    context: typer.Context,
    what: Annotated[
        str,
        typer.Argument(
            parser=options.one_of(NAMES),
            help=f"What to look at: all (whatever fits the model), {', '.join(NAMES[1:-1])} or {NAMES[-1]}.",
        ),
    ],
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
        float,
        typer.Option(
            min=0, help="collapse: the distance, as a share of the mean norm, below which states collapsed."
        ),
    ] = 0.1,
    token: Annotated[
        list[str] | None,
        typer.Option(metavar="WORD", help="neighbours: a word whose neighbours to list; may be repeated."),
    ] = None,
    tokens: Annotated[
        float, typer.Option(min=1, show_default="200e9", help="updates: the tokens of a training.")
    ] = 200e9,
    sequence: Annotated[int, typer.Option(min=1, help="updates: the tokens of a training sequence.")] = 2048,
    as_json: options.AsJson = False,
) -> None:
    """Look into models as the paper does. Each analysis is written to results/WHAT.json of the model's run.

    Example: tide-lm analyze all runs/mine
    """
    chosen = list(Analysis) if what == "all" else [Analysis(what)]
    options.refuse_others(context, set.union(OF_ALL, *(READS[one] for one in chosen)), what)
    if run is not None and len(models) > 1:
        raise typer.BadParameter("--run takes the results of one model: leave it out, or give one model")
    models = [tide_run(model) for model in models]
    if len(set(models)) < len(models):
        raise typer.BadParameter(f"a model is given twice in {', '.join(models)}: give each once")
    if not math.isfinite(tokens + delta):
        raise typer.BadParameter(f"--tokens is {tokens} and --delta {delta}: give finite numbers")
    if Analysis.routing in chosen and len(text or ()) > 1:
        raise typer.BadParameter("routing reads one text: give --text once")
    named = options.named_texts(text, text_field)
    options.check_windows(window, stride)
    for model in models:
        check_call(model, counts, run)
        check_residence(model, memory)
        for one in chosen if what != "all" else ():
            if one in OF_MEMORY:
                check_memory(model, what)
    found: dict[str, Any] = {}
    places = []
    for model in models:
        opened = open_to_measure(model, counts, run, memory=memory, device=device)
        from tide_lm.evaluation.texts import TextSettings

        texts = TextSettings(named, text_field, window, stride, batch)
        settings = AnalysisSettings(texts, delta, token or (), tokens, batch, sequence)
        found[model] = {}
        for one in chosen:
            result = _analyze(one, opened, settings, must=what != "all")
            if result is None:
                continue
            opened.write(one.value, result)
            found[model][one.value] = result
            if not as_json:
                print_summary(one.value, model, result, opened.run)
        if not found[model]:
            raise ValueError(f"no analysis fits {model}: the lines above say what each needs")
        if memory is not None:
            options.print_reads(opened)
        typer.echo(f"results in {opened.run / 'results'}", err=True)
        places.append(str(opened.run))
    if as_json:
        print_json(found if what == "all" else {model: results[what] for model, results in found.items()})
    print_next(f"tide-lm report {shlex.join(places)}")


def _analyze(
    what: Analysis, opened: "OpenedModel", settings: AnalysisSettings, must: bool
) -> dict[str, Any] | None:
    """Return what an analysis finds; one that need not fit, and does not, is left out with a line."""
    from tide_lm.evaluation.texts import TextSettingsError
    from tide_lm.model.opened import LacksError

    try:
        with working(f"Looking at {what} of {opened.path}") as log:
            return analyze(what, opened, settings, log)
    except (LacksError, TextSettingsError) as error:
        if not must and isinstance(error, LacksError):
            typer.echo(f"left out: {what}: {error}", err=True)
            return None
        if isinstance(error, TextSettingsError):
            raise typer.BadParameter(str(error)) from error
        raise
