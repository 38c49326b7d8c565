"""Runs side by side: their settings, their losses, and how each number was made."""

from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Any, NamedTuple

from tide_lm.report.drawing import GROUPS
from tide_lm.report.figure import Runs, Table
from tide_lm.report.figures.loss import change, sources
from tide_lm.report.figures.training import perplexities, stated_perplexity
from tide_lm.report.formatting import DECILE_NAMES, MINUS, NOT_MEASURED, difference, number, quantity
from tide_lm.report.results import Run

ROWS = {
    "rare": "rare (0 to 2)",
    "mid": "mid (3 to 6)",
    "common": "common (7 to 9)",
    "unbinned": "in no decile",
}


AROUND = 90  # letters on each side of a word
Environment = tuple[tuple[str, str], ...]  # names and values


class Headline(NamedTuple):
    """A difference in loss to the first run, and what both have for it: losses and parameters."""

    run: str
    text: str
    group: str
    change: float
    losses: str
    sizes: str


class Word(NamedTuple):
    """A word that a run predicts better, and what is around it where it gains most."""

    word: str
    change: str
    times: str
    before: str
    after: str


class Words(NamedTuple):
    said: str
    words: list[Word]


class Progress(NamedTuple):
    """How far a run is that has not ended; the numbers are of the last line that it logged."""

    run: str
    step: int
    steps: int
    numbers: dict[str, str]


def facts(runs: Runs) -> Table:
    """Return a table with one row per fact and one column per run."""
    rows: list[tuple[str, Callable[[Run], str]]] = [
        ("preset", lambda run: run.config.model.name if run.config else NOT_MEASURED),
        ("memory blocks K", lambda run: NOT_MEASURED if run.blocks is None else str(run.blocks)),
        ("parameters", lambda run: quantity(run.parameters.total if run.parameters else None)),
        ("of these, in the tables", lambda run: quantity(run.parameters.tables if run.parameters else None)),
        ("training tokens", lambda run: quantity(run.tokens)),
        ("how the tables are trained", _table_policy),
        ("held-out loss, nats", lambda run: number(run.results.get("validation", {}).get("loss"))),
    ]
    cells = [(name, *(cell(run) for run in runs)) for name, cell in rows]
    for text in dict.fromkeys(text for run in runs for text in run.texts):
        found, stated = [run.texts.get(text) for run in runs], stated_perplexity(text)
        values = perplexities([result["perplexity"] if result else None for result in found], found)
        cells.append((f"perplexity on {text}" + (f"; the paper: {stated}" if stated else ""), *values))
    return Table("The runs", ["", *(run.name for run in runs)], cells, numbers=False)


def _table_policy(run: Run) -> str:
    if run.config is None:
        return NOT_MEASURED
    return run.config.table_policy if run.blocks else "no tables"


def losses(runs: Runs) -> list[Table]:
    """Return loss by decile and group, and differences, for each text that all runs were measured on."""
    if not all(run.losses for run in runs):
        return []
    first, *others = runs
    columns = ["decile", "tokens", first.name]
    for run in others:
        columns += [run.name, f"{run.name} {MINUS} {first.name}"]
    tables = []
    for source in sources(runs):
        names = (*DECILE_NAMES, *ROWS.values(), "all")
        rows = list(map(_row, names, *(_column(run.losses[source]) for run in runs)))
        what = "the held-out text of the training data" if source == "validation" else source
        caption = f"Loss in nats on {what}, by the frequency of the predicted token"
        tables.append(Table(caption, columns, rows))
    return tables


def _column(result: dict[str, Any]) -> list[tuple[float | None, int]]:
    """Return losses and tokens by decile, by group, and of all."""
    deciles = zip(result["loss_by_decile"], result["tokens_by_decile"], strict=True)
    parts = [*(result[group] for group in ROWS), result]
    return [*deciles, *((part["loss"], part["tokens"]) for part in parts)]


def _row(name: str, first: tuple[float | None, int], *others: tuple[float | None, int]) -> list[str]:
    value, tokens = first
    cells = [name, f"{tokens:,}", number(value)]
    for other, _ in others:
        cells += [number(other), difference(change(other, value))]
    return [cell.replace(NOT_MEASURED, "-") for cell in cells]


def headlines(runs: Runs) -> list[Headline]:
    """Compare each run with the first, on all tokens of the first text of both and on each group."""
    if len(runs) < 2 or not all(run.losses for run in runs) or not (shared := sources(runs)):
        return []
    found, before = [], runs[0].losses[shared[0]]
    text = "the held-out text" if shared[0] == "validation" else shared[0]
    for run in runs[1:]:
        now = run.losses[shared[0]]
        groups = {"all tokens": (now, before)}
        groups |= {f"{name} tokens": (now[name], before[name]) for name in GROUPS}
        sizes = f"{size(run)} against {parameters(runs[0])}"
        for group, (ours, theirs) in groups.items():
            if (apart := change(ours["loss"], theirs["loss"])) is not None:
                both = f"{number(ours['loss'])} against {number(theirs['loss'])}"
                found.append(Headline(run.name, text, group, apart, both, sizes))
    return found


