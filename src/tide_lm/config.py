"""The shape of a model, as presets and estimates need it, without torch or transformers."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


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
    max_position_embeddings: int = 2048
    rope_theta: float = 500_000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 1

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "num_memory_blocks",
            "max_position_embeddings",
        ):
            value, least = getattr(self, name), 0 if name == "num_memory_blocks" else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}: it must be a whole number of at least {least}")

    def to_transformers(self) -> dict[str, Any]:
        """Keyword arguments for `TideConfig` or `LlamaConfig`."""
        values = asdict(self)
        theta = values.pop("rope_theta")
        return {**values, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}

    @classmethod
    def from_folder(cls, path: Path) -> "ModelConfig":
        """The shape of a Llama or TIDE model from its folder or its config.json, weights not needed."""
        file = path / "config.json" if path.is_dir() else path
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read a model config from {file}: {error}") from error
        kind = values.get("model_type") if isinstance(values, dict) else None
        if kind not in ("llama", "tide"):
            raise ValueError(f"{file} describes a model of type {kind!r}: only llama and tide are known")
        try:
            heads, rope = values["num_attention_heads"], values.get("rope_parameters") or values
            return cls(
                vocab_size=values["vocab_size"],
                hidden_size=values["hidden_size"],
                intermediate_size=values["intermediate_size"],
                num_hidden_layers=values["num_hidden_layers"],
                num_attention_heads=heads,
                num_key_value_heads=values.get("num_key_value_heads") or heads,
                head_dim=values.get("head_dim") or values["hidden_size"] // heads,
                num_memory_blocks=values["num_memory_blocks"] if kind == "tide" else 0,
                max_position_embeddings=values.get("max_position_embeddings", 2048),
                rope_theta=rope.get("rope_theta", 10_000.0),
                rms_norm_eps=values.get("rms_norm_eps", 1e-6),
                tie_word_embeddings=values.get("tie_word_embeddings", False),
                bos_token_id=values.get("bos_token_id", 1),
                eos_token_id=values.get("eos_token_id", 2),
            )
        except KeyError as error:
            raise ValueError(f"{file} has no {error}, which a {kind} config must have") from error
        except (AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ValueError(f"{file}: {error}") from error
