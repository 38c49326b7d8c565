"""What a figure is: the results it reads, its panels, and the paper's numbers beside ours."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tide_lm.report.results import DamagedError, MissingError, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Runs = Sequence[Run]


@dataclass(frozen=True)
class Panel:
    """One set of axes. `alt` tells what is on it to those who cannot see it."""

    title: str
    alt: str
    draw: "Callable[[Axes], Any]"
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


@dataclass(frozen=True)
class Figure:
    """A figure or a table of the paper, drawn from the results of runs.

    `needs` maps each result it reads to the keys it must have. `check` raises MissingError for anything else
    that a run lacks. `at_least` is the number of runs it takes.
    """

    name: str
    place: str
    title: str
    says: str
    panels: Callable[[Runs], list[Panel]]
    needs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    check: Callable[[Run], Any] = lambda run: None
    at_least: int = 1
    compare: Callable[[Runs], list[Comparison]] = nothing
    tables: Callable[[Runs], list[Table]] = nothing
    drawn_on_page: bool = True  # not, where its tables say all of it
    of_memory: bool = False  # which a base model cannot have

    def missing(self, run: Run) -> str | None:
        """Why it cannot be drawn of a run, and what to do; None if it can."""
        if self.of_memory and run.blocks == 0:
            return f"{run.path} has no memory, which {self.name} shows: give a TIDE model"
        try:
            for what, keys in self.needs.items():
                run.result(what, *keys)
            with self.naming([run]):
                self.check(run)
        except MissingError as error:
            return str(error)
        return None

    def demand(self, runs: Runs) -> None:
        """Raises unless it can be drawn of all these runs."""
        for run in runs:
            if reason := self.missing(run):
                raise MissingError(reason)
        if reason := self.too_few(runs):
            raise MissingError(reason)
        with self.naming(runs):
            if not self.panels(runs):
                names = ", ".join(str(run.path) for run in runs)
                raise MissingError(
                    f"{names} have nothing in common that {self.name} shows: measure the same texts"
                )

    @contextmanager
    def naming(self, runs: Runs) -> Iterator[None]:
        """Names the results of a figure that are not as the commands write them."""
        try:
            yield
        except (MissingError, DamagedError):
            raise
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, ZeroDivisionError) as error:
            files = " or ".join(f"results/{what}.json" for what in self.needs) or "a result"
            where = ", ".join(str(run.path) for run in runs)
            raise DamagedError(
                f"{files} of {where} is not as tide-lm writes it ({error!r}): make it again, or remove it"
            ) from error

    def too_few(self, runs: Runs) -> str | None:
        if len(runs) >= self.at_least:
            return None
        return f"{self.name} compares runs, and {len(runs)} is given: give at least {self.at_least}"
