"""The shape of a model, as presets and estimates need it, without torch or transformers."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

_LARGEST = 2**31 - 1
REMOVED = ("memory_own_block", "memory_gate")  # extensions of version 0.1.0


class Place(StrEnum):
    """Where the rows of a packed model are: on its device, in the host's memory, or in their file."""

    device = "device"
    cpu = "cpu"
    store = "store"


@dataclass(frozen=True)
class Residence:
    """A place, and of a store how many bytes of rows stay in memory."""

    place: Place | str = Place.device
    cache_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if self.place not in list(Place):
            raise ValueError(f"memory is {self.place!r}: it must be one of {', '.join(Place)}")
        if type(self.cache_bytes) is not int or self.cache_bytes < 0:
            raise ValueError(f"memory_cache_bytes is {self.cache_bytes!r}: it must be 0 or more, and whole")

    @classmethod
    def parse(cls, text: str) -> "Residence":
        """Parse a command's `device`, `cpu`, `store`, or `store:256` with so many MiB."""
        if not (found := re.fullmatch(rf"({'|'.join(Place)})|store:(\d{{1,9}})", text)):
            raise ValueError(f"{text!r} is none of {', '.join(Place)} and store:MIB, as in store:256")
        return cls(Place.store, int(found[2]) << 20) if found[2] else cls(Place(text))


def table_shape(config: Any) -> tuple[int, int, int]:
    """Return how many rows the tables have, blocks a row, and numbers a block."""
    pairs = config.memory_pair_rows
    blocks = config.num_memory_blocks // (2 if pairs else 1)
    return config.vocab_size + pairs, blocks, config.hidden_size


def check_memory(config: Any) -> None:
    """Check that the rows of a `ModelConfig` or `TideConfig` fit its layers."""
    blocks = config.num_memory_blocks
    if blocks % 2 and config.memory_pair_rows:
        raise ValueError(
            f"num_memory_blocks is {blocks}, and half of them are to be for pairs of tokens: use an even "
            "number, or no rows for pairs"
        )
    values = config.num_key_value_heads * config.head_dim
    if config.num_memory_blocks and config.memory_values and (values < 1 or config.hidden_size % values):
        raise ValueError(
            f"hidden_size is {config.hidden_size}, which the values of all heads, {values}, do not divide: "
            "set memory_values to false"
        )


def check_removed(values: Mapping[str, Any]) -> None:
    """Refuse a model that has an extension of version 0.1.0."""
    for name in REMOVED:
        if values.get(name):
            raise ValueError(
                f"{name} is {values[name]!r}, and tide-lm 0.1.0 was the last version with that extension: "
                "use that version, or train a model anew without it"
            )


@dataclass(frozen=True)
class ModelConfig:
    """A model's shape under the names of a Hugging Face config; `num_memory_blocks` 0 is the base."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_memory_blocks: int = 0
    memory_values: bool = False
    memory_pair_rows: int = 0
    max_position_embeddings: int = 2048
    rope_theta: float = 500_000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            least = 0 if name in ("num_memory_blocks", "memory_pair_rows") else 1
            if field.type is int and not (type(value) is int and least <= value <= _LARGEST):
                raise ValueError(
                    f"{name} is {value!r:.40}: it must be a whole number from {least} to {_LARGEST:,}"
                )
            if field.type is bool and type(value) is not bool:
                raise ValueError(f"{name} is {value!r}: it must be true or false")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads is {self.num_key_value_heads}: "
                f"it must divide num_attention_heads, which is {self.num_attention_heads}"
            )
        check_memory(self)

    def to_transformers(self) -> dict[str, Any]:
        """Return keyword arguments for `TideConfig` or `LlamaConfig`."""
        values = asdict(self)
        theta = values.pop("rope_theta")
        return {**values, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}

    @classmethod
    def from_folder(cls, path: Path) -> "ModelConfig":
        """Read the shape of a Llama or TIDE model from its folder or config.json, without weights."""
        file = path / "config.json" if path.is_dir() else path
        cure = "give a Llama or TIDE model"
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"cannot read a model config from {file} ({error.strerror}): {cure}") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"cannot read a model config from {file}, which is no JSON: {cure}") from error
        kind = values.get("model_type") if isinstance(values, dict) else None
        if kind is None:
            raise ValueError(f"{file} has no model_type, as each model's config.json has: {cure}")
        if kind not in ("llama", "tide"):
            raise ValueError(f"{file} describes a model of type {kind!r}: use one of type llama or tide")
        try:
            return cls.from_values(values)
        except KeyError as error:
            raise ValueError(f"{file} has no {error}, which a {kind} config must have") from error
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> "ModelConfig":
        """Return the shape that the values of a Llama or TIDE config.json describe."""
        hidden, heads = values["hidden_size"], values["num_attention_heads"]
        if not values.get("head_dim"):
            whole = isinstance(hidden, int) and isinstance(heads, int) and heads > 0
            if not whole or hidden % heads:
                raise ValueError(f"num_attention_heads is {heads!r}: it must divide hidden_size, {hidden!r}")
        if values.get("attention_bias") or values.get("mlp_bias"):
            raise ValueError(
                "it has biases (attention_bias, mlp_bias), which are not supported: use a model without them"
            )
        if values.get("memory_dim") not in (None, hidden):
            raise ValueError(f"memory_dim is {values['memory_dim']!r}: it must equal hidden_size, {hidden!r}")
        check_removed(values)
        rope, tide = values.get("rope_parameters"), values["model_type"] == "tide"
        return cls(
            vocab_size=values["vocab_size"],
            hidden_size=hidden,
            intermediate_size=values["intermediate_size"],
            num_hidden_layers=values["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=values.get("num_key_value_heads") or heads,
            head_dim=values.get("head_dim") or hidden // heads,
            num_memory_blocks=values["num_memory_blocks"] if tide else 0,
            memory_values=values.get("memory_values", False) if tide else False,
            memory_pair_rows=values.get("memory_pair_rows", 0) if tide else 0,
            max_position_embeddings=values.get("max_position_embeddings", 2048),
            rope_theta=(rope if isinstance(rope, dict) else values).get("rope_theta", 10_000.0),
            rms_norm_eps=values.get("rms_norm_eps", 1e-6),
            tie_word_embeddings=values.get("tie_word_embeddings", False),
            bos_token_id=values.get("bos_token_id", 1),
            eos_token_id=values.get("eos_token_id", 2),
        )
