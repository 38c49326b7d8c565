"""TIDE as a model of transformers: section 3 of the paper, loading, stores and extensions."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from tide_lm.model.config import TideConfig
from tide_lm.model.memory import Memory
from tide_lm.model.tide import EmbeddingMemory, MemoryRouter, TideDecoderLayer, TideForCausalLM, TideModel

__all__ = [
    "EmbeddingMemory",
    "Memory",
    "MemoryRouter",
    "TideConfig",
    "TideDecoderLayer",
    "TideForCausalLM",
    "TideModel",
]

AutoConfig.register("tide", TideConfig, exist_ok=True)
AutoModel.register(TideConfig, TideModel, exist_ok=True)
AutoModelForCausalLM.register(TideConfig, TideForCausalLM, exist_ok=True)
