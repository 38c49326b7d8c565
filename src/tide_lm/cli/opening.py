"""Open a model for a command: a wrong call is refused before torch is loaded, which takes seconds."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tide_lm.cli.progress import working
from tide_lm.run.directory import check_exists, check_results, place_of_results
from tide_lm.run.files import check_writable

if TYPE_CHECKING:
    from tide_lm.model.opened import OpenedModel


def check_call(model: str, counts: Path | None = None, run: Path | None = None) -> Path:
    """Check that a model and its counts are there and that its results can be written; return their place."""
    check_exists(model)
    if counts is not None and not counts.exists():
        raise ValueError(f"there is no {counts}: give prepared data or a file of counts as --counts")
    place = place_of_results(model, run)
    check_results(place, model)
    check_writable(place / "results")
    return place


def open_to_measure(
    model: str, counts: Path | None = None, run: Path | None = None, **options: Any
) -> "OpenedModel":
    """Open a model whose results will be written."""
    check_call(model, counts, run)
    with working(f"Opening {model}"):
        from tide_lm.model.opened import open_model

        return open_model(model, counts=counts, run=run, **options)
