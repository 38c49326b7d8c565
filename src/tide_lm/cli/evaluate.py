"""`tide-lm evaluate`: perplexity, loss by decile, and the paper's benchmarks."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tide_lm import runs
from tide_lm.cli.output import AsJson, print_json, print_table
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


def command(
    model: Annotated[str, typer.Argument(help="A run, a checkpoint, a folder or a name on the Hub.")],
    text: Texts = None,
    text_field: TextField = "text",
    counts: Counts = None,
    run: Run = None,
    window: Window = None,
    stride: Stride = None,
    batch: Batch = 8,
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
    texts = named_texts(text)
    if benchmarks is None and (tasks or limit):
        raise typer.BadParameter("--tasks and --limit are of benchmarks: give --benchmarks")
    if benchmarks is not None:
        if texts or all_checkpoints:
            raise typer.BadParameter("--benchmarks goes without --text and --all-checkpoints: call twice")
        _on_benchmarks(model, run, benchmarks, tasks, limit, batch, as_json)
        return
    from tide_lm.evaluate.subject import open_subject

    if all_checkpoints:
        result = _over_checkpoints(model, texts, text_field, counts, (window, stride, batch))
        path = runs.write_result(run or Path(model), "checkpoints", {"model": model, **result})
    else:
        subject = open_subject(model, counts=counts, run=run)
        runs.results_folder(subject.run)
        result = {"texts": _evaluate(subject, texts, text_field, (window, stride, batch))}
        path = subject.write("perplexity", {"texts": _earlier_texts(subject) | result["texts"]})
    if as_json:
        print_json(result)
    elif all_checkpoints:
        rows = [
            (
                point["step"],
                f"{point['tokens']:,}",
                *(_loss(value) for value in point["perplexity"].values()),
            )
            for point in result["points"]
        ]
        names = list(result["points"][0]["perplexity"])
        print_table(f"Perplexity of {model}", ["step", "tokens", *names], rows)
    else:
        _print(model, result["texts"])
    typer.echo(f"wrote {path}", err=True)


def _on_benchmarks(
    model: str, run: Path | None, source: str, tasks: str | None, limit: int | None, batch: int, as_json: bool
) -> None:
    from tide_lm.evaluate import benchmarks

    names = list(benchmarks.TASKS) if tasks is None else [name.strip() for name in tasks.split(",")]
    benchmarks.check(source, names)
    from tide_lm.evaluate.subject import open_subject

    subject = open_subject(model, run=run)
    runs.results_folder(subject.run)
    found = benchmarks.run(subject.model, subject.tokenizer, source, names, batch=batch, limit=limit)
    result = {"model": subject.name, **found}
    path = subject.write("benchmarks", result)
    if as_json:
        print_json(result)
    else:
        _print_benchmarks(result)
    typer.echo(f"wrote {path}", err=True)


def _print_benchmarks(result: dict[str, Any]) -> None:
    """The rows are the columns of the paper's table."""
    from tide_lm.evaluate.benchmarks import TASKS

    def share(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f}"

    perplexity = result["lambada_perplexity"]
    shown = "-" if perplexity is None else f"{perplexity:.2f}" if perplexity < 1e6 else f"{perplexity:.2e}"
    rows = [("PPL", shown, "", "perplexity", "", "")]
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


def _evaluate(
    subject: "Subject",
    texts: dict[str, Path],
    text_field: str,
    windows: tuple[int | None, int | None, int],
) -> dict[str, Any]:
    from tide_lm.evaluate.perplexity import perplexity

    chosen = chosen_windows(subject, *windows)
    found = {}
    for name, path in chosen_texts(subject, texts).items():
        with working(f"Reading {name}") as tell:
            found[name] = perplexity(
                subject.model,
                subject.tokenizer,
                path,
                chosen,
                subject.frequencies,
                text_field,
                progress=lambda tokens: tell(f"{tokens:,} tokens"),
            )
    return found


def _earlier_texts(subject: "Subject") -> dict[str, Any]:
    """What was measured before of the same model, on other texts."""
    path = subject.run / "results" / "perplexity.json"
    if subject.step is not None or not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    return found.get("texts", {}) if found.get("subject", {}).get("model") == subject.path else {}


def _over_checkpoints(
    model: str,
    texts: dict[str, Path],
    text_field: str,
    counts: Path | None,
    windows: tuple[int | None, int | None, int],
) -> dict[str, Any]:
    from tide_lm import checkpoint
    from tide_lm.evaluate.subject import open_subject

    steps = checkpoint.steps(runs.RunDirectory(Path(model)).checkpoints)
    if not steps:
        raise ValueError(f"{model} has no checkpoints: give a run directory")
    points = []
    for step in steps:
        fault = checkpoint.find_fault(checkpoint.at(runs.RunDirectory(Path(model)).checkpoints, step))
        if fault is not None:
            typer.echo(f"step {step:,} is left out: its checkpoint is damaged ({fault})", err=True)
            continue
        typer.echo(f"step {step:,} ...", err=True)
        subject = open_subject(model, step=step, counts=counts)
        found = _evaluate(subject, texts, text_field, windows)
        points.append(
            {
                "step": step,
                "tokens": subject.tokens,
                "perplexity": {name: result["perplexity"] for name, result in found.items()},
                "window": {name: result["window"] for name, result in found.items()},
            }
        )
    return {"points": points}


def _print(model: str, texts: dict[str, Any]) -> None:
    rows = [
        (
            name,
            f"{result['tokens']:,}",
            _loss(result["perplexity"]),
            "-" if result["word_perplexity"] is None else f"{result['word_perplexity']:,.3f}",
            _loss(result["bits_per_byte"]),
            *(_loss(result.get(group, {}).get("loss")) for group in ("rare", "mid", "common")),
        )
        for name, result in texts.items()
    ]
    columns = ["text", "tokens", "perplexity", "by word", "bits a byte", "rare", "mid", "common"]
    print_table(f"{model}: perplexity, and loss by the frequency of the token", columns, rows)


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
