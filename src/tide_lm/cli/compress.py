"""`tide-lm compress`: what tables in fewer bits and of lower rank cost."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from tide_lm.cli import options
from tide_lm.cli.opening import check_memory, open_to_measure, tide_run
from tide_lm.cli.output import number, print_json, print_next, print_table
from tide_lm.cli.progress import working
from tide_lm.cli.summary import print_summary
from tide_lm.report.meaning import best_form
from tide_lm.run.directory import check_exists


def command(
    model: options.Model,
    text: options.Texts = None,
    form: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FORM", show_default="all", help='A form to measure, as in "4 bits"; may be repeated.'
        ),
    ] = None,
    text_field: options.TextField = "text",
    counts: options.Counts = None,
    run: options.Run = None,
    window: options.Window = None,
    stride: options.Stride = None,
    batch: options.Batch = 8,
    device: options.Device = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure smaller forms of a model's tables: bytes, perplexity, loss by decile. Nothing is packed.

    Example: tide-lm compress runs/mine --form "4 bits" --text wiki.test.txt
    """
    from tide_lm.compress.forms import FORMS, forms_named

    with options.usage_errors():
        forms = forms_named(form) if form else FORMS
    named = options.named_texts(text, text_field)
    model = tide_run(model)
    options.check_windows(window, stride)
    check_exists(model)
    check_memory(model, "compress")
    opened = open_to_measure(model, counts, run, device=device)
    opened.check_memory()
    from tide_lm.compress.measure import measure
    from tide_lm.evaluation.texts import TextSettings, TextSettingsError

    settings = TextSettings(named, text_field, window, stride, batch)
    with working(f"Compressing {model}") as log, options.usage_errors(TextSettingsError):
        result = measure(opened, settings, forms, log)
    typer.echo(f"wrote {opened.write('compression', result)}", err=True)
    if as_json:
        print_json(result)
    else:
        rows = [(name, number(text["perplexity"])) for name, text in result["as_trained"].items()]
        print_table(f"{model}: its tables as trained", ["text", "perplexity"], rows)
        print_summary("compression", model, result, opened.run)
    print_next(shlex.join(_pack(model, best_form(result))))


def _pack(model: str, form: dict[str, Any]) -> list[str]:
    """Return the command that packs a form."""
    words = ["tide-lm", "pack", model, "--out", f"{Path(model).name}-packed", "--bits", str(form["bits"])]
    if form["rank"] < 1:
        words += ["--rank", f"{form['rank']:g}", "--blocks", form["blocks"]]
    return words
