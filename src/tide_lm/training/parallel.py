"""A model sharded over processes: FSDP2 for the transformer, and tables whose rows have an owner each."""

from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tide_lm.model import TideConfig, TideForCausalLM, streamed_tensors
from tide_lm.run import checkpoint, process_group
from tide_lm.training.objective import Objective
from tide_lm.training.sharded_memory import ShardedMemory


def without_weights(config: TideConfig) -> TideForCausalLM:
    """Make a model on the device meta, with a memory for this rank's rows."""
    with torch.device("meta"):
        model = TideForCausalLM(config)
        if config.num_memory_blocks:
            model.model.memory = ShardedMemory(config)
    return model


def shard(objective: Objective, device: torch.device, start: Path | None = None) -> None:
    """Shard the parameters of a model `without_weights` over all ranks; draw them, or read a folder's."""
    mesh = init_device_mesh(device.type, (process_group.world_size(),))
    decoder = objective.model.model
    # A layer's inputs are in its precision already, or have a reason not to be.
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if objective.in_bfloat16 else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # The rest stays in float32, as without FSDP: the gradients of embedding and head are added up in it.
    tables = set() if decoder.tables is None else {decoder.tables.weight}
    fully_shard(objective, mesh=mesh, ignored_params=tables)
    objective.to_empty(device=device)
    objective.model.tie_weights()
    if start is None:
        objective.model.init_weights()
    else:
        _read_weights(objective.model, start, device)


def _read_weights(model: TideForCausalLM, folder: Path, device: torch.device) -> None:
    """Fill each rank's share from a Hugging Face folder."""
    read = {path.name for path in streamed_tensors.weight_files(folder)}
    others = {path.name for path in folder.glob("*.safetensors")} - read
    if others:  # they would be read too
        raise ValueError(f"{folder / min(others)} is no part of the model beside it: move it elsewhere")
    decoder, memory = model.model, model.model.memory
    decoder.rotary_emb = type(decoder.rotary_emb)(model.config).to(device)  # its buffer is in no file
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if isinstance(memory, ShardedMemory):
        tensors["model.memory.weight"] = memory.dtensor_like(memory.weight)
    checkpoint.load(folder, tensors)
    if isinstance(memory, ShardedMemory):
        memory.from_dtensor(memory.weight, tensors["model.memory.weight"])


def unshard(objective: Objective) -> None:
    """Gather parameters for calls of the model that do not go through the objective."""
    if isinstance(objective, FSDPModule):
        objective.unshard()


def reshard(objective: Objective) -> None:
    """Shard parameters again after a forward pass that has no backward pass to do it."""
    if isinstance(objective, FSDPModule):
        objective.reshard()
