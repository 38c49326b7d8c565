"""The tables and the figure of docs/upcycling.md, from the records in results/upcycling."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studies.markdown import table
from studies.results import Spread
from studies.upcycling import Way
from tide_lm.report.drawing import DECILES, MARKERS, PALETTE, decile_axis, write_panels, zero_line
from tide_lm.report.figure import Axes, Panel

SHOWN = ("TIDE", "TIDE, Llama frozen")  # by decile, beside the Llama


@dataclass(frozen=True)
class Run:
    """A Llama that trained on, with its validation before and after."""

    name: str
    rate: float
    seed: int
    before: dict[str, Any]
    after: dict[str, Any]
    tokens: int

    @property
    def is_llama(self) -> bool:
        return self.name.startswith("Llama")


def read(folder: Path) -> list[Run]:
    """Read what `python -m studies upcycle` wrote, from all files of a folder."""
    found = []
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        starts = {first["seed"]: first["validation"] for first in record["first"]}
        for run in record["runs"]:
            rate, seed = run["about"].get("rate", Way.rate), run["seed"]
            found.append(Run(run["way"], rate, seed, starts[seed], run["validation"], record["tokens"]))
    return found


def write(runs: Sequence[Run], docs: Path) -> Path:
    """Draw the figure, and return its folder."""
    write_panels([by_decile(runs)], "upcycling", docs, ["svg"])
    return docs


def tokens(runs: Sequence[Run]) -> str:
    """Return how many tokens a Llama sees first, and then again."""
    return f"{runs[0].tokens:,}"


def in_short(runs: Sequence[Run]) -> str:
    """Return what the further tokens take off the loss, for the ways with several seeds."""
    trained = _moved(runs, "Llama").mean
    rows = []
    for name in ("Llama", *SHOWN):
        moved = _moved(runs, name)
        gain = str(Spread.of(_gains(runs, name))) if name in SHOWN else ""
        rows.append(
            [name, str(moved), f"{100 * moved.mean / trained:.0f} %", gain, str(len(_of(runs, name)))]
        )
    beside = ["of what the Llama gets", "less than the Llama that goes on, nats"]
    return table(["goes on as", "taken off the loss, nats", *beside, "seeds"], rows)


def ways(runs: Sequence[Run]) -> str:
    """Return every way to train on."""
    return table(
        ["goes on as", "seeds", "loss", "less than before", "less than the Llama that goes on"],
        [_row(runs, name) for name in dict.fromkeys(run.name for run in runs)],
    )


def first_seed(runs: Sequence[Run]) -> str:
    """Return what TIDE gains with the seed of single runs."""
    return f"{_gains(runs, SHOWN[0])[0]:.3f}"


def figure(runs: Sequence[Run]) -> str:
    """Return the figure, with its numbers in words."""
    return f"![{by_decile(runs).alt}](upcycling.svg)"


def deciles(runs: Sequence[Run]) -> str:
    """Return the losses by the frequency of the predicted token."""
    names = ["Llama", *SHOWN]
    starts = [run.before for run in _of(runs, "Llama")]
    columns = [starts, *([run.after for run in _of(runs, name)] for name in names)]
    rows = [
        [str(decile), *(str(Spread.of([v["loss_by_decile"][decile] for v in kind])) for kind in columns)]
        for decile in range(10)
    ]
    return table([DECILES, "before", *names], rows)


def by_decile(runs: Sequence[Run]) -> Panel:
    """Draw a line for each way, beside the Llama that trains on."""
    found = {
        name: [
            Spread.of(values)
            for values in zip(*(_by_decile(runs, run) for run in _of(runs, name)), strict=True)
        ]
        for name in SHOWN
    }

    def draw(axes: Axes) -> None:
        places = range(10)
        for number, (name, spreads) in enumerate(found.items()):
            errors = [spread.deviation or 0 for spread in spreads]
            means = [spread.mean for spread in spreads]
            axes.errorbar(
                places, means, errors, color=PALETTE[number], marker=MARKERS[number], label=name, capsize=3
            )
        zero_line(axes)
        decile_axis(axes, "nats less than the Llama")

    said = "; ".join(f"{name} {line[0].mean:.3f} to {line[-1].mean:.3f}" for name, line in found.items())
    alt = f"From the rarest decile to the commonest: {said}."
    return Panel("Beside the Llama that goes on", draw, alt=alt)


def _of(runs: Iterable[Run], name: str) -> list[Run]:
    return [run for run in runs if run.name == name]


def _llama(runs: Iterable[Run], run: Run) -> Run:
    """Return the Llama that trains on with the same seed and rate."""
    return next(
        other for other in runs if other.is_llama and (other.seed, other.rate) == (run.seed, run.rate)
    )


def _gains(runs: Sequence[Run], name: str) -> list[float]:
    return [_llama(runs, run).after["loss"] - run.after["loss"] for run in _of(runs, name)]


def _moved(runs: Sequence[Run], name: str) -> Spread:
    """Return how much a way takes off the loss."""
    return Spread.of([run.before["loss"] - run.after["loss"] for run in _of(runs, name)])


def _by_decile(runs: Sequence[Run], run: Run) -> list[float]:
    pairs = zip(_llama(runs, run).after["loss_by_decile"], run.after["loss_by_decile"], strict=True)
    return [theirs - ours for theirs, ours in pairs]


def _row(runs: Sequence[Run], name: str) -> list[str]:
    of_way = _of(runs, name)
    losses = [run.after["loss"] for run in of_way]
    moved = [run.before["loss"] - run.after["loss"] for run in of_way]
    gains = _gains(runs, name) if not of_way[0].is_llama else None
    return [
        name,
        str(len(of_way)),
        *map(str, map(Spread.of, (losses, moved))),
        str(Spread.of(gains)) if gains else "",
    ]
