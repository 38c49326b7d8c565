"""The settings of a run: one TOML file, typed, frozen and strict."""

import dataclasses
import difflib
import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tide_lm.spec import presets
from tide_lm.spec.config import ModelConfig


@dataclass(frozen=True)
class ModelSection:
    """A preset, and what differs from it; or a folder to start from, which decides on all of it.

    A `vocab_size` or `intermediate_size` of 0 is the preset's.
    """

    preset: str = "tide-4e-tiny"
    start: str = ""
    vocab_size: int = 0
    intermediate_size: int = 0
    memory_gain_init: float = 1.0
    memory_values: bool = False
    memory_value_scale: float = 1.0
    memory_own_block: bool = False
    memory_gate: bool = False
    tie_word_embeddings: bool = True

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
            memory_own_block=shape.memory_own_block,
            memory_gate=shape.memory_gate,
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
        try:
            return dataclasses.replace(
                model,
                vocab_size=self.vocab_size or model.vocab_size,
                intermediate_size=self.intermediate_size or model.intermediate_size,
                memory_values=self.memory_values and model.num_memory_blocks > 0,
                memory_own_block=self.memory_own_block and model.num_memory_blocks > 0,
                memory_gate=self.memory_gate and model.num_memory_blocks > 0,
                tie_word_embeddings=self.tie_word_embeddings,
            )
        except ValueError as error:
            raise ValueError(f"with model.preset {self.preset!r}, {error}") from None


@dataclass(frozen=True)
class DataSection:
    """Prepared data, the length of a training sequence, and whether to check the shards' checksums first."""

    path: str = "data/builtin"
    sequence: int = 2048
    verify: bool = True


@dataclass(frozen=True)
class OptimSection:
    """The paper's recipe. What it leaves open: eps, the clip norm, and what decays."""

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


@dataclass(frozen=True)
class TrainSection:
    """How long, in what pieces, and what is kept.

    So many steps are the paper's 200B tokens, with the batch of its section 2.
    """

    steps: int = 12_207_032
    batch: int = 8
    micro_batch: int = 0  # 0: the whole batch
    seed: int = 0
    parts: Literal["all", "memory"] = "all"
    dtype: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    activation_checkpointing: bool = False
    log_every: int = 10
    validate_every: int = 500
    validation_sequences: int = 64
    checkpoint_every: int = 5_000
    keep: int = 2
    keep_every: int = 0
    record_gradients: bool = False
    tensorboard: bool = True
    wandb: bool = False

    def micro_batch_size(self, ranks: int = 1) -> int:
        return self.micro_batch or self.batch // ranks


Recipe = Literal["paper", "best"]
# How tables begin and learn, and where they go. The best is that of the study: docs/STUDY.md.
RECIPES: dict[Recipe, dict[str, dict[str, float]]] = {
    "paper": {
        "model": {"memory_gain_init": 1.0, "memory_values": False},
        "optim": {"table_lr_multiple": 1.0, "table_weight_decay": 0.1},
    },
    "best": {
        "model": {"memory_gain_init": 0.1, "memory_values": True},
        "optim": {"table_lr_multiple": 5.0, "table_weight_decay": 0.0},
    },
}

GAINS_FROM_ZERO = 10.0  # optim.gain_lr_multiple of an upcycled model: docs/upcycling.md

# What a run that has begun cannot change, besides its model.
_FIXED = (
    "recipe",
    "data.sequence",
    "optim.table_moments",
    "train.seed",
    "train.parts",
    "train.record_gradients",
)
_GONE = ("optim.table_update", "train.lora_rank")  # settings of version 0.1.0
_AT_LEAST_ONE = (
    "data.sequence",
    "train.steps",
    "train.batch",
    "train.log_every",
    "train.validation_sequences",
    "train.checkpoint_every",
    "train.keep",
)