def size(run: Run) -> str:
    """Say how many parameters a run has."""
    return f"{parameters(run)} parameters" if run.parameters else "parameters not known"


def parameters(run: Run) -> str:
    return quantity(run.parameters.total if run.parameters else None, ".3g")


def progress(runs: Runs) -> list[Progress]:
    """Return the runs that have steps to go."""
    found = []
    for run in runs:
        last: dict[str, Any] = run.metrics[-1] if run.metrics else {"step": 0}
        if run.config is not None and last["step"] < run.config.train.steps:
            timing = last.get("timing", {})
            left = timing.get("seconds_left")
            numbers = {
                "loss, nats": number(last.get("loss")),
                "learning rate": number(last.get("learning_rate"), ".2e"),
                "tokens/s": number(timing.get("tokens_per_s"), ",.0f"),
                "time left": NOT_MEASURED if left is None else str(timedelta(seconds=left)),
            }
            found.append(Progress(run.name, last["step"], run.config.train.steps, numbers))
    return found


def speed(run: Run) -> float | None:
    """Return the tokens/s of the training, in the middle of what was logged."""
    logged = [line.get("timing", {}).get("tokens_per_s") for line in run.metrics]
    return median(known) if (known := [value for value in logged if value]) else None


def training_cost(runs: Runs) -> Table | None:
    """Return a table of what the training took, if any run says it."""

    def memory(run: Run) -> str:
        found = [line.get("timing", {}).get("memory_gb") for line in run.metrics]
        return number(max((value for value in found if value), default=None), ".1f")

    def seconds(run: Run) -> str:
        rate = speed(run)
        return str(timedelta(seconds=round(run.tokens / rate))) if rate and run.tokens else NOT_MEASURED

    rows: list[tuple[str, Callable[[Run], str]]] = [
        ("tokens/s, median", lambda run: number(speed(run), ",.0f")),
        ("time of all steps at that speed", seconds),
        ("most memory, GB", memory),
    ]
    if not any(map(speed, runs)):
        return None
    cells = [(name, *(cell(run) for run in runs)) for name, cell in rows]
    return Table("What the training took", ["", *(run.name for run in runs)], cells)


def words(runs: Runs) -> list[Words]:
    """Return the words that each run gains most on, where they were looked for."""
    found = []
    for run in runs:
        if result := run.results.get("words"):
            of = f"Of {result['words']:,} words that occur {result['least']} times or more"
            said = f"{of}, {run.name} predicts {result['better']:,} better than {result['against']}. "
            said += "The loss of these falls most, on average:"
            found.append(Words(said, list(map(_word, result["largest"]))))
    return found


def _word(found: dict[str, Any]) -> Word:
    """Cut a sentence down to what is around its word, which stands between asterisks."""
    before, _, after = found["sentence"].partition(f"*{found['word']}*")
    if len(before) > AROUND:
        before = "… " + before[-AROUND:].partition(" ")[2]
    if len(after) > AROUND:
        after = after[:AROUND].rpartition(" ")[0] + " …"
    change_of_loss = f"{number(-found['gain'], '+.2f')} nats"
    return Word(found["word"], change_of_loss, f"{found['times']:,} times", before, after)


def origins(runs: Runs) -> dict[tuple[Environment, ...], dict[str, dict[str, list[str]]]]:
    """Return the results of each run that each command made, in the order of their files.

    Commands are grouped by the environments that they ran in; most ran in one.
    """
    made_by: dict[str, dict[str, list[str]]] = {}
    ran_in: dict[str, dict[Environment, None]] = {}
    for run in runs:
        made_of = {name: result for name, result in run.results.items() if name != "perplexity"}
        made_of |= {f"perplexity of {name}": text for name, text in run.texts.items()}
        for name, result in made_of.items():
            if made := result.get("provenance"):
                seed = "" if made.get("seed") is None else f", seed {made['seed']}"
                command = made.get("command", "not known")
                made_by.setdefault(command, {}).setdefault(f"{run.name}{seed}", []).append(name)
                ran_in.setdefault(command, {})[_environment(made)] = None
    grouped: dict[tuple[Environment, ...], dict[str, dict[str, list[str]]]] = {}
    for command, results in made_by.items():
        grouped.setdefault(tuple(ran_in[command]), {})[command] = results
    return grouped


def _environment(made: dict[str, Any]) -> Environment:
    machine = made.get("machine", {})
    gpus = ", ".join(machine.get("gpus") or ()) or "no GPU"
    packages = {"Python": made.get("python"), **made.get("versions", {})}
    return (
        ("commit", made.get("commit") or "not known"),
        ("versions", ", ".join(f"{name} {version}" for name, version in packages.items())),
        ("machine", f"{machine.get('cpu')}, {machine.get('cores')} cores, {gpus}; {machine.get('system')}"),
    )
