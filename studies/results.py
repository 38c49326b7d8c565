"""The study's results: a record of each run, without its weights."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from tide_lm.run.directory import RunDirectory
from tide_lm.run.provenance import provenance
from tide_lm.run.settings import RunConfig
from tide_lm.spec.config import REMOVED
from tide_lm.spec.presets import PAPER_BLOCKS

BLOCKS = (0, *PAPER_BLOCKS)
RUNS = "runs.jsonl"  # of a folder with results: one record per line, and per run

Kind = tuple[str, str]  # model and recipe


class Spread(NamedTuple):
    """The mean over seeds, and their standard deviation if there are several."""

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(mean(values), stdev(values) if len(values) > 1 else None)

    def __format__(self, spec: str) -> str:
        spec = spec or ".3f"
        more = "" if self.deviation is None else f" ± {self.deviation:{spec}}"
        return f"{self.mean:{spec}}{more}"

    def __str__(self) -> str:
        return f"{self}"


@dataclass(frozen=True)
class Kept:
    """A run that is done, without its weights.

    `record` says what was trained, and has its settings under `config`, the lines of its log under `metrics`
    and what was measured under `results`, by name.
    """

    record: dict[str, Any]

    @property
    def name(self) -> str:
        return self.record["name"]

    @property
    def results(self) -> dict[str, dict[str, Any]]:
        return self.record["results"]

    @cached_property
    def config(self) -> RunConfig:
        config = self.record["config"]  # of an earlier version it may name what its model is now
        model = {name: value for name, value in config["model"].items() if name not in REMOVED}
        return RunConfig.from_saved({**config, "model": model})

    @cached_property
    def curve(self) -> list[tuple[int, float]]:
        """Return the validation loss by the tokens trained on."""
        lines = self.record["metrics"]
        return [(line["tokens"], line["validation"]["loss"]) for line in lines if "validation" in line]

    def perplexity(self, text: str, words: bool = False) -> float:
        """Return the perplexity on a text, or on those of its tokens that have a letter or digit."""
        if text not in self.texts:
            raise ValueError(f"{self.name} has no perplexity on {text}: remove its line, and run it again")
        found = self.texts[text]
        if not words:
            return found["perplexity"]
        others, tokens = found["unbinned"], found["tokens"] - found["unbinned"]["tokens"]
        return exp((found["loss"] * found["tokens"] - others["loss"] * others["tokens"]) / tokens)

    @property
    def texts(self) -> dict[str, dict[str, Any]]:
        """Return perplexities by text, where they were measured."""
        return self.results.get("perplexity", {}).get("texts", {})

    @property
    def tasks(self) -> dict[str, dict[str, Any]]:
        """Return scores by task, where they were measured."""
        return self.results.get("benchmarks", {}).get("tasks", {})

    def tokens_to(self, loss: float) -> float | None:
        """Return the tokens after which the curve reaches a loss; None if it never does."""
        before: tuple[int, float] | None = None
        for tokens, reached in self.curve:
            if reached <= loss:
                if before is None:
                    return float(tokens)
                share = (before[1] - loss) / (before[1] - reached)
                return before[0] + share * (tokens - before[0])
            before = tokens, reached
        return None

    def decile(self, number: int) -> float:
        return self.record["loss_by_decile"][number]


def record(folder: Path, about: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return what figures, tables and diagnostics read of a run's folder, and what else is known of it."""

    def measured(part: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in part.items() if key not in ("provenance", "subject")}

    run = RunDirectory(folder)
    files = sorted((folder / "results").glob("*.json"))
    metrics = []
    for line in map(json.loads, run.metrics.read_text(encoding="utf-8").splitlines()):
        metrics.append({key: line[key] for key in ("step", "tokens", "loss") if key in line})
        if "validation" in line:
            metrics[-1]["validation"] = {"loss": line["validation"]["loss"]}
    return {
        "name": folder.name,
        **about,
        "config": run.read_config(),
        "metrics": metrics,
        "results": {file.stem: json.loads(file.read_text(), object_hook=measured) for file in files},
        "provenance": provenance(seed),
    }


