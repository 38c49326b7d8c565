"""The settings of a run: one TOML file, typed, frozen and strict."""

import dataclasses
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tide_lm.run import strict
from tide_lm.run.strict import AtLeastOne
from tide_lm.spec import presets, recipes
from tide_lm.spec.config import REMOVED, ModelConfig, check_removed
from tide_lm.spec.recipes import RECIPES, Recipe


@dataclass(frozen=True)
class ModelSection:
    """A preset and changes to it, or a folder to start from, which decides all else.

    0 for `vocab_size` or `intermediate_size` means the preset's.
    """

    preset: str = "tide-4e-tiny"
    start: str = ""
    vocab_size: int = 0
    intermediate_size: int = 0
    memory_gain_init: float = 1.0
    memory_values: bool = False
    memory_value_scale: float = 1.0
    memory_pairs: bool = False
    tie_word_embeddings: bool = True

    @classmethod
    def of_preset(cls, name: str, recipe: Recipe) -> "ModelSection":
        """Return a preset as the recipe has it."""
        return cls(preset=name, **RECIPES[strict.check("recipe", recipe, Recipe)]["model"])

    @classmethod
    def of_folder(cls, folder: str) -> "ModelSection":
        shape = ModelConfig.from_folder(Path(folder))
        values = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        return cls(
            preset="",
            start=folder,
            memory_gain_init=float(values.get("memory_gain_init", 1)),
            memory_values=shape.memory_values,
            memory_value_scale=float(values.get("memory_value_scale", 1)),
            memory_pairs=shape.memory_pair_rows > 0,
            tie_word_embeddings=shape.tie_word_embeddings,
        )

    @property
    def name(self) -> str:
        start = Path(self.start)
        return self.preset or (start.absolute().parent if start.name == "export" else start).name

    def shape(self) -> ModelConfig:
        if self.start:
            return ModelConfig.from_folder(Path(self.start))
        model = presets.get(self.preset).model
        vocab_size = self.vocab_size or model.vocab_size
        try:
            return dataclasses.replace(
                model,
                vocab_size=vocab_size,
                intermediate_size=self.intermediate_size or model.intermediate_size,
                memory_values=self.memory_values and model.num_memory_blocks > 0,
                memory_pair_rows=vocab_size if self.memory_pairs and model.num_memory_blocks else 0,
                tie_word_embeddings=self.tie_word_embeddings,
            )
        except ValueError as error:
            raise ValueError(f"with model.preset {self.preset!r}, {error}") from None

    def to_transformers(self) -> dict[str, Any]:
        """Return keyword arguments for `TideConfig`."""
        begin = {"memory_gain_init": self.memory_gain_init, "memory_value_scale": self.memory_value_scale}
        return self.shape().to_transformers() | begin


@dataclass(frozen=True)
class DataSection:
    """Prepared data, the length of a training sequence, and whether to check the checksums of shards."""

    path: str = "data/builtin"
    sequence: AtLeastOne = 2048
    verify: bool = True


@dataclass(frozen=True)
class OptimSection:
    """The paper's optimiser; it does not state eps, the clip norm, and what decays."""

    max_lr: float = 1e-4
    min_lr: float = 1e-5
    warmup_lr: float = 1e-6
    warmup_steps: int = 10_000
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0  # 0: no clipping
    z_loss: float = 1e-6
    table_moments: Literal["float32", "bfloat16"] = "float32"
    table_lr_multiple: float = 1.0
    gain_lr_multiple: float = 1.0
    table_weight_decay: float = 0.1

    @property
    def rates(self) -> tuple[float, ...]:
        return self.max_lr, self.min_lr, self.warmup_lr, self.warmup_steps

    def __post_init__(self) -> None:
        if max(self.beta1, self.beta2) >= 1:
            raise ValueError(
                f"optim.beta1 is {self.beta1} and optim.beta2 is {self.beta2}: they must be below 1"
            )
        if self.min_lr > self.max_lr:
            raise ValueError(
                f"optim.min_lr is {self.min_lr} and optim.max_lr is {self.max_lr}: lower the first, or raise "
                "the second"
            )
        if self.table_moments == "bfloat16" and self.beta2 > 0.99:
            raise ValueError(
                "optim.table_moments is 'bfloat16', in which updates of moments are rounded away if "
                f"optim.beta2 is {self.beta2}: lower beta2 to 0.99, or set table_moments to 'float32'"
            )


