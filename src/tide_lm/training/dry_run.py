"""What a run would cost and read. Of what a trial writes and trains, nothing is kept."""

import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tide_lm.data.loader import Loader
from tide_lm.data.shards import Manifest
from tide_lm.model import Memory, TideForCausalLM
from tide_lm.run import process_group
from tide_lm.run.settings import RunConfig
from tide_lm.spec import estimate
from tide_lm.training.build import build_config, freeze
from tide_lm.training.checks import doubts
from tide_lm.training.inputs import Inputs, open_inputs
from tide_lm.training.objective import Objective
from tide_lm.training.trainer import Trainer

FIRST_CHARACTERS = 300
SMALL_PARAMETERS, SMALL_STEP = 5e7, 1e11  # of a model and a step, in FLOPs, that a CPU can try
SHARE_OF_PRODUCT = 0.5  # of the speed of a matrix product, which a step attains


def dry_run(config: RunConfig, processes: int = 1, done: int = 0) -> dict[str, Any]:
    """Return resolved settings, parameters, bytes per process, FLOPs and the first global batch.

    The time is that of the steps left, where some are `done`.
    """
    if processes > 1:
        config.check_processes(processes)
    inputs = open_inputs(config.data, config.model)
    first_batch = _first_batch(config, inputs)  # a batch that is too large is refused before all else
    shape = config.model.shape()
    parameters = estimate.count_parameters(shape)
    batch_tokens = config.train.batch * config.data.sequence
    return {
        "config": config.to_dict(),
        "table_policy": config.table_policy if shape.num_memory_blocks else "none",
        "vocabulary": {"model": shape.vocab_size, "data": inputs.manifest.vocab_size},
        "parameters": {"resident": parameters.resident, "tables": parameters.tables},
        "processes": processes,
        "bytes": _bytes(config, inputs.manifest, parameters, processes),
        "flops_per_token": estimate.train_flops(shape, config.data.sequence),
        "tokens": config.train.steps * batch_tokens,
        "epochs": round(config.train.steps * batch_tokens / len(inputs.train), 3),
        "time": _time(config, processes, config.train.steps - done),
        "doubts": doubts(config, inputs.manifest),
        "first_batch": first_batch,
    }


def _time(config: RunConfig, processes: int, steps: int) -> dict[str, Any]:
    """Estimate the seconds of so many steps, and say from what."""
    shape, device = config.model.shape(), process_group.device()
    tokens = config.train.batch * config.data.sequence
    flops = estimate.train_flops(shape, config.data.sequence) * tokens / processes
    on = f"{processes} x {device.type}" if processes > 1 else device.type
    small = estimate.count_parameters(shape).total < SMALL_PARAMETERS and flops < SMALL_STEP
    if device.type == "cpu" and processes == 1 and small:
        with TemporaryDirectory() as folder:
            once = replace(config, data=replace(config.data, verify=False))
            seconds = Trainer(once, Path(folder, "run"), lambda line: None).seconds_of_a_step()
        return {"seconds": seconds * steps, "from": f"a step of {seconds:.2g} s on this {on}"}
    speed = SHARE_OF_PRODUCT * _product_flops(device, getattr(torch, config.train.dtype))
    what = f"FLOPs at {speed:.1e} a second on this {on}, {SHARE_OF_PRODUCT:.0%} of what a matrix product has"
    return {"seconds": flops * steps / speed, "from": what}


def _product_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP/s of a matrix product."""
    size = 1024 if device.type == "cpu" else 8192
    a = torch.ones(size, size, device=device, dtype=dtype)
    seconds = []
    for _ in range(3):
        started = time.monotonic()
        (a @ a)[0, 0].item()  # waits for a GPU
        seconds.append(time.monotonic() - started)
    return 2 * size**3 / min(seconds)


def _bytes(
    config: RunConfig, manifest: Manifest, parameters: estimate.Parameters, processes: int
) -> dict[str, int]:
    """Return the bytes that each process holds; parameters are in float32.

    The backward pass of the first micro-batch frees activations as it makes gradients. The tables have no
    gradient; that of a batch's rows counts with the activations.
    """
    moment = getattr(torch, config.optim.table_moments).itemsize
    weights = list(_model_on_meta(config, manifest).parameters())
    learning = sum(weight.numel() for weight in weights if weight.requires_grad)
    resident = learning - parameters.tables
    wholes = {
        "weights": 4 * sum(weight.numel() for weight in weights),
        "gradients": 4 * resident,
        "moments": 8 * resident + 2 * moment * parameters.tables,
    }
    shares = {name: -(-size // processes) for name, size in wholes.items()}
    micro_batch = config.train.micro_batch_size(processes)
    activations = activation_bytes(config, manifest, micro_batch)
    alone = config.train.batch == processes * micro_batch and not config.train.activation_checkpointing
    held, gradients = shares["weights"] + shares["moments"], shares["gradients"]
    most = held + (max(gradients, activations) if alone else gradients + activations)
    return {**shares, "activations": activations, "most": most}


def _model_on_meta(config: RunConfig, manifest: Manifest) -> TideForCausalLM:
    """Make the run's model from tensors that have a shape and no memory."""
    with torch.device("meta"):
        model = TideForCausalLM(build_config(config.model, config.data.sequence, manifest))
    freeze(model, config.train.parts)
    return model


def activation_bytes(config: RunConfig, manifest: Manifest, windows: int) -> int:
    """Return the bytes that a forward pass of so many windows saves for the backward, if not compiled.

    The pass runs on tensors that have a shape and no memory, and counts what autograd saves.
    """
    eager = replace(config.train, compile=False)
    objective = Objective(_model_on_meta(config, manifest), eager, config.optim.z_loss).train()
    sizes: dict[Any, int] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):  # the parameters on meta
        objective.to_empty(device="cpu")
        weights = {parameter.untyped_storage() for parameter in objective.parameters()}

        def count(tensor: torch.Tensor) -> torch.Tensor:
            if (storage := tensor.untyped_storage()) not in weights:
                sizes[storage] = storage.nbytes()
            return tensor

        def count_rows(module: nn.Module, arguments: Any, memory: Memory) -> None:
            count(memory.rows_UJD)  # checkpointed layers hold them without saving them

        if objective.model.model.memory is not None:
            objective.model.model.memory.register_forward_hook(count_rows)
        ids_BT = torch.zeros(windows, config.data.sequence, dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            objective(ids_BT, ids_BT)
    shape, saved = config.model.shape(), sum(sizes.values())
    if not shape.memory_values or config.train.activation_checkpointing:
        return saved
    row = shape.hidden_size * getattr(torch, config.train.dtype).itemsize
    return saved + shape.num_hidden_layers * ids_BT.numel() * row  # gathered in training, and here a view


def _first_batch(config: RunConfig, inputs: Inputs) -> dict[str, Any]:
    loader = Loader(inputs.train, config.data.sequence, config.train.batch, config.train.seed)
    ids_BT, _ = loader.peek()
    return {
        "shape": list(ids_BT.shape),
        "distinct_tokens": len(ids_BT.unique()),
        "documents_begun": None
        if (start := inputs.manifest.bos_token_id) is None
        else int((ids_BT == start).sum()),
        "first_ids": ids_BT[0, :16].tolist(),
        "first_text": inputs.tokenizer.decode(ids_BT[0])[:FIRST_CHARACTERS],
    }
