"""`python -m studies`: the study, from its text to the numbers in README.md and docs."""

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from studies.plan import Run

app = typer.Typer(help="Does every layer need to know the token?", no_args_is_help=True, add_completion=False)


@app.command()
def prepare(
    corpus: Annotated[Path, typer.Argument(help="A folder with *_train*.jsonl.xz and *_valid.jsonl.xz.")],
    out: Annotated[Path, typer.Option("--out", help="The folder for the shards.")] = Path("data/study"),
    vocabulary: Annotated[int, typer.Option("--vocabulary", min=258, help="Tokens to train.")] = 32_768,
    tokenizer: Annotated[str | None, typer.Option("--tokenizer", help="One that is trained already.")] = None,
) -> None:
    """Turn the corpus into token shards."""
    from studies import data

    made = data.prepare(corpus, out, vocabulary, tokenizer)
    tokens = {split: sum(shard.tokens for shard in shards) for split, shards in made.splits.items()}
    typer.echo(f"{out}: {made.vocab_size:,} ids; " + ", ".join(f"{n:,} to {s}" for s, n in tokens.items()))


@app.command()
def run(
    shared: Annotated[Path, typer.Argument(help="A folder with texts and benchmarks to evaluate on.")],
    data: Annotated[Path, typer.Option("--data", help="Prepared data.")] = Path("data/study"),
    scratch: Annotated[Path, typer.Option("--scratch", help="Where models are trained.")] = Path(
        "runs/study"
    ),
    kept: Annotated[Path, typer.Option("--kept", help="The folder with runs.jsonl.")] = Path("results/study"),
    minutes: Annotated[float, typer.Option("--minutes", help="Begin no run that would take longer.")] = 9.0,
    only: Annotated[str, typer.Option("--only", help="Runs whose name this expression finds.")] = "",
    processes: Annotated[
        int, typer.Option("--processes", min=1, help="Processes side by side: six fill a large GPU.")
    ] = 1,
) -> None:
    """Train and diagnose the runs that are not done; call it again until all are."""
    from studies.plan import plan
    from studies.runner import Places, run_all, side_by_side

    wanted, places = _named(plan(), only), Places(data, shared, scratch, kept)
    if processes > 1:
        options = {"--data": data, "--scratch": scratch, "--kept": kept, "--minutes": minutes, "--only": only}
        words = [str(word) for option in options.items() for word in option]
        command = [sys.executable, "-u", "-m", "studies", "run", str(shared), *words]
        status = side_by_side(processes, command, scratch, typer.echo)
    else:
        run_all(wanted, places, minutes, typer.echo)
        status = 0
    left = sum(not places.done(run) for run in wanted)
    typer.echo(f"{left} of {len(wanted)} runs are left")
    raise typer.Exit(status)


def _named(runs: "list[Run]", only: str) -> "list[Run]":
    try:
        found = [run for run in runs if re.search(only, run.name)]
    except re.error as error:
        raise typer.BadParameter(f"--only {only!r} is no regular expression: {error}") from None
    if not found:
        raise typer.BadParameter(f"--only {only!r} finds none of the runs, such as {runs[0].name!r}")
    return found


@app.command()
def cache(
    shared: Annotated[Path, typer.Argument(help="A folder with texts to look up.")],
    data: Annotated[Path, typer.Option("--data", help="Prepared data.")] = Path("data/study"),
    model: Annotated[str, typer.Option("--model", help="The preset whose rows are stored.")] = "tide-8e-1b",
    bits: Annotated[int, typer.Option("--bits", min=2, help="Of a number: 16, 8, 4, 3 or 2.")] = 4,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="At most, of each text.")] = 30_000,
    folder: Annotated[
        Path,
        typer.Option(
            "--folder", exists=True, help="Where the store is written, and removed: on the disk to time."
        ),
    ] = Path(),
    out: Annotated[
        Path, typer.Option("--out", dir_okay=False, help="The JSON file to write, with versions and machine.")
    ] = Path("results/study/cache.json"),
) -> None:
    """Measure how many rows a cache of rows finds, by its bytes, as text is read from a store on disk."""
    from studies.cache import measure
    from studies.runner import TEXTS
    from tide_lm.run.provenance import write_record

    out.parent.mkdir(parents=True, exist_ok=True)
    texts = {name: shared / path for name, path in TEXTS.items()}
    write_record(out, measure(texts, data, model, bits, tokens, folder, typer.echo))
    typer.echo(out)


@app.command()
def upcycle(
    data: Annotated[Path, typer.Option("--data", help="Prepared data.")] = Path("data/study"),
    scratch: Annotated[Path, typer.Option("--scratch", help="Where models are trained.")] = Path(
        "runs/upcycling"
    ),
    size: Annotated[str, typer.Option("--size", help="Of the Llama: tiny, small or medium.")] = "small",
    only: Annotated[str, typer.Option("--only", help="Ways whose name this expression finds.")] = "",
    processes: Annotated[int, typer.Option("--processes", min=1, help="Processes side by side.")] = 1,
    out: Annotated[
        Path, typer.Option("--out", dir_okay=False, help="The JSON file to write, with versions and machine.")
    ] = Path("results/upcycling/all.json"),
) -> None:
    """Train a Llama, and go on with it as it is and as a TIDE model, for as many tokens again."""
    from studies.upcycling import WAYS, Plan, compare
    from tide_lm.run.provenance import write_record

    ways = [way for way in WAYS if re.search(only, way.name)]
    if not ways:
        raise typer.BadParameter(f"--only {only!r} finds none of {', '.join(way.name for way in WAYS)}")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_record(out, compare(Plan(data, scratch, size), ways, processes, typer.echo))
    typer.echo(out)


@app.command()
def pictures(
    demo: Annotated[Path, typer.Argument(help="What `make demo` wrote.")] = Path("runs/demo"),
    out: Annotated[Path, typer.Option("--out", help="Where pictures go.")] = Path("docs/pictures"),
) -> None:
    """Take the README's pictures of a demo's report and of its explorer, in a browser."""
    from studies.pictures import take

    take(demo, out, typer.echo)


@app.command()
def report(
    results: Annotated[Path, typer.Option("--results", help="Where the runs are kept.")] = Path(
        "results/study"
    ),
    docs: Annotated[Path, typer.Option("--docs", help="Where figures go.")] = Path("docs"),
) -> None:
    """Draw the figures of the study from the runs that are kept."""
    from studies import upcycling_report
    from studies.report import write_report

    typer.echo(write_report(results, docs))
    if found := upcycling_report.read(results.parent / "upcycling"):
        typer.echo(upcycling_report.write(found, docs))


@app.command()
def pages(
    root: Annotated[Path, typer.Argument(help="The folder with README.md, docs/ and results/.")] = Path(),
) -> None:
    """Rewrite the numbers in README.md and docs/*.md from the files in results/, and nothing else there."""
    from studies.pages import write

    for page in write(root, root / "results"):
        typer.echo(page)


if __name__ == "__main__":
    try:
        app()
    except ValueError as error:
        sys.exit(f"Error: {error}")
