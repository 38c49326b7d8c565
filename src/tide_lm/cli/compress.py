"""`tide-lm compress`: what tables in fewer bits and of lower rank cost."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tide_lm.cli.output import AsJson, print_json, print_table
from tide_lm.cli.progress import working
from tide_lm.cli.texts import Batch, Counts, Reading, Run, Stride, TextField, Texts, Window, named_texts
from tide_lm.run.directory import results_folder


def command(
    model: Annotated[str, typer.Argument(help="A run, a checkpoint, a folder or a name on the Hub.")],
    text: Texts = None,
    form: Annotated[
        list[str] | None,
        typer.Option("--form", show_default="all", help='One to measure, as in "4 bits"; repeatable.'),
    ] = None,
    text_field: TextField = "text",
    counts: Counts = None,
    run: Run = None,
    window: Window = None,
    stride: Stride = None,
    batch: Batch = 8,
    as_json: AsJson = False,
) -> None:
    """Measure smaller forms of a model's tables: bytes, perplexity, loss by decile. Nothing is packed."""
    reading = Reading(named_texts(text), text_field, window, stride, batch)
    result = on_forms(model, run, counts, reading, form)
    if as_json:
        print_json(result)
    else:
        _print(model, result)


def on_forms(
    model: str, run: Path | None, counts: Path | None, reading: Reading, names: list[str] | None = None
) -> dict[str, Any]:
    """Measures, and writes results/compression.json."""
    from tide_lm.compress.measure import FORMS, measure
    from tide_lm.model.opened import open_model

    known = {str(form): form for form in FORMS}
    if unknown := [name for name in names or () if name not in known]:
        raise typer.BadParameter(f"--form {unknown[0]!r} is none of {', '.join(map(repr, known))}")
    opened = open_model(model, counts=counts, run=run)
    results_folder(opened.run)
    forms = [known[name] for name in names or known]
    if opened.frequencies is None:
        if lost := [str(form) for form in forms if names and form.weighted]:
            raise typer.BadParameter(
                f"--form {lost[0]!r} is weighted by how frequent tokens are: give --counts"
            )
        typer.echo("without --counts no form is weighted by the frequency of tokens", err=True)
        forms = [form for form in forms if not form.weighted]
    texts, windows = reading.texts_of(opened), reading.windows_of(opened)
    with working(f"Compressing {model}") as tell:
        result = measure(opened, forms, texts, windows, reading.text_field, tell)
    typer.echo(f"wrote {opened.write('compression', result)}", err=True)
    return result


def _print(model: str, result: dict[str, Any]) -> None:
    from tide_lm.report.figures.compression import changes, rare_change
    from tide_lm.report.formatting import count, difference, percent

    whole = result["as_trained"]
    rows = [("as trained", "", *(count(text["perplexity"]) for text in whole.values()), "")]
    for form in result["forms"]:
        more = [percent(change, 2) for change in changes(result, form).values()]
        rows.append(
            (form["form"], f"{form['relative_bytes']:.1%}", *more, difference(rare_change(result, form)))
        )
    columns = ["form", "bytes", *whole, "rare tokens, nats"]
    print_table(f"Perplexity of {model}", columns, rows)
