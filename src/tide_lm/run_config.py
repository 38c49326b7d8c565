"""The settings of a run: one TOML file, typed, frozen and strict."""

import dataclasses
import difflib
import tomllib
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class ModelSection:
    """A preset, and what differs from it."""

    preset: str = "tide-4e-tiny"
    memory_gain_init: float = 1.0
    tie_word_embeddings: bool = True


@dataclass(frozen=True)
class DataSection:
    """Prepared data, and the length of a training sequence."""

    path: str = "data/builtin"
    sequence: int = 2048


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
    clip_norm: float = 1.0
    z_loss: float = 1e-6
    table_lr_multiple: float = 1.0
    table_weight_decay: float = 0.1


@dataclass(frozen=True)
class TrainSection:
    """How long, in what pieces, and what is kept."""

    steps: int = 1_000
    batch: int = 8
    micro_batch: int = 8
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    activation_checkpointing: bool = False
    log_every: int = 10
    validate_every: int = 500
    validation_sequences: int = 64
    checkpoint_every: int = 500
    keep: int = 2
    keep_every: int = 0
    record_gradients: bool = False
    tensorboard: bool = True
    wandb: bool = False


@dataclass(frozen=True)
class RunConfig:
    """Everything a run depends on."""

    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    optim: OptimSection = field(default_factory=OptimSection)
    train: TrainSection = field(default_factory=TrainSection)

    def __post_init__(self) -> None:
        if self.optim.warmup_steps * 10 > self.train.steps:
            raise ValueError(
                f"optim.warmup_steps is {self.optim.warmup_steps:,} and train.steps is {self.train.steps:,}: "
                "warm up for at most a tenth of the run"
            )
        if self.train.batch % self.train.micro_batch:
            raise ValueError(
                f"train.batch is {self.train.batch} and train.micro_batch is {self.train.micro_batch}: "
                "the second must divide the first"
            )

        if self.train.record_gradients and self.train.compile:
            raise ValueError(
                "train.record_gradients cannot look into a compiled model: turn train.compile off"
            )

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RunConfig":
        sections = get_type_hints(cls)
        _refuse_unknown(values, sections, "section")
        return cls(**{name: _section(sections[name], name, given) for name, given in values.items()})

    @classmethod
    def load(cls, file: Path | None, overrides: Iterable[str] = ()) -> "RunConfig":
        """A TOML file, and `section.key=value` settings that win over it."""
        values: dict[str, Any] = {}
        if file is not None:
            try:
                values = tomllib.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ValueError(f"cannot read the run's settings from {file}: {error}") from error
        for override in overrides:
            name, equals, text = override.partition("=")
            section, dot, key = name.partition(".")
            if not equals or not dot:
                raise ValueError(f"{override!r} is not a setting: write section.key=value")
            values.setdefault(section, {})[key] = _parse(text)
        return cls.from_dict(values)


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """What changed from one config to another, a line each."""
    before, after = old.to_dict(), new.to_dict()
    return [
        f"{section}.{key}: {value!r} -> {after[section][key]!r}"
        for section, values in before.items()
        for key, value in values.items()
        if value != after[section][key]
    ]


def _parse(text: str) -> Any:
    """A TOML value; anything that is none is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _section(kind: type, name: str, values: Any) -> Any:
    if not isinstance(values, Mapping):
        raise ValueError(f"{name} is {values!r}: it must be a section of settings")
    hints = get_type_hints(kind)
    _refuse_unknown(values, hints, f"setting of {name}")
    return kind(**{key: _checked(f"{name}.{key}", value, hints[key]) for key, value in values.items()})


def _checked(name: str, value: Any, wanted: Any) -> Any:
    if get_origin(wanted) is Literal:
        if value not in get_args(wanted):
            raise ValueError(f"{name} is {value!r}: use one of {', '.join(map(repr, get_args(wanted)))}")
        return value
    assert not isinstance(wanted, types.UnionType)
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not wanted:
        raise ValueError(f"{name} is {value!r}: it must be of type {wanted.__name__}")
    if wanted in (int, float) and value < 0:
        raise ValueError(f"{name} is {value!r}: it must not be negative")
    return value


def _refuse_unknown(values: Mapping[str, Any], known: Mapping[str, Any], what: str) -> None:
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise ValueError(f"unknown {what} {key!r}: {hint}")
