"""Model cards of finished runs, with all that was measured since."""

from pathlib import Path

from tide_lm.report.results import MissingError, Run, open_runs
from tide_lm.run.directory import RunDirectory
from tide_lm.run.files import write_atomically
from tide_lm.run.model_card import model_card

RESULTS = ("validation", "perplexity", "benchmarks")


def write_cards(paths: list[Path]) -> list[Path]:
    """Rewrite the README of every run that has an export, and return them."""
    exported = [run for run in open_runs(paths) if RunDirectory(run.path).export.is_dir()]
    if not exported:
        raise ValueError(f"no export in {', '.join(map(str, paths))}: finish a run, which exports its model")
    cards = {RunDirectory(run.path).export / "README.md": _card(run) for run in exported}
    for path, card in cards.items():
        write_atomically(path, card)
    return list(cards)


def _card(run: Run) -> str:
    run.refuse_damage(*RESULTS, "metrics")
    step = run.result("validation").get("step")
    # The run may have gone on since it was exported.
    tokens = [line["tokens"] for line in run.metrics if step is not None and line["step"] <= step]
    if run.config is None or not tokens or "validation" not in run.losses:
        raise MissingError(f"{run.path} has an export and no settings, metrics or losses: put them back")
    results = {name: run.results[name] for name in RESULTS if name in run.results}
    return model_card(run.path.resolve().name, run.config, tokens[-1], results)