def add(folder: Path, record: Mapping[str, Any]) -> None:
    """Add a record to those of a folder, in one write, since several processes may add theirs."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / RUNS).open("ab", buffering=0) as file:
        file.write(f"{json.dumps(record, ensure_ascii=False)}\n".encode())


def read(folder: Path, name: str | None = None) -> list[Kept]:
    """Read the runs that a folder keeps, or the one of a name, in the order of their names."""
    path = folder / RUNS
    if not path.exists():
        return []
    *lines, rest = path.read_text(encoding="utf-8").split("\n")
    if rest:
        raise ValueError(f"the last line of {path} is cut off: remove it, and run it again")
    start = "" if name is None else f'{{"name": {json.dumps(name)},'
    runs = [Kept(json.loads(line)) for line in lines if line.startswith(start)]
    return sorted(runs, key=lambda run: run.name)


class Study:
    """The runs that a folder keeps."""

    def __init__(self, folder: Path) -> None:
        self.runs = read(folder)

    @cached_property
    def whole(self) -> list[Kept]:
        """Return the runs on the whole text."""
        most = max((run.record["tokens"] for run in self.runs), default=0)
        return [run for run in self.runs if run.record["tokens"] == most]

    def of(self, model: str, recipe: str, size: str = "small", k: int | None = None) -> list[Kept]:
        """Return the runs of one kind, by seed."""
        wanted = {"model": model, "recipe": recipe, "size": size} | ({} if k is None else {"k": k})
        found = [run for run in self.runs if all(run.record[key] == value for key, value in wanted.items())]
        return sorted(found, key=lambda run: (run.record["k"], run.record["seed"]))

    def first(self, model: str, recipe: str, size: str = "small", k: int | None = None) -> Kept | None:
        return next(iter(self.of(model, recipe, size, k)), None)

    def of_size(self, size: str) -> list[Kept]:
        """Return all runs of a size, the worst first."""
        found = [run for run in self.runs if run.record["size"] == size]
        return sorted(found, key=lambda run: -run.record["val_loss"])

    def by_blocks(self, recipe: str, model: str = "tide") -> dict[int, Kept]:
        """Return one run for each K that is there, of the first seed."""
        found = {k: self.first(model, recipe, k=k) if k else self.first("base", "paper") for k in BLOCKS}
        return {k: run for k, run in found.items() if run is not None}

    @property
    def diagnosed(self) -> list[Kept]:
        """Return the runs with all diagnostics."""
        kinds = (("base", "paper", 0), ("tide", "paper", 8), ("tide", "best", 8))
        return [run for model, recipe, k in kinds for run in self.of(model, recipe, k=k)[:1]]

    def kinds(self, k: int) -> list[Kind]:
        """Return the kinds of small models that were trained with K blocks on the whole text."""
        records = (run.record for run in self.whole)
        return sorted({(r["model"], r["recipe"]) for r in records if (r["size"], r["k"]) == ("small", k)})

    def gains(self, model: str, recipe: str, size: str = "small", k: int | None = None) -> dict[int, float]:
        """Return, by seed, how much lower the loss is than the base's of that seed."""
        return {
            run.record["seed"]: base.record["val_loss"] - run.record["val_loss"]
            for base, run in self.beside_base(model, recipe, size, k)
        }

    def beside_base(
        self, model: str, recipe: str, size: str = "small", k: int | None = None
    ) -> list[tuple[Kept, Kept]]:
        """Return pairs of the base and a run of the same seed."""
        bases = {run.record["seed"]: run for run in self.of("base", "paper", size)}
        runs = self.of(model, recipe, size, k)
        return [(bases[run.record["seed"]], run) for run in runs if run.record["seed"] in bases]

    @cached_property
    def noise(self) -> float | None:
        """Return how far apart two losses may be by chance, two deviations; None without seeds.

        The deviation of a loss is that of all kinds of which there are several seeds.
        """
        kinds: dict[tuple, list[float]] = {}
        for run in self.runs:
            kind = tuple(run.record[key] for key in ("model", "recipe", "size", "k"))
            kinds.setdefault(kind, []).append(run.record["val_loss"])
        freedom = sum(len(losses) - 1 for losses in kinds.values())
        squares = sum((loss - mean(losses)) ** 2 for losses in kinds.values() for loss in losses)
        return 2 * (2 * squares / freedom) ** 0.5 if freedom else None
