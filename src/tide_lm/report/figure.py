"""A figure: the results it reads, its panels, and the paper's numbers beside ours."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tide_lm.report.results import MissingError, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
else:
    Axes = Any  # matplotlib is imported when something is drawn

Runs = Sequence[Run]


@dataclass(frozen=True)
class Panel:
    """One set of axes. `alt` describes it to those who cannot see it."""

    title: str
    alt: str
    draw: Callable[[Axes], Any]
    height: float = 3.2


@dataclass(frozen=True)
class Comparison:
    """A number that the paper states, and ours: one for each run, in words."""

    what: str
    paper: str
    place: str
    ours: Sequence[str]


@dataclass(frozen=True)
class Table:
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: bool = True


def nothing(runs: Runs) -> list[Any]:
    return []


def beside(
    statements: Collection[tuple[str, str, str]], *ours: Callable[[Run], str]
) -> Callable[[Runs], list[Comparison]]:
    """Put ours beside each statement of the paper, run by run."""

    def compare(runs: Runs) -> list[Comparison]:
        rows = zip(statements, ours, strict=True)
        return [Comparison(*stated, [found(run) for run in runs]) for stated, found in rows]

    return compare


def of_each(panel: Callable[[Run], Panel]) -> Callable[[Runs], list[Panel]]:
    """Draw one panel for each run."""
    return lambda runs: [panel(run) for run in runs]


@dataclass(frozen=True)
class Figure:
    """One figure or table of the paper, drawn from the results of runs.

    `needs` names the results it reads. `check` raises MissingError for anything else that a run lacks.
    """

    name: str
    place: str
    title: str
    says: str
    panels: Callable[[Runs], list[Panel]]
    needs: tuple[str, ...] = ()
    check: Callable[[Run], Any] = lambda run: None
    at_least: int = 1  # runs
    compare: Callable[[Runs], list[Comparison]] = nothing
    tables: Callable[[Runs], list[Table]] = nothing
    of_memory: bool = False  # which a base model cannot have

    def missing(self, run: Run) -> str | None:
        """Say why it cannot be drawn of a run, and what to do; None if it can."""
        if self.of_memory and run.blocks == 0:
            return f"{run.path} has no memory, which {self.name} shows: give a TIDE model"
        try:
            for what in self.needs:
                run.result(what)
            self.check(run)
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