@dataclass(frozen=True)
class TrainSection:
    """How long to train, in what batches, and what to keep."""

    steps: AtLeastOne = 12_207_032  # 200B tokens, as in the paper, with the batch of its section 2
    batch: AtLeastOne = 8
    micro_batch: int = 0  # 0: the whole batch
    seed: int = 0
    parts: Literal["all", "memory"] = "all"
    dtype: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    activation_checkpointing: bool = False
    log_every: AtLeastOne = 10
    validate_every: int = 500
    validation_sequences: AtLeastOne = 64
    checkpoint_every: AtLeastOne = 5_000
    keep: AtLeastOne = 2
    keep_every: int = 0
    record_gradients: bool = False
    tensorboard: bool = True
    wandb: bool = False

    def __post_init__(self) -> None:
        if self.seed >= 2**63:
            raise ValueError(f"train.seed is {self.seed}: it must be below 2^63")
        if self.micro_batch and self.batch % self.micro_batch:
            raise ValueError(
                f"train.batch is {self.batch} and train.micro_batch is {self.micro_batch}: the second must "
                "divide the first"
            )
        if self.record_gradients and self.parts != "all":
            raise ValueError(
                f"train.parts is {self.parts!r}, and train.record_gradients needs a trained E: turn it off"
            )
        if self.record_gradients and self.compile:
            raise ValueError(
                "train.record_gradients cannot look into a compiled model: turn train.compile off"
            )

    def micro_batch_size(self, processes: int = 1) -> int:
        """Return how many sequences one process passes through the model at once."""
        return self.micro_batch or self.batch // processes


SHORTEST_SEQUENCE = 32  # that a default may have
MANY_EPOCHS = 20  # passes over the data; more teach a model little but the text by heart

# Besides its model, what a run cannot change after its first step.
_FIXED = {"recipe", "data.sequence", "optim.table_moments"}
_FIXED |= {"train.seed", "train.parts", "train.record_gradients"}
_REMOVED = {"optim.table_update", "train.lora_rank"}  # settings of version 0.1.0
_REMOVED |= {f"model.{name}" for name in REMOVED}


@dataclass(frozen=True)
class RunConfig:
    """Everything that a run depends on. The defaults are the paper's.

    `recipe` names the source of table settings that were not given; a run that does not say has the paper's.
    """

    recipe: Recipe = "paper"
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    optim: OptimSection = field(default_factory=OptimSection)
    train: TrainSection = field(default_factory=TrainSection)

    def __post_init__(self) -> None:
        strict.check_all(self)  # sections that are made in Python
        if self.optim.warmup_steps * 2 > self.train.steps:
            raise ValueError(
                f"optim.warmup_steps is {self.optim.warmup_steps:,} and train.steps is {self.train.steps:,}: "
                f"warm up for at most half of the run, with optim.warmup_steps={self.train.steps // 2}"
            )
        if self.train.parts != "all" and not self.model.start:
            raise ValueError(
                f"train.parts is {self.train.parts!r}, so all other weights would stay random: name a model "
                "to start from with --from"
            )

    @property
    def table_policy(self) -> str:
        """How the tables are trained, in words."""
        model, optim = self.model, self.optim
        parts = [
            f"rows in values times {model.memory_value_scale:g}" if model.memory_values else "",
            "half of the blocks for pairs of tokens" if model.memory_pairs else "",
            f"gains from {model.memory_gain_init:g}",
            f"learning rate x{optim.table_lr_multiple:g}",
            f"decay {optim.table_weight_decay:g}",
            "row-lazy AdamW",
            "" if optim.table_moments == "float32" else f"moments in {optim.table_moments}",
        ]
        return ", ".join(filter(None, parts))

    def check_processes(self, processes: int) -> None:
        """Check that so many processes can share a step."""
        share, rest = divmod(self.train.batch, processes)
        if rest or share % self.train.micro_batch_size(processes):
            raise ValueError(
                f"train.batch is {self.train.batch} and train.micro_batch is {self.train.micro_batch}: for "
                f"{processes} processes the batch must be a multiple of "
                f"{processes * (self.train.micro_batch or 1)}"
            )
        if self.train.record_gradients:
            raise ValueError(
                f"train.record_gradients needs a single process, and torchrun started {processes}: turn it "
                "off, or start `tide-lm train` without torchrun"
            )

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_saved(cls, values: Mapping[str, Any]) -> "RunConfig":
        """Return the settings of a run, which an earlier version may have begun."""
        return strict.build(cls, _without_removed(values))

    @classmethod
    def load(
        cls,
        file: Path | None,
        overrides: Sequence[str | Mapping[str, Any]] = (),
        resumed: Mapping[str, Any] | None = None,
    ) -> "RunConfig":
        """Read a TOML file, and overrides, which win over it: `section.key=value`, or a dict of settings.

        Settings that neither names are those of the run that is `resumed`, or the defaults of a new run,
        with a warm-up and a sequence that fit its steps, its model and its data.
        """
        given = [] if file is None else [_read(file)]
        given += [
            strict.parse_override(each, cls) if isinstance(each, str) else strict.unfolded(each)
            for each in overrides
        ]
        try:
            chosen = strict.merge(cls, *given)
            below = _defaults(chosen) if resumed is None else _resumable(resumed)
            fitted = _fitted(strict.merge(cls, below, chosen)) if resumed is None else {}
            return strict.build(cls, strict.merge(cls, below, fitted, chosen))
        except ValueError as error:
            where = "" if file is None else f" (in {file}{' or --set' if overrides else ''})"
            raise ValueError(f"{error}{where}") from None


