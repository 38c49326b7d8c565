"""What a model costs, and the paper's arithmetic: exact integers and closed forms, without torch.

GB is 10^9 bytes, as in the paper. Quantised sizes count the codes alone, as the paper does; scales and
padding come with the codec and are counted where it is applied.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from tide_lm.spec.config import ModelConfig, table_shape

PRECISIONS = (16, 8, 4)  # bits a parameter


@dataclass(frozen=True)
class Parameters:
    """Parameter counts. `backbone` is the Llama alone, a tied head counted once."""

    backbone: int
    routers: int
    value_gates: int
    gains: int
    tables: int

    @property
    def resident(self) -> int:
        """The parameters that are in VRAM when the tables are not."""
        return self.backbone + self.routers + self.value_gates + self.gains

    @property
    def total(self) -> int:
        return self.resident + self.tables


def count_parameters(model: ModelConfig) -> Parameters:
    D, L, K = model.hidden_size, model.num_hidden_layers, model.num_memory_blocks
    queries = model.num_attention_heads * model.head_dim
    keys_values = 2 * model.num_key_value_heads * model.head_dim
    attention = D * (queries + keys_values) + queries * D
    layer = attention + 3 * D * model.intermediate_size + 2 * D
    embeddings = model.vocab_size * D * (1 if model.tie_word_embeddings else 2)
    return Parameters(
        backbone=embeddings + L * layer + D,
        routers=L * (K + 1) * D if K else 0,
        value_gates=L * (D // model.head_dim) * D if K and model.memory_values else 0,
        gains=K * D,
        tables=math.prod(table_shape(model)),
    )


def resident_bytes(model: ModelConfig, bits: int) -> int:
    """Return the bytes of all weights but the tables."""
    return -(-count_parameters(model).resident * bits // 8)


def table_bytes(model: ModelConfig, bits: int) -> int:
    """Return the bytes of all tables: rows x blocks x hidden x bits (appendix on compression)."""
    return -(-count_parameters(model).tables * bits // 8)


def row_bytes(model: ModelConfig, bits: int) -> int:
    """Return the bytes of rows per token, for all layers together."""
    return -(-model.num_memory_blocks * model.hidden_size * bits // 8)


def cache_bytes(model: ModelConfig, bits: int = 16) -> int:
    """Return the bytes that one token adds to the KV cache."""
    return 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * bits // 8


def train_flops(model: ModelConfig, sequence: int) -> int:
    """Return the FLOPs of training per token, both passes: 6 N + 6 L d T, plus the mix of the memory.

    N counts what is multiplied: backbone, routers and gates, but not an embedding that is only looked up.
    """
    L, D = model.num_hidden_layers, model.hidden_size
    parameters = count_parameters(model)
    looked_up = 0 if model.tie_word_embeddings else model.vocab_size * D
    multiplied = parameters.backbone + parameters.routers + parameters.value_gates - looked_up
    mixed = model.num_memory_blocks + (1 if parameters.value_gates else 0)
    return 6 * multiplied + 6 * L * D * sequence + 6 * L * D * mixed


def adam_bytes(model: ModelConfig, gpus: int = 1) -> tuple[int, int]:
    """Return bytes of (weights, gradients and moments of what is resident, weights and moments of tables).

    All are in float32, and each of several GPUs holds its share. A table's gradient has only the rows of a
    batch: a dense one needs 4 bytes more per parameter. `optim.table_moments=bfloat16` needs 4 bytes less.
    """
    parameters = count_parameters(model)
    return -(-16 * parameters.resident // gpus), -(-12 * parameters.tables // gpus)


def expected_updates(frequency: float, tokens: float, batch: int, sequence: int) -> tuple[float, float]:
    """Return (steps in which a token gets gradient, its occurrences) in a run of so many tokens (eq. 2.2).

    The paper's approximation is the second. For common tokens it exceeds the number of steps, which
    bounds the first.
    """
    steps = tokens / (batch * sequence)
    return steps * _chance_in_batch(frequency, batch * sequence), tokens * frequency


def gradient_ratio_bound(rare: float, common: float, batch: int, sequence: int, spread: float = 1.0) -> float:
    """Bound a rare token's gradient signal over a common one's; spread = G^2 / G_min^2 (eq. 2.3)."""
    return rare * batch * sequence * spread / _chance_in_batch(common, batch * sequence)


def _chance_in_batch(frequency: float, draws: int) -> float:
    """Return `1 - (1 - f)^draws`, exact for the smallest f."""
    if not 0 < frequency <= 1:
        raise ValueError(f"the frequency of a token is {frequency}: it must lie in (0, 1]")
    return 1.0 if frequency == 1 else -math.expm1(draws * math.log1p(-frequency))


def rank_bound(vocab_size: int, dim: int) -> int:
    """Return the largest rank whose two factors are no larger than the table (appendix on compression)."""
    return vocab_size * dim // (vocab_size + dim)


def summary(model: ModelConfig, sequence: int, gpus: int = 1) -> dict[str, Any]:
    """Return what a model costs: parameters, inference by precision, and training with Adam."""
    parameters = count_parameters(model)
    resident_adam, table_adam = adam_bytes(model, gpus)
    return {
        "memory_blocks": model.num_memory_blocks,
        "memory_values": model.memory_values,
        "memory_pair_rows": model.memory_pair_rows,
        "parameters": {**asdict(parameters), "resident": parameters.resident, "total": parameters.total},
        "inference": [
            {
                "bits": bits,
                "vram_bytes": resident_bytes(model, bits),
                "table_bytes": table_bytes(model, bits),
                "table_bytes_per_token": row_bytes(model, bits),
            }
            for bits in PRECISIONS
        ],
        "cache_bytes_per_token": cache_bytes(model),
        "training": {
            "sequence": sequence,
            "flops_per_token": train_flops(model, sequence),
            "gpus": gpus,
            "adam_bytes": {"resident": resident_adam, "tables": table_adam},
        },
    }
