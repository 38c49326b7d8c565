"""The commands of `python -m studies.optimum`: prepare text, train runs, collect them, and sum them up."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from studies import optimum_plan, optimum_summary
from studies.optimum import SIDE_BY_SIDE, Tuned, collect, prepare_all, train_all
from tide_lm.run.provenance import write_record

app = typer.Typer(help="The study at the optimum.", no_args_is_help=True, add_completion=False)
_DATA = Annotated[Path, typer.Option("--data", help="Prepared data.")]
_SCRATCH = Annotated[Path, typer.Option("--scratch", help="Where models are trained.")]
_KEPT = Annotated[Path, typer.Option("--kept", help="The folder for a JSON file per run.")]
_RECORDS = Annotated[Path, typer.Option("--records", help="The runs so far, as `collect` writes them.")]
DATA, SCRATCH, KEPT = Path("data/optimum"), Path("runs/optimum"), Path("runs/optimum-kept")
RECORDS = Path("results/study/optimum.jsonl")


@app.command()
def prepare(
    shared: Annotated[Path, typer.Argument(help="A folder with the folders corpus and more.")],
    out: _DATA = DATA,
    tokenizer: Annotated[str | None, typer.Option("--tokenizer", help="One that is trained already.")] = None,
) -> None:
    """Encode the text without the test split, and put the split's text beside it."""
    made = prepare_all(shared, out, tokenizer)
    tokens = {split: sum(shard.tokens for shard in shards) for split, shards in made.splits.items()}
    typer.echo(f"{out}: {made.vocab_size:,} ids; " + ", ".join(f"{n:,} to {s}" for s, n in tokens.items()))


@app.command()
def run(
    names: Annotated[list[str], typer.Argument(help='Runs in their order, such as "base, 0.004".')],
    data: _DATA = DATA,
    scratch: _SCRATCH = SCRATCH,
    kept: _KEPT = KEPT,
    records: _RECORDS = RECORDS,
    seconds: Annotated[float, typer.Option("--seconds", help="Begin no run later than that.")] = 1e9,
    processes: Annotated[
        int, typer.Option("--processes", min=1, help="Processes side by side: six fill a large GPU.")
    ] = 1,
) -> None:
    """Train the runs that are not done yet; stopped by a signal, they go on when it is called again."""
    plan, begun = [Tuned.named(name) for name in names], time.time()
    _refuse_second_reading(plan, records)
    if processes == 1:
        train_all(plan, data, scratch, kept, begun + seconds, typer.echo)
        return
    options = {"--data": data, "--scratch": scratch, "--kept": kept, "--records": records}
    raise typer.Exit(_side_by_side(processes, scratch, "run", *names, options | {"--seconds": seconds}))


def _refuse_second_reading(plan: Sequence[Tuned], records: Path) -> None:
    """Raise ValueError if a run of the plan has read the test split, which each run does once."""
    before = {Tuned.of(record) for record in _known(records)}
    if again := [run for run in plan if run.test and run in before]:
        raise ValueError(
            f"{again[0].name!r} has read the test split, says {records}, and a run reads it once: name "
            "another run, or leave out `, test`"
        )


def _known(records: Path, kept: Path | None = None) -> list[dict[str, Any]]:
    """The records of a file, if it is there, and those that are kept since."""
    known = optimum_summary.read(records) if records.exists() else []
    since = sorted(kept.glob("*.json")) if kept is not None else []
    return known + [json.loads(path.read_text(encoding="utf-8")) for path in since]


def _side_by_side(processes: int, scratch: Path, *words: Any) -> int:
    from studies.runner import side_by_side

    *names, options = words
    more = [str(word) for option in options.items() for word in option]
    command = [sys.executable, "-u", "-m", "studies.optimum", *names, *more]
    return side_by_side(processes, command, scratch, typer.echo)


@app.command(name="all")
def run_plan(
    minutes: Annotated[float, typer.Option("--minutes", help="Begin no run that takes longer.")] = 1e9,
    processes: Annotated[
        int, typer.Option("--processes", min=1, help="Processes side by side: six fill a large GPU.")
    ] = SIDE_BY_SIDE,
    data: _DATA = DATA,
    scratch: _SCRATCH = SCRATCH,
    kept: _KEPT = KEPT,
    records: _RECORDS = RECORDS,
    begun: Annotated[float, typer.Option("--begun", hidden=True, help="Of a process beside others.")] = 0,
) -> None:
    """Train the plan's runs that are not done, the most important first, and print what is left.

    No run is begun that is not likely to end within `--minutes`. Stopped by a signal, runs go on when it is
    called again: give it the minutes that are left. Example: `timeout 570 python -m studies.optimum all
    --minutes 30`, and then again with `--minutes 20`.
    """
    plan, places, status = optimum_plan.plan(), (data, scratch, kept), 0

    def known() -> list[dict[str, Any]]:
        return _known(records, kept)

    if begun or processes == 1:
        until = (begun or time.time()) + 60 * minutes
        optimum_plan.train_plan(plan, known, places, until, processes, typer.echo)
    else:
        options: dict[str, Any] = {"--minutes": minutes, "--processes": processes, "--begun": time.time()}
        options |= {"--data": data, "--scratch": scratch, "--kept": kept, "--records": records}
        status = _side_by_side(processes, scratch, "all", options)
    if not begun:
        typer.echo("\n".join(optimum_plan.left(plan, known(), scratch, processes)))
    raise typer.Exit(status)


@app.command(name="collect")
def collect_records(
    out: Annotated[Path, typer.Argument(help="The file to write, one record per line.")],
    kept: _KEPT = KEPT,
) -> None:
    """Put the records of all runs into one file."""
    typer.echo(f"{out}: {collect(kept, out)} runs")


@app.command()
def show(
    records: Annotated[Path, typer.Argument(help="What `collect` wrote.")] = RECORDS,
) -> None:
    """Print all runs, and the tokens that each arm saves at the base's losses."""
    found = optimum_summary.read(records)
    typer.echo(optimum_summary.table(found))
    typer.echo("\n".join(optimum_summary.lines(optimum_summary.saved(found, typer.echo))))


@app.command()
def summary(
    records: Annotated[Path, typer.Argument(help="What `collect` wrote.")] = RECORDS,
    out: Annotated[Path, typer.Option("--out", help="The file to write.")] = Path(
        "results/study/summary.json"
    ),
) -> None:
    """Write tokens saved, gains and the test split's bootstrap, and print what cannot be said."""
    found = optimum_summary.summary(optimum_summary.read(records), typer.echo)
    write_record(out, found)
    typer.echo("\n".join(optimum_summary.lines(found["tokens_saved"])))
    typer.echo(f"{out}: {len(found['runs'])} runs")


def main() -> None:
    try:
        app()
    except ValueError as error:
        sys.exit(f"Error: {error}")