class Change(NamedTuple):
    """A setting that differs between two configs."""

    name: str
    old: Any
    new: Any

    @property
    def is_fixed(self) -> bool:
        """Tell whether a run cannot change this after its first step."""
        return self.name.startswith("model.") or self.name in _FIXED

    def __str__(self) -> str:
        return f"{self.name}: {self.old!r} -> {self.new!r}"


def compare(old: RunConfig, new: RunConfig) -> list[Change]:
    """List the settings that differ."""
    before, after = flat(old.to_dict()), flat(new.to_dict())
    return [Change(name, value, after[name]) for name, value in before.items() if value != after[name]]


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return every setting by its full name."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        within = isinstance(value, Mapping)
        found |= {f"{name}.{key}": each for key, each in value.items()} if within else {name: value}
    return found


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        cure = "name a TOML file, or give settings with --set"
        raise ValueError(f"cannot read the run's settings from {file} ({error.strerror}): {cure}") from error
    except ValueError as error:
        raise ValueError(f"cannot read the run's settings from {file}, which is no TOML: {error}") from error


def _defaults(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return a new run's defaults: the recipe's, and over them those of the preset or the start."""
    name = strict.check("recipe", chosen.get("recipe", recipes.DEFAULT), Recipe)
    recipe = {"recipe": name, **RECIPES[name]}
    model = chosen.get("model", {})
    start = strict.check("model.start", model.get("start", ""), str)
    if not start:
        preset = strict.check("model.preset", model.get("preset", ModelSection.preset), str)
        return strict.merge(RunConfig, recipe, presets.get(preset).settings)
    if others := [key for key in model if key != "start"]:
        raise ValueError(f"model.{others[0]} is decided by {start}, the model to start from: leave it out")
    folder = ModelSection.of_folder(start)
    optim = recipes.optim_of(name, folder.memory_gain_init)
    return strict.merge(RunConfig, recipe, {"model": dataclasses.asdict(folder), "optim": optim})


def _fitted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the warm-up and the sequence of a run that names none: not too long for what there is.

    The warm-up is at most a tenth of the steps. The sequence has a position each in the model to start from,
    and the data have a batch of it and one to validate on.
    """
    data, optim, train = (
        strict.check(name, values.get(name, {}), kind)
        for name, kind in (("data", DataSection), ("optim", OptimSection), ("train", TrainSection))
    )
    sequence, tokens = data.sequence, _tokens(Path(data.path))
    if start := values.get("model", {}).get("start"):
        sequence = min(sequence, ModelConfig.from_folder(Path(start)).max_position_embeddings)
    room = min((tokens.get("train", 0) - 1) // train.batch, tokens.get("validation", 0) - 1)
    if SHORTEST_SEQUENCE <= room < sequence:
        sequence = 1 << room.bit_length() - 1
    return {
        "data": {"sequence": sequence},
        "optim": {"warmup_steps": min(optim.warmup_steps, train.steps // 10)},
    }


def _tokens(folder: Path) -> dict[str, int]:
    """Return how many tokens each split of prepared data has; training says what is wrong with other data."""
    try:
        splits = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["splits"]
        return {name: sum(shard["tokens"] for shard in shards) for name, shards in splits.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _resumable(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run to resume; refuse one that only version 0.1.0 can resume."""
    if strict.section("optim", saved.get("optim", {})).get("table_update") == "dense":
        raise ValueError(
            "optim.table_update is 'dense', and tide-lm 0.1.0 was the last version that can resume such a "
            "run: use that version, or begin another run"
        )
    return _without_removed(saved)


def _without_removed(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out settings that version 0.1.0 had; refuse a run that only it can open."""
    if isinstance(train := saved.get("train"), Mapping) and train.get("parts") == "lora":
        raise ValueError(
            "train.parts is 'lora', and tide-lm 0.1.0 was the last version that can open such a run: open it "
            "with that version, or give its export"
        )
    if isinstance(model := saved.get("model"), Mapping):
        check_removed(model)
    return {
        name: {key: value for key, value in given.items() if f"{name}.{key}" not in _REMOVED}
        if isinstance(given, Mapping)
        else given
        for name, given in saved.items()
    }
