"""What a run directory holds, as figures and pages read it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tide_lm import estimate
from tide_lm.run_config import RunConfig
from tide_lm.runs import RunDirectory

# How each result is made.
MAKERS = {
    "validation": "tide-lm train --run {run}",
    "perplexity": "tide-lm evaluate {run} --text FILE",
    "checkpoints": "tide-lm evaluate {run} --text FILE --all-checkpoints",
    "benchmarks": "tide-lm evaluate {run} --benchmarks DIR",
    "norms": "tide-lm analyze norms {run}",
    "updates": "tide-lm analyze updates {run}",
    "gradients": "tide-lm analyze gradients {run}",
    "collapse": "tide-lm analyze collapse {run}",
    "routing": "tide-lm analyze routing {run} --text FILE",
    "layer-drop": "tide-lm analyze layer-drop {run} --text FILE",
    "distances": "tide-lm analyze distances {run}",
    "neighbours": "tide-lm analyze neighbours {run} --token WORD",
    "footprint": "tide-lm analyze footprint {run}",
}


class MissingError(ValueError):
    """A run lacks what a figure reads; the message names the command that makes it."""


@dataclass(frozen=True)
class Run:
    """One run, under a name no other has, at its place among those compared."""

    path: Path
    name: str
    place: int

    @cached_property
    def results(self) -> dict[str, dict[str, Any]]:
        """All results by name."""
        return {path.stem: _read(path) for path in sorted((self.path / "results").glob("*.json"))}

    def result(self, what: str, *keys: str) -> dict[str, Any]:
        """One result, which must have these keys."""
        found = self.results.get(what)
        if found is None:
            raise MissingError(f"{self.path} has no results/{what}.json: run `{self.maker(what)}`")
        for key in keys:
            if key not in found:
                raise MissingError(
                    f"results/{what}.json of {self.path} has no {key!r}: run `{self.maker(what)}`"
                )
        return found

    def maker(self, what: str) -> str:
        return MAKERS[what].format(run=self.path)

    @cached_property
    def config(self) -> RunConfig | None:
        """The run's settings; None for a model that was not trained here."""
        directory = RunDirectory(self.path)
        values = directory.read_config()
        try:
            return None if values is None else RunConfig.from_dict(values)
        except ValueError as error:
            raise ValueError(
                f"{directory.config} holds no settings of a run ({error}): give a run directory; the results "
                "of a model from elsewhere are in runs/NAME"
            ) from error

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """What the trainer logged, in order; a half-written last line is left out."""
        path = RunDirectory(self.path).metrics
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        try:
            records = [json.loads(line) for line in lines]
        except ValueError as error:
            raise ValueError(f"{path} holds a line that is not JSON ({error}): remove it") from error
        return [record for record in records if isinstance(record, dict)]

    @property
    def blocks(self) -> int | None:
        """K, where it is known."""
        if self.config is not None:
            return self.config.model.shape().num_memory_blocks
        return self.results.get("footprint", {}).get("blocks")

    @property
    def parameters(self) -> estimate.Parameters | None:
        return None if self.config is None else estimate.count_parameters(self.config.model.shape())

    @property
    def tokens(self) -> int | None:
        """The tokens it was trained on."""
        return self.metrics[-1].get("tokens") if self.metrics else None

    @property
    def losses(self) -> dict[str, dict[str, Any]]:
        """Every result with a loss by decile: the trainer's held-out text, then texts by name."""
        found = {"validation": self.results.get("validation", {})}
        found |= self.texts
        return {name: result for name, result in found.items() if "loss_by_decile" in result}

    @property
    def texts(self) -> dict[str, dict[str, Any]]:
        """Perplexity and losses by text."""
        return self.results.get("perplexity", {}).get("texts", {})


def open_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs, named by their folders, or by their paths where two folders have one name."""
    for path in paths:
        if not path.is_dir():
            raise ValueError(f"there is no run {path}: give the folder of a run")
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError(f"a run is given twice in {', '.join(map(str, paths))}: give each once")
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return [Run(path, name, place) for place, (path, name) in enumerate(zip(paths, names, strict=True))]


def same_text(results: Sequence[Mapping[str, Any]]) -> bool:
    """Whether losses compare: measured on as many bytes, in the same windows."""
    return len({tuple(result.get(key) for key in ("bytes", "window", "stride")) for result in results}) == 1


def alike(runs: Sequence[Run], what: str, key: str) -> dict[str, Run]:
    """One run of each set whose results have the same under a key, by the names of all of them."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps(run.result(what)[key]), []).append(run)
    return {", ".join(run.name for run in group): group[0] for group in groups.values()}


def shared(parts: Iterable[Mapping[str, Any]]) -> list[str]:
    """The keys that all have, in the order of the first."""
    first, *others = parts
    return [key for key in first if all(key in other for other in others)]


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}): make it again, or remove it") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no result but {type(found).__name__}: make it again, or remove it")
    return found
