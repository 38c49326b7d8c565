"""vLLM on the CPU, in this process, and small models whose heads it knows."""

import os

os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GB
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"

import importlib.util
import warnings

import pytest
import torch

from tide_lm.model import TideConfig, TideForCausalLM

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
    warnings.warn(
        "vLLM is not installed, so its tests are left out: `make test-vllm` runs them", stacklevel=1
    )

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_memory_blocks": 3,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="session")
def saved(tokenizer, tmp_path_factory):
    """Makes the folder of a model, with a tokenizer; gains and norms are not 1."""

    def make(**changes):
        torch.manual_seed(0)
        model = TideForCausalLM(TideConfig(**SIZES | {"vocab_size": len(tokenizer)} | changes)).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data.normal_(1, 0.2)
        folder = tmp_path_factory.mktemp("served") / "model"
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make
