"""The study's runs, the most important first, so that a study that ends early has them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tide_lm.data.shards import TokenSplit
from tide_lm.run.settings import RunConfig
from tide_lm.spec.presets import PAPER_BLOCKS
from tide_lm.spec.recipes import RECIPES

GAIN, RATE, DECAY = "model.memory_gain_init", "optim.table_lr_multiple", "optim.table_weight_decay"
VALUES, SCALE, PAIRS = "model.memory_values", "model.memory_value_scale", "model.memory_pairs"


@dataclass(frozen=True)
class Size:
    """The settings that a size of model is trained with; without a preset it is its name.

    With a tokenizer of its own it has text of its own, beside the other: `data/optimum-llama3`, say.
    """

    sequence: int
    batch: int
    rate: float
    preset: str = ""
    tokenizer: str = ""


SIZES = {
    "tiny": Size(64, 8, 3e-3),
    "6m": Size(512, 64, 4e-3),
    "6m-llama3": Size(512, 64, 4e-3, preset="6m", tokenizer="llama3"),
    "small": Size(512, 32, 1e-3),
    "medium": Size(512, 32, 6e-4),
}


def preset_of(size: str, k: int) -> str:
    """Return the name of the preset of a size with K tables, or of its base."""
    name = SIZES[size].preset or size
    return f"tide-{k}e-{name}" if k else f"base-{name}"


CENTRE = {GAIN: 0.1, RATE: 5.0, DECAY: 0.0}  # from where the search goes one step in each direction
OWN_BLOCK, GATED = "layer-router-and-values", "layer-tables-and-values"
NARROW = "narrow-" + GATED
VALUES_BY_RECIPE = (OWN_BLOCK, GATED, NARROW)  # other controls have rows in values anyway, or never
HALF = "half the tokens, "  # before the recipe of a run with a schedule of its own for them


@dataclass(frozen=True)
class Run:
    """`recipe` is the paper's, the best, or the name of the settings that are tried.

    `share` is the part of the training text that it is trained on. `diagnose` asks for all of the paper's
    diagnostics, of a base or of TIDE.
    """

    model: str
    recipe: str
    size: str
    k: int
    seed: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    share: float = 1.0
    diagnose: bool = False

    @property
    def name(self) -> str:
        return f"{self.size} {self.model} {self.k}e, {self.recipe}, seed {self.seed}"

    @property
    def slug(self) -> str:
        """Return its name in paths and records."""
        return re.sub(r"[^a-z0-9.]+", "-", self.name)

    @property
    def row_lazy(self) -> bool:
        """Tell whether row-lazy AdamW trains the tables; otherwise the optimiser moves them as a whole."""
        return self.model in ("base", "tide", "gated")

    def config(self, data: Path, gpu: bool) -> RunConfig:
        """Return the settings of one pass over the training text, or over the run's share of it."""
        size = SIZES[self.size]
        steps = int(self.share * ((len(TokenSplit(data, "train")) - 1) // (size.sequence * size.batch)))
        values: dict[str, Any] = {
            "recipe": self.recipe if self.recipe in RECIPES else "paper",
            "model.preset": preset_of(self.size, self.k),
            "data.path": f'"{data}"',
            "data.sequence": size.sequence,
            "optim.max_lr": size.rate,
            "optim.min_lr": size.rate / 10,
            "optim.warmup_lr": size.rate / 100,
            "optim.warmup_steps": steps // 10,
            "train.steps": steps,
            "train.batch": size.batch,
            "train.seed": self.seed,
            "train.log_every": 50,
            "train.validate_every": -(-steps // 8),
            "train.validation_sequences": 1024,
            "train.checkpoint_every": steps,
            "train.keep_every": -(-steps // 5) if self.diagnose else 0,
            "train.tensorboard": _toml(False),
            "train.dtype": "bfloat16" if gpu else "float32",
            "train.compile": _toml(
                gpu and not self.diagnose
            ),  # gradients cannot be recorded in a compiled model
            "train.record_gradients": _toml(self.diagnose),
            **self._of_model(),
            **self.settings,
        }
        return RunConfig.load(None, [f"{name}={value}" for name, value in values.items()])

    def _of_model(self) -> Mapping[str, Any]:
        by_recipe = self.row_lazy or self.model in VALUES_BY_RECIPE
        return {} if by_recipe else {VALUES: _toml(False)}


def _toml(value: bool) -> str:
    return str(value).lower()


def _values(scale: float) -> Mapping[str, Any]:
    return {VALUES: _toml(True), SCALE: scale}


def _tried(
    recipe: str,
    settings: Mapping[str, Any] | None = None,
    model: str = "tide",
    seed: int = 0,
) -> Run:
    settings = {**CENTRE, **(settings or {})}
    return Run(model, recipe, "small", 8, seed, settings=settings)


def search() -> list[Run]:
    """Return the search for the best recipe: one thing is changed at a time, with one seed.

    Some records are of recipes that changed a layer, with code that is gone. docs/LOG.md says what each did.
    """
    return [
        Run("base", "paper", "small", 0, diagnose=True),
        Run("tide", "paper", "small", 8, diagnose=True),
        Run("input-only", "paper", "small", 8),
        _tried("centre"),
        _tried("gain 0.1 alone", {RATE: 1.0, DECAY: 0.1}),
        _tried("gain 0.1 alone", {RATE: 1.0, DECAY: 0.1}, model="input-only"),
        _tried("gain 0.3", {GAIN: 0.3}),
        _tried("gain 0.03", {GAIN: 0.03}),
        _tried("rate x1", {RATE: 1.0}),
        _tried("rate x2", {RATE: 2.0}),
        _tried("rate x10", {RATE: 10.0}),
        _tried("decay 0.1", {DECAY: 0.1}),
        _tried("gain 0.3", {GAIN: 0.3}, model="input-only"),
        _tried("gain 0.03", {GAIN: 0.03}, model="input-only"),
        _tried("gain 0.3", {GAIN: 0.3}, model="value-tables"),
        _tried("gain 0.3", {GAIN: 0.3}, model="input-and-values"),
        _tried("gain 1", {GAIN: 1.0}, model="input-and-values"),
        _tried("rate x1, decay 0.1", {RATE: 1.0, DECAY: 0.1}, model="wide-input"),
        *(_tried("values x5", _values(5), model=model) for model in ("tide", *VALUES_BY_RECIPE)),
        *(_tried("values x5", _values(5), model=model, seed=n) for n in (1, 2) for model in ("tide", NARROW)),
        _tried("values x10", _values(10)),
    ]


def final() -> list[Run]:
    """Return the runs that the verdicts rest on."""
    best = [Run("tide", "best", "small", 8, diagnose=True), Run("input-only", "best", "small", 8)]
    seeds = [
        Run(model, recipe, "small", k, seed)
        for seed in (1, 2)
        for model, recipe, k in (
            ("base", "paper", 0),
            ("tide", "paper", 8),
            ("tide", "best", 8),
            ("input-only", "best", 8),
            ("input-only", "paper", 8),
            ("input-and-values", "best", 8),
            *((model, "best", 8) for model in VALUES_BY_RECIPE),
        )
    ]
    controls = [
        Run(model, "best", "small", 8)
        for model in (
            "wide-input",
            "layer-tables",
            "layer-router",
            "value-tables",
            "input-and-values",
            *VALUES_BY_RECIPE,
        )
    ]
    others = [k for k in PAPER_BLOCKS if k != 8]
    blocks = [Run("tide", recipe, "small", k) for recipe in ("best", "paper") for k in others]
    fewer = [Run(OWN_BLOCK, "best", "small", k) for k in (2, 4)]  # than layers, which share them
    larger = [
        Run(model, recipe, "medium", k)
        for model, recipe, k in (
            ("base", "paper", 0),
            ("tide", "best", 8),
            ("tide", "paper", 8),
            ("input-only", "best", 8),
            (OWN_BLOCK, "best", 8),
        )
    ]
    best_recipe = {**CENTRE, VALUES: _toml(True)}
    halves = [
        Run("tide", HALF + recipe, "small", k, settings=settings, share=0.5)
        for recipe, settings, k in (("paper", {}, 4), ("paper", {}, 8), ("best", best_recipe, 8))
    ]
    return [*best, *seeds, *controls, *blocks, *fewer, *halves, *larger]


def plan() -> list[Run]:
    return [*search(), *final()]