@dataclass(frozen=True)
class RunConfig:
    """Everything a run depends on. The defaults are the paper's; `load` adds the preset's and the recipe's.

    `recipe` says where settings of the tables come from that were not given. Runs that do not say have the
    paper's.
    """

    recipe: Recipe = "paper"
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    optim: OptimSection = field(default_factory=OptimSection)
    train: TrainSection = field(default_factory=TrainSection)

    def __post_init__(self) -> None:
        for name in _AT_LEAST_ONE:
            section, _, key = name.partition(".")
            if (value := getattr(getattr(self, section), key)) < 1:
                raise ValueError(f"{name} is {value}: it must be at least 1")
        if self.optim.warmup_steps * 2 > self.train.steps:
            raise ValueError(
                f"optim.warmup_steps is {self.optim.warmup_steps:,} and train.steps is {self.train.steps:,}: "
                f"warm up for at most half of the run, {self.train.steps // 2:,}"
            )
        if max(self.optim.beta1, self.optim.beta2) >= 1:
            raise ValueError(
                f"optim.beta1 is {self.optim.beta1} and beta2 is {self.optim.beta2}: they must be below 1"
            )
        if self.optim.min_lr > self.optim.max_lr:
            raise ValueError(
                f"optim.min_lr is {self.optim.min_lr} and max_lr is {self.optim.max_lr}: "
                "the schedule falls from the second to the first"
            )
        if self.optim.table_moments == "bfloat16" and self.optim.beta2 > 0.99:
            raise ValueError(
                f"optim.beta2 is {self.optim.beta2} and table_moments is 'bfloat16', which would round what "
                "that takes from a moment away: lower beta2 to 0.99, or set table_moments to 'float32'"
            )
        if self.train.seed >= 2**63:
            raise ValueError(f"train.seed is {self.train.seed}: it must be below 2^63")
        if self.train.batch % self.train.micro_batch_size():
            raise ValueError(
                f"train.batch is {self.train.batch} and train.micro_batch is {self.train.micro_batch}: "
                "the second must divide the first"
            )
        if self.train.parts != "all" and not self.model.start:
            raise ValueError(
                f"train.parts is {self.train.parts!r}, and all else would stay random: start from a model, "
                "with --from"
            )
        if self.train.record_gradients and self.train.parts != "all":
            raise ValueError(
                f"train.parts is {self.train.parts!r}, and train.record_gradients is of E too: turn it off"
            )
        if self.train.record_gradients and self.train.compile:
            raise ValueError(
                "train.record_gradients cannot look into a compiled model: turn train.compile off"
            )

    @property
    def table_policy(self) -> str:
        """How the tables are trained, in words."""
        optim = self.optim
        moments = "" if optim.table_moments == "float32" else f", moments in {optim.table_moments}"
        own = "one block a layer, " if self.model.memory_own_block else ""
        own += "gated, " if self.model.memory_gate else ""
        scale = self.model.memory_value_scale
        values = f"rows in values times {scale:g}, " if self.model.memory_values else ""
        return (
            f"{own}{values}gains from {self.model.memory_gain_init:g}, "
            f"learning rate x{optim.table_lr_multiple:g}, decay {optim.table_weight_decay:g}, "
            f"row-lazy AdamW{moments}"
        )

    def check_processes(self, ranks: int) -> None:
        """Check that so many processes can share a step."""
        share, rest = divmod(self.train.batch, ranks)
        if rest or share % self.train.micro_batch_size(ranks):
            raise ValueError(
                f"train.batch is {self.train.batch} and train.micro_batch is {self.train.micro_batch}, for "
                f"{ranks} processes: the batch must be a multiple of {ranks * (self.train.micro_batch or 1)}"
            )
        if self.train.record_gradients:
            raise ValueError(
                f"train.record_gradients records in one process, and torchrun started {ranks}: turn it off, "
                "or start `tide-lm train` without torchrun"
            )

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RunConfig":
        known = get_type_hints(cls)
        _refuse_unknown(values, known, "section")
        return cls(**{name: _checked(name, given, known[name]) for name, given in values.items()})

    @classmethod
    def from_saved(cls, values: Mapping[str, Any]) -> "RunConfig":
        """Return the settings of a run, which an earlier version may have begun."""
        return cls.from_dict(_without_gone(values))

    @classmethod
    def _below(
        cls, values: dict[str, Any], resumed: Mapping[str, Any] | None
    ) -> Iterable[Mapping[str, Mapping[str, Any]]]:
        """Sections that stand where settings are silent, the weightier first; the recipe is put in."""
        if resumed is not None:
            values.setdefault("recipe", resumed.get("recipe", cls.recipe))
            if _mapping("optim", resumed.get("optim", {})).get("table_update") == "dense":
                raise ValueError(
                    "optim.table_update is 'dense', and tide-lm 0.1.0 was the last version to go on with "
                    "such a run: use that version, or begin another run"
                )
            yield {name: given for name, given in _without_gone(resumed).items() if name != "recipe"}
            return
        model = _mapping("model", values.get("model", {}))
        recipe = RECIPES[_checked("recipe", values.setdefault("recipe", "best"), Recipe)]
        if start := _checked("model.start", model.get("start", ""), str):
            if others := [key for key in model if key != "start"]:
                raise ValueError(
                    f"model.{others[0]} is that of {start}, the model to start from: leave it out"
                )
            section = ModelSection.of_folder(start)
            of_gains = {} if section.memory_gain_init else {"gain_lr_multiple": GAINS_FROM_ZERO}
            yield {"model": dataclasses.asdict(section), "optim": {**recipe["optim"], **of_gains}}
            return
        yield presets.get(_checked("model.preset", model.get("preset", ModelSection.preset), str)).settings
        yield recipe

    @classmethod
    def load(
        cls,
        file: Path | None,
        overrides: Sequence[str] = (),
        resumed: Mapping[str, Any] | None = None,
    ) -> "RunConfig":
        """A TOML file, and `section.key=value` settings that win over it.

        What neither names is as in the run that is `resumed`. In a new one it is as the preset has it, or
        the recipe, which is the best unless another is named.
        """
        values: dict[str, Any] = {}
        if file is not None:
            try:
                values = tomllib.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ValueError(f"cannot read the run's settings from {file}: {error}") from error
        for override in overrides:
            name, equals, text = override.partition("=")
            section, dot, key = name.partition(".")
            if equals and name == "recipe":
                values[name] = _parse(text, str)
                continue
            if not equals or not dot:
                raise ValueError(f"{override!r} is not a setting: write section.key=value, or recipe=NAME")
            kind = get_type_hints(cls).get(section)
            value = _parse(text, get_type_hints(kind).get(key) if isinstance(kind, type) else None)
            values[section] = {**_mapping(section, values.get(section, {})), key: value}
        try:
            for sections in cls._below(values, resumed):
                for section, defaults in sections.items():
                    values[section] = {**defaults, **_mapping(section, values.get(section, {}))}
            return cls.from_dict(values)
        except ValueError as error:
            where = "" if file is None else f" (in {file}{' or --set' if overrides else ''})"
            raise ValueError(f"{error}{where}") from None


