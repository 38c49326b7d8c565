"""`tide-lm compress`: what tables in fewer bits and of lower rank cost."""

from typing import Annotated

import typer

from tide_lm.cli import options
from tide_lm.cli.output import number, print_json, print_table
from tide_lm.cli.progress import working
from tide_lm.cli.summary import print_summary
from tide_lm.run.directory import results_folder


def command(
    model: options.Model,
    text: options.Texts = None,
    form: Annotated[
        list[str] | None,
        typer.Option(show_default="all", help='A form to measure, as in "4 bits"; repeatable.'),
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
    from tide_lm.compress.measure import FORMS, forms_named, measure
    from tide_lm.evaluation.texts import TextSettings, TextSettingsError
    from tide_lm.model.opened import open_model

    with options.usage_errors():
        forms = forms_named(form) if form else FORMS
    opened = open_model(model, counts=counts, run=run, device=device)
    results_folder(opened.run)
    settings = TextSettings(options.named_texts(text), text_field, window, stride, batch)
    with working(f"Compressing {model}") as log, options.usage_errors(TextSettingsError):
        result = measure(opened, settings, forms, log)
    typer.echo(f"wrote {opened.write('compression', result)}", err=True)
    if as_json:
        print_json(result)
        return
    rows = [(name, number(text["perplexity"])) for name, text in result["as_trained"].items()]
    print_table(f"{model}: its tables as trained", ["text", "perplexity"], rows)
    print_summary("compression", model, result, opened.run)
