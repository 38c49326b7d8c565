"""`tide-lm evaluate`: perplexity, loss by decile, and the paper's benchmarks."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from tide_lm.cli import options
from tide_lm.cli.opening import check_call, open_to_measure, tide_run
from tide_lm.cli.output import number, print_json, print_next, print_table
from tide_lm.cli.progress import working
from tide_lm.run.directory import owning_run, place_of_results, write_result


def command(
    context: typer.Context,
    model: options.Model,
    text: options.Texts = None,
    text_field: options.TextField = "text",
    counts: options.Counts = None,
    run: options.Run = None,
    window: options.Window = None,
    stride: options.Stride = None,
    batch: options.Batch = 8,
    memory: options.Memory = None,
    device: options.Device = None,
    all_checkpoints: Annotated[
        bool, typer.Option("--all-checkpoints", help="Perplexity at every checkpoint of the run.")
    ] = False,
    benchmarks: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|hub",
            help="The paper's eight zero-shot tasks, from a folder of JSON lines or from the Hub.",
        ),
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(show_default="all eight", help="Some of the tasks, as in arc_easy,piqa.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, show_default="all", help="The first N records of each task.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure perplexity by token and word, and loss by frequency decile, on any text; zero-shot benchmarks.

    Example: tide-lm evaluate runs/mine --text wikitext=wiki.test.txt
    """
    model = tide_run(model)
    if benchmarks is not None:
        used = {"model", "run", "batch", "memory", "device", "benchmarks", "tasks", "limit", "as_json"}
        options.refuse_others(context, used, "--benchmarks")
        result = _on_tasks(model, run, memory, device, benchmarks, tasks, batch, limit)
        print_json(result) if as_json else _print_tasks(result)
        print_next(shlex.join(["tide-lm", "report", str(place_of_results(model, run))]))
        return
    if tasks or limit:
        raise typer.BadParameter("--tasks and --limit choose benchmarks: give --benchmarks")
    if all_checkpoints and memory is not None:
        raise typer.BadParameter("checkpoints are not packed: leave --memory out")
    options.check_windows(window, stride)
    given = options.named_texts(text, text_field), text_field, window, stride, batch
    if all_checkpoints:
        path, result = _at_checkpoints(model, counts, run, device, given)
        shown = _by_checkpoint(model, result)
    else:
        path, result = _on_texts(model, counts, run, memory, device, given)
        shown = _by_text(model, result)
    typer.echo(f"wrote {path}", err=True)
    print_json(result) if as_json else print_table(*shown)
    print_next(shlex.join(["tide-lm", "analyze", "all", model]))


def _at_checkpoints(
    model: str, counts: Path | None, run: Path | None, device: str | None, given: tuple[Any, ...]
) -> tuple[Path, dict[str, Any]]:
    place = check_call(model, counts, run)
    if owning_run(model)[0] is None:
        raise ValueError(f"{model} has no checkpoints: give the directory of a run")
    with working(f"Opening {model}"):
        from tide_lm.evaluation import texts

    with (
        working(f"Reading for the checkpoints of {model}") as log,
        options.usage_errors(texts.TextSettingsError),
    ):
        result = texts.evaluate_checkpoints(model, texts.TextSettings(*given), counts, device, log)
    for fault in result["left_out"].values():
        typer.echo(f"left out: {fault}", err=True)
    return write_result(place, "checkpoints", {"subject": {"model": model}, **result}), result


def _on_texts(
    model: str,
    counts: Path | None,
    run: Path | None,
    memory: Any,
    device: str | None,
    given: tuple[Any, ...],
) -> tuple[Path, dict[str, Any]]:
    opened = open_to_measure(model, counts, run, memory=memory, device=device)
    from tide_lm.evaluation import texts

    if opened.frequencies is None and opened.data is not None:
        where = opened.data.absolute()
        typer.echo(f"no loss by decile: the run's data are not at {where}; give --counts", err=True)
    with working(f"Reading for {model}") as log, options.usage_errors(texts.TextSettingsError):
        result = {"texts": texts.evaluate_texts(opened, texts.TextSettings(*given), log)}
    options.print_reads(opened)
    return texts.write_texts(opened, result["texts"]), result


def _on_tasks(
    model: str,
    run: Path | None,
    memory: Any,
    device: str | None,
    source: str,
    tasks: str | None,
    batch: int,
    limit: int | None,
) -> dict[str, Any]:
    from tide_lm.evaluation.tasks import TASKS, check

    with options.usage_errors():
        names = check(source, list(TASKS) if tasks is None else [name.strip() for name in tasks.split(",")])
    opened = open_to_measure(model, run=run, memory=memory, device=device)
    with working(f"Scoring {model}") as log:
        from tide_lm.evaluation.zero_shot import score

        found = score(opened.model, opened.tokenizer, source, names, batch=batch, limit=limit, log=log)
    result = {"model": opened.name, **found}
    typer.echo(f"wrote {opened.write('benchmarks', result)}", err=True)
    options.print_reads(opened)
    return result


def _print_tasks(result: dict[str, Any]) -> None:
    """Print the columns of the paper's table as rows."""
    from tide_lm.evaluation.tasks import TASKS

    def per_cent(value: float | None) -> str:
        return number(value and 100 * value, ".1f")

    rows = [("PPL", number(result["lambada_perplexity"]), "", "perplexity", "", "")]
    for name, task in TASKS.items():
        if found := result["tasks"].get(name):
            scores = per_cent(found["score"]), per_cent(found["stderr"])
            rows.append((task.title, *scores, found["metric"], f"{found['samples']:,}", found["split"]))
    rows.append(("Average", per_cent(result["average"]), "", "", "", ""))
    columns = ["task", "score", "±", "metric", "samples", "split"]
    print_table(f"{result['model']}: zero-shot, in per cent", columns, rows)
    if result["tasks"].get("sciq", {}).get("split") == "validation":
        typer.echo("SciQ: the validation split stands in for the test split", err=True)


def _by_checkpoint(model: str, result: dict[str, Any]) -> tuple[Any, ...]:
    rows = [
        (point["step"], f"{point['tokens']:,}", *map(number, point["perplexity"].values()))
        for point in result["points"]
    ]
    return f"Perplexity of {model}", ["step", "tokens", *result["texts"]], rows


def _by_text(model: str, result: dict[str, Any]) -> tuple[Any, ...]:
    rows = [
        (
            name,
            f"{text['tokens']:,}",
            *(number(text[key]) for key in ("perplexity", "word_perplexity", "bits_per_byte")),
            *(number(text.get(group, {}).get("loss")) for group in ("rare", "mid", "common")),
        )
        for name, text in result["texts"].items()
    ]
    columns = ["text", "tokens", "perplexity", "by word", "bits per byte", "rare", "mid", "common"]
    return f"{model}: perplexity, and loss by the frequency of the token", columns, rows