def _without_gone(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out settings that version 0.1.0 had, and refuse a run that only it can open."""
    if isinstance(train := values.get("train"), Mapping) and train.get("parts") == "lora":
        raise ValueError(
            "train.parts is 'lora', which tide-lm 0.1.0 was the last version to know: open the run with that "
            "version, or give its export"
        )
    return {
        name: {key: value for key, value in given.items() if f"{name}.{key}" not in _GONE}
        if isinstance(given, Mapping)
        else given
        for name, given in values.items()
    }


def is_fixed(difference: str) -> bool:
    """Tell whether a line of `differences` names a setting that a run keeps from its first step."""
    name = difference.partition(":")[0]
    return name.startswith("model.") or name in _FIXED


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """What changed from one config to another, a line each."""
    before, after = flat(old.to_dict()), flat(new.to_dict())
    return [f"{name}: {value!r} -> {after[name]!r}" for name, value in before.items() if value != after[name]]


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting of a config by its full name."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        within = isinstance(value, Mapping)
        found |= {f"{name}.{key}": each for key, each in value.items()} if within else {name: value}
    return found


def _parse(text: str, wanted: Any) -> Any:
    """A TOML value; anything that is none is a string, and so is what must be one."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return text if wanted is str and not isinstance(value, str) else value


def _section(kind: type, name: str, values: Any) -> Any:
    hints = get_type_hints(kind)
    _refuse_unknown(_mapping(name, values), hints, f"setting of {name}")
    return kind(**{key: _checked(f"{name}.{key}", value, hints[key]) for key, value in values.items()})


def _mapping(section: str, values: Any) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise ValueError(f"{section} is {values!r}: it must be a section of settings")
    return values


def _checked(name: str, value: Any, wanted: Any) -> Any:
    if isinstance(wanted, type) and dataclasses.is_dataclass(wanted):
        return _section(wanted, name, value)
    if get_origin(wanted) is Literal:
        if value not in get_args(wanted):
            raise ValueError(f"{name} is {value!r}: use one of {', '.join(map(repr, get_args(wanted)))}")
        return value
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not wanted:
        raise ValueError(f"{name} is {value!r}: it must be of type {wanted.__name__}")
    if wanted in (int, float) and not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}: it must be finite and not negative")
    return value


def _refuse_unknown(values: Mapping[str, Any], known: Mapping[str, Any], what: str) -> None:
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise ValueError(f"unknown {what} {key!r}: {hint}")
