"""`tide-lm evaluate`: perplexity, loss by decile, and the paper's benchmarks."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tide_lm.cli.output import AsJson, print_json, print_table
from tide_lm.cli.progress import working
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
from tide_lm.run.directory import RunDirectory, results_folder, write_result
from tide_lm.run.provenance import provenance
from tide_lm.spec.config import Residence

if TYPE_CHECKING:
    from tide_lm.model.opened import OpenedModel


def command(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A run, a checkpoint, a folder or a name on the Hub.")],
    text: Texts = None,
    text_field: TextField = "text",
    counts: Counts = None,
    run: Run = None,
    window: Window = None,
    stride: Stride = None,
    batch: Batch = 8,
    memory: Memory = None,
    all_checkpoints: Annotated[
        bool, typer.Option("--all-checkpoints", help="Perplexity at every checkpoint of the run.")
    ] = False,
    benchmarks: Annotated[
        str | None,
        typer.Option(
            "--benchmarks",
            metavar="DIR|hub",
            help="The paper's eight zero-shot tasks, from a folder of JSON lines or from the Hub.",
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option("--tasks", show_default="all eight", help="Some of them, as in arc_easy,piqa."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, show_default="all", help="The first N of each task.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Perplexity by token and word, and loss by frequency decile, on any text; zero-shot benchmarks."""
    if benchmarks is not None:
        refuse_others(
            context,
            {"model", "run", "batch", "memory", "benchmarks", "tasks", "limit", "as_json"},
            "benchmarks",
        )
        _on_benchmarks(model, run, benchmarks, tasks, limit, batch, as_json, memory)
        return
    if tasks or limit:
        raise typer.BadParameter("--tasks and --limit are of benchmarks: give --benchmarks")
    reading = Reading(named_texts(text), text_field, window, stride, batch)
    if all_checkpoints:
        if memory is not None:
            raise typer.BadParameter("checkpoints are not packed: leave --memory out")
        result = over_checkpoints(model, run, counts, reading)
        columns = ["step", "tokens", *result["texts"]]
        rows = [
            (point["step"], f"{point['tokens']:,}", *map(_loss, point["perplexity"].values()))
            for point in result["points"]
        ]
        shown = f"Perplexity of {model}", columns, rows
    else:
        result = on_texts(model, run, counts, reading, memory)
        shown = _table(model, result["texts"])
    if as_json:
        print_json(result)
    else:
        print_table(*shown)


def _on_benchmarks(
    model: str,
    run: Path | None,
    source: str,
    tasks: str | None,
    limit: int | None,
    batch: int,
    as_json: bool,
    memory: Residence | None,
) -> None:
    from tide_lm.evaluate import benchmarks

    names = list(benchmarks.TASKS) if tasks is None else [name.strip() for name in tasks.split(",")]
    try:
        benchmarks.check(source, names)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    from tide_lm.model.opened import open_model

    opened = open_model(model, run=run, memory=memory)
    results_folder(opened.run)
    found = benchmarks.run(opened.model, opened.tokenizer, source, names, batch=batch, limit=limit)
    result = {"model": opened.name, **found}
    _wrote(opened.write("benchmarks", result))
    tell_reads(opened)
    if as_json:
        print_json(result)
    else:
        _print_benchmarks(result)


def _wrote(path: Path) -> None:
    typer.echo(f"wrote {path}", err=True)


def _print_benchmarks(result: dict[str, Any]) -> None:
    """The rows are the columns of the paper's table."""
    from tide_lm.evaluate.benchmarks import TASKS

    def share(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f}"

    rows = [("PPL", _loss(result["lambada_perplexity"]), "", "perplexity", "", "")]
    for name, task in TASKS.items():
        if name in result["tasks"]:
            found = result["tasks"][name]
            rows.append(
                (
                    task.title,
                    share(found["score"]),
                    share(found["stderr"]),
                    found["metric"],
                    f"{found['samples']:,}",
                    found["split"],
                )
            )
    rows.append(("Average", share(result["average"]), "", "", "", ""))
    columns = ["task", "score", "±", "metric", "samples", "split"]
    print_table(f"{result['model']}: zero-shot, in per cent", columns, rows)
    if result["tasks"].get("sciq", {}).get("split") == "validation":
        typer.echo("SciQ: the validation split stands in for the test split", err=True)


