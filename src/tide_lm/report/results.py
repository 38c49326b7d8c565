"""Run directories as figures and pages read them."""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tide_lm.report.schema import METRICS, SCHEMAS, check, check_result
from tide_lm.run.directory import RunDirectory, are_one
from tide_lm.run.settings import RunConfig
from tide_lm.spec import estimate

MAKERS = {  # the commands that make results; others are analyses that need no more
    "demo": "tide-lm demo --run {folder}",
    "words": "tide-lm demo",
    "validation": "tide-lm train --resume --run {model}",
    "metrics": "tide-lm train --resume --run {model}",
    "perplexity": "tide-lm evaluate {model} --text FILE",
    "checkpoints": "tide-lm evaluate {model} --text FILE --all-checkpoints",
    "benchmarks": "tide-lm evaluate {model} --benchmarks DIR",
    "compression": "tide-lm compress {model} --text FILE",
    "routing": "tide-lm analyze routing {model} --text FILE",
    "layer-drop": "tide-lm analyze layer-drop {model} --text FILE",
    "neighbours": "tide-lm analyze neighbours {model} --token WORD",
}
OF_TRAINING = ("validation", "metrics", "checkpoints", "gradients")
BY_FREQUENCY = ("norms", "updates", "routing", "neighbours")
BY_DECILE = {"loss_by_decile", "tokens_by_decile", "rare", "mid", "common", "unbinned"}


Key = TypeVar("Key")


class MissingError(ValueError):
    """A run lacks what a figure reads, or has it damaged; the message says what to do."""


@dataclass(frozen=True, eq=False)
class Run:
    """One run, under a name no other has, at its place among those compared.

    `results` are the sound ones by name; `damaged` says what cannot be read of results and metrics, and
    `stale` which results are of an earlier checkpoint. `metrics` is what the trainer logged, in order. A
    model that was not trained here has no `config`.
    """

    path: Path
    name: str
    place: int
    results: dict[str, dict[str, Any]]
    metrics: list[dict[str, Any]]
    config: RunConfig | None
    damaged: dict[str, str] = field(default_factory=dict)
    stale: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def left_out(self) -> list[str]:
        """Return why each file that is damaged or stale is left out, and what to do."""
        return [*self.damaged.values(), *self.stale.values()]

    def refuse_damage(self, *names: str) -> None:
        for name in names:
            if name in self.damaged:
                raise MissingError(self.damaged[name])

    def result(self, what: str) -> dict[str, Any]:
        """Return one result; raise MissingError if it cannot be read."""
        self.refuse_damage(what)
        if what in self.stale:
            raise MissingError(self.stale[what])
        if what not in self.results:
            raise MissingError(f"{self.path} has no results/{what}.json: {self.cure(what)}")
        return self.results[what]

    def cure(self, what: str) -> str:
        """Say how to get a result."""
        if what in OF_TRAINING and self.config is None:
            return "only a run of `tide-lm train` can have it"
        if what == "gradients" and self.config and not self.config.train.record_gradients:
            return "the run did not record it; one with train.record_gradients=true does"
        return f"run `{self.maker(what)}`"

    def maker(self, what: str, by_frequency: bool = False) -> str:
        """Return the command that makes a result; a model from elsewhere is named beside this folder.

        For results `by_frequency`, the counts of data are named as well, which a run of ours has.
        """
        model = folder = shlex.quote(str(self.path))
        if self.config is None:
            counts = " --counts DATA" if by_frequency or what in BY_FREQUENCY else ""
            model = f"{shlex.quote(self.subject or 'MODEL')} --run {folder}{counts}"
        return MAKERS.get(what, f"tide-lm analyze {what} {{model}}").format(model=model, folder=folder)

    @property
    def subject(self) -> str | None:
        """Return the model that was measured, where a result names it."""
        subjects = (result.get("subject", {}).get("model") for result in self.results.values())
        return next(filter(None, subjects), None)

    @property
    def blocks(self) -> int | None:
        """Return K, where it is known."""
        if self.config is not None:
            return self.config.model.shape().num_memory_blocks
        return self.results.get("footprint", {}).get("blocks")

    @property
    def parameters(self) -> estimate.Parameters | None:
        return None if self.config is None else estimate.count_parameters(self.config.model.shape())

    @property
    def tokens(self) -> int | None:
        """Return how many tokens it was trained on."""
        return self.metrics[-1].get("tokens") if self.metrics else None

    @property
    def losses(self) -> dict[str, dict[str, Any]]:
        """Return every result with a loss by decile: the trainer's held-out text, then texts by name."""
        found = {"validation": self.results.get("validation", {})}
        found |= self.texts
        return {name: result for name, result in found.items() if result.keys() >= BY_DECILE}

    @property
    def texts(self) -> dict[str, dict[str, Any]]:
        """Return perplexity and losses by text."""
        return self.results.get("perplexity", {}).get("texts", {})


