"""A figure: the results it reads, its panels, and the paper's numbers beside ours."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tide_lm.report.formatting import short
from tide_lm.report.results import MissingError, Run, alike

if TYPE_CHECKING:
    from matplotlib.axes import Axes
else:
    Axes = Any  # matplotlib is imported when something is drawn

Runs = Sequence[Run]


class Panel(NamedTuple):
    """One set of axes. `alt` describes it to those who cannot see it; "" leaves that to what is drawn."""

    title: str
    draw: Callable[[Axes], Any]
    height: float = 3.2
    alt: str = ""


class Each(NamedTuple):
    """A panel of one run: `draw` is given the axes and the run, if `shows` finds something to draw.

    `numbers` are said to those who cannot see it, where words cannot be found for what is drawn.
    """

    title: str
    draw: Callable[..., Any]  # axes, run
    height: float = 3.2
    shows: Callable[[Run], Any] = lambda run: True
    numbers: Callable[[Run], str] | None = None


class Comparison(NamedTuple):
    """A number that the paper states, and ours: one for each run, in words."""

    what: str
    paper: str
    place: str
    ours: Sequence[str]


class Table(NamedTuple):
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: bool = True


def beside(
    statements: Collection[tuple[str, str, str]], *ours: Callable[[Run], str]
) -> Callable[[Runs], list[Comparison]]:
    """Put ours beside each statement of the paper, run by run."""

    def compare(runs: Runs) -> list[Comparison]:
        rows = zip(statements, ours, strict=True)
        return [Comparison(*stated, [found(run) for run in runs]) for stated, found in rows]

    return compare


def of_each(*panels: Each) -> Callable[[Runs], list[Panel]]:
    """Draw these panels of each run."""

    def panel(one: Each, run: Run) -> Panel:
        title = f"{one.title}: {short(run.name)}"
        alt = f"{title}; {one.numbers(run)}" if one.numbers else ""
        return Panel(title, partial(one.draw, run=run), one.height, alt)

    return lambda runs: [panel(one, run) for run in runs for one in panels if one.shows(run)]


def of_alike(what: str, title: str, draw: Callable[..., Any]) -> Callable[[Runs], list[Panel]]:
    """Draw a panel for each set of runs whose rows of a result are the same."""
    return lambda runs: [
        Panel(f"{title}: {short(name)}", partial(draw, run=run)) for name, run in alike(runs, what).items()
    ]


@dataclass(frozen=True)
class Figure:
    """One figure or table of the paper, drawn from the results of runs.

    `reads` names the result it reads, whose shape is checked as it is opened. If that is not enough, or too
    much, `lacks` says instead why it cannot be drawn of a run, and what to do.
    """

    name: str
    place: str
    title: str
    says: str
    panels: Callable[[Runs], list[Panel]]
    reads: str
    lacks: Callable[[Run], str | None] | None = None
    at_least: int = 1  # runs
    compare: Callable[[Runs], list[Comparison]] = lambda runs: []
    tables: Callable[[Runs], list[Table]] = lambda runs: []
    of_memory: bool = False  # which a base model cannot have

    def missing(self, run: Run) -> str | None:
        """Say why it cannot be drawn of a run, and what to do; None if it can."""
        if self.of_memory and run.blocks == 0:
            return f"{run.path} has no memory, which {self.name} shows: give a TIDE model"
        try:
            if self.lacks:
                return self.lacks(run)
            run.result(self.reads)
        except MissingError as error:
            return str(error)
        return None

    def demand(self, runs: Runs) -> None:
        """Raise MissingError unless it can be drawn of all these runs."""
        for reason in (*map(self.missing, runs), self.too_few(runs)):
            if reason:
                raise MissingError(reason)
        if not self.panels(runs):
            names = ", ".join(str(run.path) for run in runs)
            raise MissingError(
                f"{names} have nothing in common that {self.name} shows: measure the same texts"
            )

    def too_few(self, runs: Runs) -> str | None:
        if len(runs) >= self.at_least:
            return None
        return f"{self.name} compares runs, and {len(runs)} is given: give at least {self.at_least}"