def on_texts(
    model: str, run: Path | None, counts: Path | None, reading: Reading, memory: Residence | None = None
) -> dict[str, Any]:
    """Evaluates, and writes results/perplexity.json."""
    from tide_lm.model.opened import open_model

    opened = open_model(model, counts=counts, run=run, memory=memory)
    results_folder(opened.run)
    if opened.frequencies is None and opened.data is not None:
        where = opened.data.absolute()
        typer.echo(f"no loss by decile: the run's data are not at {where}; give --counts", err=True)
    earlier = _earlier_texts(opened)
    found = _evaluate(opened, reading)
    made = {name: {**text, "provenance": provenance()} for name, text in found.items()}
    _wrote(opened.write("perplexity", {"texts": earlier | made}))
    tell_reads(opened)
    return {"texts": found}


def _evaluate(opened: "OpenedModel", reading: Reading) -> dict[str, Any]:
    from tide_lm.evaluate.perplexity import perplexity

    texts, windows = reading.texts_of(opened), reading.windows_of(opened)
    found = {}
    for name, path in texts.items():
        with working(f"Reading {name}") as tell:
            found[name] = perplexity(
                opened.model,
                opened.tokenizer,
                path,
                windows,
                opened.frequencies,
                reading.text_field,
                progress=lambda tokens: tell(f"{tokens:,} tokens"),
            )
    return found


def _earlier_texts(opened: "OpenedModel") -> dict[str, Any]:
    """What was measured before of the same model, on other texts."""
    path = opened.result("perplexity")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        same = Path(found["subject"]["model"]).resolve() == Path(opened.path).resolve()
        return found["texts"] if same else {}
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or it is damaged
        return {}


def over_checkpoints(model: str, run: Path | None, counts: Path | None, reading: Reading) -> dict[str, Any]:
    """Evaluates each checkpoint, and writes results/checkpoints.json."""
    from tide_lm.model.opened import open_model, owning_run
    from tide_lm.run import checkpoint

    owner, _ = owning_run(model)
    folder = RunDirectory(owner or Path(model)).checkpoints
    if owner is None or not (steps := checkpoint.steps(folder)):
        raise ValueError(f"{model} has no checkpoints: give the directory of a run")
    results_folder(run or owner)
    points, found = [], {}
    for step in steps:
        typer.echo(f"step {step:,} ...", err=True)
        try:
            opened = open_model(str(owner), step=step, counts=counts)
        except checkpoint.DamagedError as error:
            typer.echo(f"left out: {error}", err=True)
            continue
        found = _evaluate(opened, reading)
        perplexities = {name: text["perplexity"] for name, text in found.items()}
        points.append({"step": step, "tokens": opened.tokens, "perplexity": perplexities})
    if not points:
        raise ValueError(f"every checkpoint of {model} is damaged: put one back")
    how = {
        name: {key: text[key] for key in ("source", "sha256", "tokens", "bytes", "window", "stride")}
        for name, text in found.items()
    }
    result = {"points": points, "texts": how}
    _wrote(write_result(run or owner, "checkpoints", {"subject": {"model": model}, **result}))
    return result


def _table(model: str, texts: dict[str, Any]) -> tuple[str, list[str], list[tuple[str, ...]]]:
    rows = [
        (
            name,
            f"{result['tokens']:,}",
            *(_loss(result[key]) for key in ("perplexity", "word_perplexity", "bits_per_byte")),
            *(_loss(result.get(group, {}).get("loss")) for group in ("rare", "mid", "common")),
        )
        for name, result in texts.items()
    ]
    columns = ["text", "tokens", "perplexity", "by word", "bits a byte", "rare", "mid", "common"]
    return f"{model}: perplexity, and loss by the frequency of the token", columns, rows


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3f}" if value < 1e6 else f"{value:.2e}"
