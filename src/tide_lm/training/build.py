"""What a run trains: a model made from its settings, on one device or sharded over the process group."""

from collections.abc import Callable
from pathlib import Path

import torch

from tide_lm.data.shards import Manifest
from tide_lm.interop import upcycle
from tide_lm.model import TideConfig, TideForCausalLM
from tide_lm.model.loading import memory_tensors
from tide_lm.run import process_group
from tide_lm.run.settings import ModelSection, OptimSection, RunConfig
from tide_lm.training import parallel
from tide_lm.training.objective import Objective
from tide_lm.training.row_optimizer import RowOptimizer
from tide_lm.training.sharded_memory import ShardedRowOptimizer

MakeModel = Callable[[TideConfig], TideForCausalLM]


def build_objective(
    config: RunConfig, manifest: Manifest, start: Path | None, make_model: MakeModel = TideForCausalLM
) -> Objective:
    """Build the model and its loss, with drawn weights or with those of the folder `start`."""
    device = process_group.device()
    torch.manual_seed(config.train.seed)
    model_config = build_config(config.model, config.data.sequence, manifest)
    if start is not None:
        upcycle.check_weights(start)
    if process_group.is_distributed():
        model = parallel.without_weights(model_config)
    elif start is not None:
        model = TideForCausalLM.from_pretrained(
            start, config=model_config, dtype=torch.float32, use_safetensors=True
        )
    else:
        model = make_model(model_config)
    freeze(model, config.train.parts)
    objective = Objective(model, config.train, config.optim.z_loss).train()
    if process_group.is_distributed():
        parallel.shard(objective, device, start)
    else:
        objective.to(device)
    return objective


def build_config(settings: ModelSection, sequence: int, manifest: Manifest) -> TideConfig:
    """Return the start's config, or the preset's with what settings and the data's tokenizer change."""
    shape = settings.shape()
    if settings.start:
        if sequence > shape.max_position_embeddings:
            raise ValueError(
                f"data.sequence is {sequence}, and {settings.name} has only "
                f"{shape.max_position_embeddings} positions: lower data.sequence"
            )
        values, _ = TideConfig.get_config_dict(settings.start)  # without a warning for a Llama's
        return TideConfig.from_dict(values, num_memory_blocks=shape.num_memory_blocks)
    return TideConfig(
        **settings.to_transformers()
        | {
            "max_position_embeddings": max(shape.max_position_embeddings, sequence),
            "bos_token_id": manifest.bos_token_id,
            "eos_token_id": manifest.eos_token_id,
        }
    )


def freeze(model: TideForCausalLM, parts: str) -> None:
    """Freeze every parameter outside `parts`, the setting train.parts."""
    if parts == "all":
        return
    if model.model.tables is None:
        raise ValueError(f"train.parts is {parts!r}, and the model has no memory: set it to 'all'")
    trained = memory_tensors(model.config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)


def build_row_optimizer(objective: Objective, settings: OptimSection) -> RowOptimizer | None:
    """Build the optimiser of the tables, if the model has any."""
    model = objective.model
    if (memory := model.model.tables) is None:
        return None
    dtype = torch.bfloat16 if objective.in_bfloat16 else memory.weight.dtype
    kind = ShardedRowOptimizer if process_group.is_distributed() else RowOptimizer
    return kind(memory, settings, dtype, waits_for_gains=model.config.memory_gain_init == 0)
