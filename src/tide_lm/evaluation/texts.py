"""Evaluate an opened model on texts, and the checkpoints of a run one after the other."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tide_lm.data import shards, sources
from tide_lm.evaluation.perplexity import Windows, perplexity
from tide_lm.model.opened import LacksError, OpenedModel, open_model
from tide_lm.run import checkpoint
from tide_lm.run.directory import RunDirectory, are_one, owning_run
from tide_lm.run.provenance import provenance


class TextSettingsError(ValueError):
    """Texts that are not there, or windows that a model cannot read: found before anything is read."""


class NoHeldOutError(TextSettingsError, LacksError):
    """A model's own held-out text is not there, and no other text was given."""


@dataclass(frozen=True)
class TextSettings:
    """Texts by name, and how they are read.

    What is not given comes from the run of a model: its held-out text, and its training sequence as `window`.
    """

    texts: Mapping[str, Path] = field(default_factory=dict)
    text_field: str = "text"
    window: int | None = None
    stride: int | None = None
    batch: int = 8

    def __post_init__(self) -> None:
        for name, least in (("window", 2), ("stride", 1), ("batch", 1)):
            value = getattr(self, name)
            if not ((type(value) is int and value >= least) or (value is None and name != "batch")):
                raise TextSettingsError(f"{name} is {value!r}: give a whole number of at least {least}")

    def resolve(self, opened: OpenedModel) -> tuple[dict[str, Path], Windows]:
        """Return the texts, which must be there, and the windows that a model reads them in."""
        try:
            return self._texts(opened), self._windows(opened)
        except TextSettingsError:
            raise
        except ValueError as error:
            raise TextSettingsError(str(error)) from error

    def _texts(self, opened: OpenedModel) -> dict[str, Path]:
        for path in self.texts.values():
            if not (path / shards.MANIFEST).exists():
                sources.parts(str(path), self.text_field)
        if self.texts:
            return dict(self.texts)
        if opened.data is None or not opened.data.exists():
            where = f" at {opened.data.absolute()}" if opened.data else " known"
            raise NoHeldOutError(f"the training data of {opened.name} are not{where}: give --text")
        return {"held-out": opened.data}

    def _windows(self, opened: OpenedModel) -> Windows:
        longest = getattr(opened.config.get_text_config(), "max_position_embeddings", None)
        size = self.window or opened.sequence or min(longest or 2048, 2048)
        if longest is not None and size > longest:
            raise ValueError(f"the window is {size:,}, and {opened.name} reads at most {longest:,}: lower it")
        return Windows(size, self.stride or max(size // 2, 1), self.batch, self.text_field)


def evaluate_texts(
    opened: OpenedModel,
    settings: TextSettings | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Return perplexity, and loss by decile where frequencies are known, of each text by its name."""
    texts, windows = (settings or TextSettings()).resolve(opened)
    found = {}
    for name, path in texts.items():
        log_text = _naming(name, log)
        found[name] = perplexity(opened.model, opened.tokenizer, path, windows, opened.frequencies, log_text)
    return found


def _naming(what: str, log: Callable[[str], None]) -> Callable[[str], None]:
    return lambda line: log(f"{what}, {line}")


def write_texts(opened: OpenedModel, found: Mapping[str, Any]) -> Path:
    """Write what was found to results/perplexity.json, beside what it has of the same model's other texts."""
    try:
        before = json.loads(opened.result("perplexity").read_text(encoding="utf-8"))
        subject = before["subject"]
        same = are_one(subject["model"], opened.path) and subject.get("tokens") == opened.tokens
        earlier = before["texts"] if same else {}
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or it is damaged
        earlier = {}
    made = {name: {**text, "provenance": provenance()} for name, text in found.items()}
    return opened.write("perplexity", {"texts": earlier | made})


def evaluate_checkpoints(
    run: str,
    settings: TextSettings | None = None,
    counts: Path | None = None,
    device: str | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Return the perplexity of each text at each checkpoint of a run.

    Damaged checkpoints are left out; `left_out` says by step what is wrong with them.
    """
    owner, _ = owning_run(run)
    if owner is None or not (steps := checkpoint.steps(RunDirectory(owner).checkpoints)):
        raise ValueError(f"{run} has no checkpoints: give the directory of a run")
    points, found, left_out = [], {}, {}
    for step in steps:
        log_step = _naming(f"step {step:,}", log)
        log_step("opening it")
        try:
            opened = open_model(str(owner), step=step, counts=counts, device=device)
        except checkpoint.DamagedCheckpointError as error:
            left_out[str(step)] = str(error)
            continue
        found = evaluate_texts(opened, settings, log_step)
        perplexities = {name: text["perplexity"] for name, text in found.items()}
        points.append({"step": step, "tokens": opened.tokens, "perplexity": perplexities})
    if not points:
        first = next(iter(left_out.values()))
        raise ValueError(f"every checkpoint of {run} is damaged, so put one back; of the first: {first}")
    kept = ("source", "sha256", "tokens", "bytes", "window", "stride")
    return {
        "points": points,
        "left_out": left_out,
        "texts": {name: {key: text[key] for key in kept} for name, text in found.items()},
    }
