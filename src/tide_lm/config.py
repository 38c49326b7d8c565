"""The shape of a model, as presets and estimates need it, without torch or transformers."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ModelConfig:
    """A TIDE model's shape, under the names of a Hugging Face config; `num_memory_blocks` 0 is the base."""

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
    bos_token_id: int = 0
    eos_token_id: int = 1

    def to_transformers(self) -> dict[str, Any]:
        """Keyword arguments for `TideConfig` or `LlamaConfig`."""
        values = asdict(self)
        theta = values.pop("rope_theta")
        return {**values, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
