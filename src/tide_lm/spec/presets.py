"""The models of the paper, and small ones for a CPU and a study. Each value is marked stated or assumed."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tide_lm.spec.config import ModelConfig
from tide_lm.spec.names import suggestion

PAPER_BLOCKS = (2, 4, 8, 16, 24)


@dataclass(frozen=True)
class Preset:
    """A named model. The paper states the fields in `stated`; the others are our assumption.

    `settings`, by section, are defaults of a run that suit it better than the paper's.
    """

    name: str
    model: ModelConfig
    stated: frozenset[str] = frozenset()
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def _short_run(sequence: int, max_lr: float, warmup_steps: int) -> dict[str, dict[str, Any]]:
    """Return settings for a run of minutes: higher rates and a short warm-up."""
    rates = {"max_lr": max_lr, "min_lr": max_lr / 10, "warmup_lr": max_lr / 100}
    return {
        "data": {"sequence": sequence},
        "optim": {**rates, "warmup_steps": warmup_steps},
        "train": {"steps": 10 * warmup_steps, "checkpoint_every": 500},
    }


def _paper(hidden: int, layers: int, heads: int, ffn: int, head_dim: int = 64) -> ModelConfig:
    return ModelConfig(
        vocab_size=128_256,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=head_dim,
        bos_token_id=128_000,
        eos_token_id=128_001,
    )


def _tiny(vocab: int, hidden: int, layers: int, ffn: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        max_position_embeddings=512,
    )


_SIZES = {
    "tiny": _tiny(vocab=4_096, hidden=128, layers=4, ffn=384),
    "6m": _tiny(vocab=32_768, hidden=256, layers=8, ffn=704),
    "small": _tiny(vocab=32_768, hidden=512, layers=8, ffn=1_408),
    "medium": _tiny(vocab=32_768, hidden=768, layers=12, ffn=2_048),
    "350m": _paper(hidden=1_024, layers=24, heads=16, ffn=1_920),
    "750m": _paper(hidden=1_536, layers=24, heads=24, ffn=3_648),
    "1b": _paper(hidden=2_048, layers=24, heads=32, ffn=3_520),
    "3b": _paper(hidden=3_072, layers=28, heads=24, ffn=8_192, head_dim=128),
}
_SETTINGS = {
    "tiny": _short_run(sequence=128, max_lr=3e-3, warmup_steps=100),
    "6m": _short_run(sequence=512, max_lr=4e-3, warmup_steps=350),
    "small": _short_run(sequence=512, max_lr=1e-3, warmup_steps=500),
    "medium": _short_run(sequence=512, max_lr=6e-4, warmup_steps=500),
}
# What the paper states, by size: fields, and numbers of blocks.
_STATED_FIELDS = {
    "350m": {"vocab_size", "max_position_embeddings"},
    "750m": {"vocab_size", "max_position_embeddings"},
    "1b": {"vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers"},
    "3b": {"vocab_size", "max_position_embeddings"},
}
_STATED_BLOCKS = {"750m": (0, 8), "1b": (0, *PAPER_BLOCKS), "3b": (0, 8)}
_NAME = re.compile(r"(?:base|tide-(?P<blocks>[1-9]\d*)e)-(?P<size>\w+)")


def get(name: str) -> Preset:
    """Return the preset `base-SIZE` or `tide-Ke-SIZE`, for any K."""
    match = _NAME.fullmatch(name)
    if match is None or match["size"] not in _SIZES:
        if (size := name.removeprefix("tide-0e-")) in _SIZES:
            raise ValueError(f"{name!r} has no tables, so it is the base model: write 'base-{size}'")
        forms = f"use base-SIZE or tide-Ke-SIZE, with SIZE one of {', '.join(_SIZES)}"
        raise ValueError(f"unknown preset {name!r}: {suggestion(name, names(), forms)}")
    size = match["size"]
    blocks = int(match["blocks"] or 0)
    stated = set(_STATED_FIELDS.get(size, ()))
    if blocks in _STATED_BLOCKS.get(size, ()):
        stated.add("num_memory_blocks")
    model = replace(_SIZES[size], num_memory_blocks=blocks)
    return Preset(name, model, frozenset(stated), _SETTINGS.get(size, {}))


def names() -> list[str]:
    """Return all named presets: every size, with K = 0 and the paper's K."""
    return [
        f"tide-{blocks}e-{size}" if blocks else f"base-{size}"
        for size in _SIZES
        for blocks in (0, *PAPER_BLOCKS)
    ]