def open_runs(paths: Sequence[Path]) -> list[Run]:
    """Open runs; they are named by their folders, or by their paths where two folders have one name."""
    for path in paths:
        if not path.is_dir():
            raise ValueError(f"there is no run {path}: give the folder of a run")
        begun = RunDirectory(path).metrics.exists() or RunDirectory(path).config.exists()
        if not begun and not any((path / "results").glob("*.json")):
            raise ValueError(
                f"{path} holds no results, neither results/*.json nor metrics.jsonl: give the folder of a "
                "run, or measure it first"
            )
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError(f"a run is given twice in {', '.join(map(str, paths))}: give each once")
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return [open_run(path, name, place) for place, (path, name) in enumerate(zip(paths, names, strict=True))]


def open_run(path: Path, name: str, place: int = 0) -> Run:
    """Read all that figures and pages show of a run directory."""
    run = Run(path, name, place, {}, [], _read_config(path))
    broken: dict[Path, Exception] = {}
    for file in sorted((path / "results").glob("*.json")):
        try:
            found = json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse)
            check_result(file.stem, found)
            subject = found.get("subject", {}).get("model")
            if run.config is not None and subject and not are_one(subject, str(path)):
                raise ValueError(f"it is of another run, {subject}")
            run.results[file.stem] = found
        except (OSError, ValueError) as error:
            broken[file] = error
    for file, what in broken.items():
        again = (
            f", or make it again with `{run.maker(file.stem)}`"
            if file.stem in SCHEMAS.keys() | MAKERS.keys()
            else ""
        )
        run.damaged[file.stem] = f"{file} is damaged ({what}): remove it{again}"
    try:
        run.metrics.extend(_read_metrics(RunDirectory(path).metrics))
    except ValueError as error:
        run.damaged["metrics"] = str(error)
    _leave_out_stale(run)
    return run


def _leave_out_stale(run: Run) -> None:
    """Leave out the results of a run that were measured before its newest checkpoint."""
    reached = _tokens_reached(run)
    for what, result in list(run.results.items()):
        subject = result.get("subject", {})
        tokens = subject.get("tokens")
        if tokens is None or subject.get("step") is not None or tokens >= reached:
            continue
        del run.results[what]
        maker = run.maker(what).removesuffix(" --text FILE")  # the run's own text will do
        run.stale[what] = (
            f"{run.path}/results/{what}.json was measured at {tokens:,} of {reached:,} tokens: run `{maker}` "
            "again"
        )


def _tokens_reached(run: Run) -> int:
    """Return the tokens of the last record, or of the newest checkpoint of a run that has not ended.

    After its newest checkpoint, such a run has no weights that can be measured.
    """
    folder = RunDirectory(run.path)
    steps = [int(path.name) for path in folder.checkpoints.glob("[0-9]*") if path.name.isdigit()]
    newest = max(steps, default=None) if not folder.export.is_dir() else None
    records = (line for line in run.metrics if newest is None or line["step"] <= newest)
    return max((line["tokens"] for line in records), default=0)


def _refuse(constant: str) -> None:
    raise ValueError(f"it holds {constant}, which is no number")


def same_text(results: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether perplexities compare: of the same tokens, in the same windows."""
    keys = ("sha256", "tokens", "window", "stride")
    return len({tuple(result.get(key) for key in keys) for result in results}) == 1


def alike(runs: Sequence[Run], what: str) -> dict[str, Run]:
    """Return one run of each set whose results have the same rows, by the names of the set."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps(run.result(what)["rows"]), []).append(run)
    return {", ".join(run.name for run in group): group[0] for group in groups.values()}


def shared(parts: Iterable[Mapping[Key, Any]]) -> list[Key]:
    """Return the keys that all have, in the order of the first."""
    first, *others = parts
    return [key for key in first if all(key in other for other in others)]


def _read_config(path: Path) -> RunConfig | None:
    directory = RunDirectory(path)
    values = directory.read_config()
    try:
        if values == {}:
            raise ValueError("it is empty")
        return None if values is None else RunConfig.from_saved(values)
    except ValueError as error:
        raise ValueError(
            f"{directory.config} holds no settings of a run ({error}): give a run directory; the results "
            "of a model from elsewhere are in runs/NAME"
        ) from error


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return all records but a half-written last line."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        records = [json.loads(line) for line in lines]
        check(records, [METRICS], "line", {})
    except ValueError as error:
        raise ValueError(f"{path} has a line that is no record of a step ({error}): remove it") from None
    return records
