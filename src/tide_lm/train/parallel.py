"""A model spread over the ranks of a run: FSDP2 for the transformer, rows with an owner for the tables."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tide_lm.model import TideConfig, TideForCausalLM, streamed_tensors
from tide_lm.run import checkpoint, process_group
from tide_lm.train.objective import Objective
from tide_lm.train.sharded_memory import ShardedMemory

ROWS_AT_ONCE = 512  # of the tables, in an export


def without_weights(config: TideConfig) -> TideForCausalLM:
    """A model on the device meta, its memory made for this rank's rows."""
    with torch.device("meta"):
        model = TideForCausalLM(config)
        if config.num_memory_blocks:
            model.model.memory = ShardedMemory(config)
    return model


def shard(objective: Objective, device: torch.device, start: Path | None = None) -> None:
    """Spreads the parameters of a model `without_weights` over all ranks; draws them, or reads a folder's."""
    mesh = init_device_mesh(device.type, (process_group.count(),))
    decoder = objective.model.model
    # What a layer is given is in its precision already, or has a reason not to be.
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if objective.in_bfloat16 else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # The rest in float32, as without FSDP: embedding and head have a gradient that was added up in it.
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
    if others:  # which would be read too
        raise ValueError(f"{folder / min(others)} is beside the model's weights: move it elsewhere")
    decoder, whole = model.model, None
    decoder.rotary_emb = type(decoder.rotary_emb)(model.config).to(device)  # its buffer is in no file
    wanted = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if isinstance(memory := decoder.memory, ShardedMemory):
        whole = wanted["model.memory.weight"] = memory.range_like(memory.weight)
    checkpoint.fill(folder, wanted)
    if isinstance(memory, ShardedMemory) and whole is not None:
        memory.from_range(memory.weight, whole)


def gather(objective: Objective) -> None:
    """Gather parameters for calls of the model that do not go through the objective."""
    if isinstance(objective, FSDPModule):
        objective.unshard()


def spread(objective: Objective) -> None:
    """Shard parameters again after a forward pass without a backward, which would do it."""
    if isinstance(objective, FSDPModule):
        objective.reshard()


def save_pretrained(model: TideForCausalLM, folder: Path) -> None:
    """Writes a Hugging Face folder from the first rank, a piece at a time; all ranks take part.

    No rank ever holds more of the tables than its own rows and a piece.
    """
    parameters = dict(model.named_parameters())
    with ExitStack() as stack:
        file = None
        if process_group.is_first():
            model.config.architectures, model.config.dtype = [type(model).__name__], "float32"
            model.config.save_pretrained(folder)
            model.generation_config.save_pretrained(folder)
            file = stack.enter_context((folder / "model.safetensors").open("wb"))
            file.write(streamed_tensors.header(_described(model, parameters)))
        for parameter in parameters.values():
            for piece in _pieces(model, parameter):
                if file is not None:
                    file.write(piece.detach().cpu().contiguous().numpy().data)


def _described(
    model: TideForCausalLM, parameters: dict[str, torch.nn.Parameter]
) -> dict[str, tuple[str, list[int]]]:
    """Types and shapes of all ranks' parameters together."""
    found = {}
    for name, parameter in parameters.items():
        shape = list(parameter.shape)
        if model.model.memory is not None and parameter is model.model.memory.weight:
            shape[0] = model.config.vocab_size
        assert parameter.dtype == torch.float32, name
        found[name] = "F32", shape
    return found


def _pieces(model: TideForCausalLM, parameter: torch.nn.Parameter) -> Iterator[torch.Tensor]:
    """A parameter on the first rank: whole, or the tables some rows at a time."""
    memory = model.model.memory
    if not isinstance(memory, ShardedMemory) or parameter is not memory.weight:
        yield parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        return
    for ids_U in torch.arange(model.config.vocab_size).split(ROWS_AT_ONCE):
        yield memory.read(parameter, ids_U if process_group.is_first() else ids_U[:0])
