"""docs/upcycling.md and its figure, from the records in results/upcycling."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from studies.markdown import table
from studies.results import Spread
from studies.upcycling import Way
from tide_lm import runs as files
from tide_lm.report.drawing import DECILES, INK, MARKERS, PALETTE, legend, write_panels
from tide_lm.report.figure import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = ("TIDE", "TIDE, Llama frozen")  # by decile, beside the Llama


@dataclass(frozen=True)
class Run:
    """A Llama that went on: with the validation before and after."""

    way: Way
    seed: int
    before: dict[str, Any]
    after: dict[str, Any]
    tokens: int


def read(folder: Path) -> list[Run]:
    """What `python -m studies upcycle` wrote there, in all of its files."""
    found = []
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        starts = {first["seed"]: first["validation"] for first in record["first"]}
        for run in record["runs"]:
            way, seed = Way(**run["about"]), run["seed"]
            found.append(Run(way, seed, starts[seed], run["validation"], record["tokens"]))
    return found


def write(runs: Sequence[Run], docs: Path) -> Path:
    """Returns the page."""
    write_panels([by_decile(runs)], "upcycling", docs, ["svg"])
    files.write_atomically(docs / "upcycling.md", page(runs))
    return docs / "upcycling.md"


def page(runs: Sequence[Run]) -> str:
    return "\n\n".join(_paragraphs(runs)) + "\n"


def _paragraphs(runs: Sequence[Run]) -> Iterable[str]:
    tide, frozen = (Spread.of(_gains(runs, name)) for name in SHOWN)
    training = Spread.of([run.before["loss"] - run.after["loss"] for run in _of(runs, "Llama")])
    moved = Spread.of([run.before["loss"] - run.after["loss"] for run in _of(runs, SHOWN[1])])
    yield "# A Llama goes on as a TIDE model"
    yield (
        f"A small Llama is trained on {runs[0].tokens:,} tokens, half a pass over the [study](STUDY.md)'s "
        "text, and then goes on for as many tokens again, half a pass in another order: as it is, and "
        "upcycled with 8 blocks (`tide-lm upcycle`, `tide-lm train --from`). `python -m studies upcycle` "
        "trains them, and `python -m studies report` makes this page from "
        "[results/upcycling](../results/upcycling). So young a Llama still learns fast; nothing here says "
        "what memory brings to one that has seen 10^12 tokens."
    )
    yield (
        f"**Upcycled, the same further tokens take {tide} nats more off the loss**; going on as a Llama "
        f"takes {training} off. With the Llama frozen, tables, gains and routers take {moved} off, "
        f"{100 * moved.mean / training.mean:.0f} % of what training all of the Llama does, and end "
        f"{-frozen.mean:.3f} above it. Means and standard deviations are over 3 seeds, each with a Llama of "
        "its own."
    )
    yield "## All ways"
    yield table(
        ["goes on as", "seeds", "loss", "less than before", "less than the Llama that goes on"],
        [_row(runs, name) for name in dict.fromkeys(run.way.name for run in runs)],
    )
    first = _gains(runs, SHOWN[0])[0]
    yield (
        "In nats; the rate is 0.3 of the Llama's first, or the first again, and differences are between runs "
        f"of one seed and one rate; with the seed of single runs TIDE gains {first:.3f}. Gains have 10 times "
        "the rate, the default of an upcycled model, unless the name says otherwise; at the rate of the rest "
        "they leave 0 too slowly. How tables begin hardly matters. With a frozen Llama, and with low-rank "
        "changes of it, a higher rate is better."
    )
    yield "## By frequency"
    panel = by_decile(runs)
    yield f"![{panel.alt}](upcycling.svg)"
    names = ["Llama", *SHOWN]
    starts = [run.before for run in _of(runs, "Llama")]
    columns = [starts, *([run.after for run in _of(runs, name)] for name in names)]
    yield table(
        [DECILES, "before", *names],
        [
            [
                str(decile),
                *(f"{Spread.of([v['loss_by_decile'][decile] for v in kind])}" for kind in columns),
            ]
            for decile in range(10)
        ],
    )


def by_decile(runs: Sequence[Run]) -> Panel:
    """A line for each way, beside the Llama that goes on."""
    found = {
        name: [
            Spread.of(values)
            for values in zip(*(_by_decile(runs, run) for run in _of(runs, name)), strict=True)
        ]
        for name in SHOWN
    }

    def draw(axes: "Axes") -> None:
        places = range(10)
        for number, (name, spreads) in enumerate(found.items()):
            errors = [spread.deviation or 0 for spread in spreads]
            means = [spread.mean for spread in spreads]
            axes.errorbar(
                places, means, errors, color=PALETTE[number], marker=MARKERS[number], label=name, capsize=3
            )
        axes.axhline(0, color=INK, linewidth=0.8)
        axes.set_xticks(places)
        axes.set_xlabel(DECILES)
        axes.set_ylabel("nats less than the Llama")
        legend(axes)

    said = "; ".join(f"{name} {line[0].mean:.3f} to {line[-1].mean:.3f}" for name, line in found.items())
    return Panel(
        "Beside the Llama that goes on",
        f"From the rarest decile to the commonest: {said}.",
        draw,
    )


def _of(runs: Iterable[Run], name: str) -> list[Run]:
    return [run for run in runs if run.way.name == name]


def _llama(runs: Iterable[Run], run: Run) -> Run:
    """The one that goes on with the same seed and rate."""
    return next(
        other
        for other in runs
        if other.way.tables is None and (other.seed, other.way.rate) == (run.seed, run.way.rate)
    )


def _gains(runs: Sequence[Run], name: str) -> list[float]:
    return [_llama(runs, run).after["loss"] - run.after["loss"] for run in _of(runs, name)]


def _by_decile(runs: Sequence[Run], run: Run) -> list[float]:
    pairs = zip(_llama(runs, run).after["loss_by_decile"], run.after["loss_by_decile"], strict=True)
    return [theirs - ours for theirs, ours in pairs]


def _row(runs: Sequence[Run], name: str) -> list[str]:
    of_way = _of(runs, name)
    losses = [run.after["loss"] for run in of_way]
    moved = [run.before["loss"] - run.after["loss"] for run in of_way]
    gains = _gains(runs, name) if of_way[0].way.tables else None
    return [
        name,
        str(len(of_way)),
        *map(str, map(Spread.of, (losses, moved))),
        str(Spread.of(gains)) if gains else "",
    ]
