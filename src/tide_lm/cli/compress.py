"""`tide-lm compress`: what tables in fewer bits and of lower rank cost."""

from typing import Annotated, Any

import typer

from tide_lm.cli.options import (
    AsJson,
    Batch,
    Counts,
    Model,
    Run,
    Stride,
    TextField,
    Texts,
    Window,
    named_texts,
    usage_errors,
)
from tide_lm.cli.output import print_json, print_table
from tide_lm.cli.progress import working
from tide_lm.run.directory import results_folder


def command(
    model: Model,
    text: Texts = None,
    form: Annotated[
        list[str] | None,
        typer.Option(show_default="all", help='A form to measure, as in "4 bits"; repeatable.'),
    ] = None,
    text_field: TextField = "text",
    counts: Counts = None,
    run: Run = None,
    window: Window = None,
    stride: Stride = None,
    batch: Batch = 8,
    as_json: AsJson = False,
) -> None:
    """Measure smaller forms of a model's tables: bytes, perplexity, loss by decile. Nothing is packed.

    Example: tide-lm compress runs/mine --form "4 bits" --text wiki.test.txt
    """
    from tide_lm.compress.measure import forms_named, measure
    from tide_lm.evaluate.texts import TextSettings
    from tide_lm.model.opened import open_model

    with usage_errors():
        forms = forms_named(form) if form else None
    opened = open_model(model, counts=counts, run=run)
    results_folder(opened.run)
    settings = TextSettings(named_texts(text), text_field, window, stride, batch)
    with usage_errors():
        settings.resolve(opened)
    if forms is None and opened.frequencies is None:
        typer.echo("without --counts no form is weighted by the frequency of tokens", err=True)
    with working(f"Compressing {model}") as log:
        result = measure(opened, settings, forms, log)
    typer.echo(f"wrote {opened.write('compression', result)}", err=True)
    print_json(result) if as_json else _print(model, result)


def _print(model: str, result: dict[str, Any]) -> None:
    from tide_lm.report.figures.compression import changes, rare_change
    from tide_lm.report.formatting import count, difference, percent

    whole = result["as_trained"]
    rows = [("as trained", "", *(count(text["perplexity"]) for text in whole.values()), "")]
    for form in result["forms"]:
        more = [percent(change, 2) for change in changes(result, form).values()]
        size, rare = f"{form['relative_bytes']:.1%}", difference(rare_change(result, form))
        rows.append((form["form"], size, *more, rare))
    print_table(f"Perplexity of {model}", ["form", "bytes", *whole, "rare tokens, nats"], rows)
