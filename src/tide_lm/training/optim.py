"""The optimiser, as in the paper's table of training settings."""

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tide_lm.run import process_group
from tide_lm.run.settings import OptimSection
from tide_lm.training.row_optimizer import RowOptimizer, StepRows


def make_optimizer(model: nn.Module, settings: OptimSection) -> torch.optim.AdamW:
    """Make AdamW, whose rate of each group `step` sets."""
    return torch.optim.AdamW(
        grouped(model, settings),
        lr=settings.max_lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=next(model.parameters()).device.type == "cuda",
    )


def grouped(model: nn.Module, settings: OptimSection) -> list[dict[str, Any]]:
    """Group what is trained: tables and gains have their own learning rate, tables their own decay."""

    def group(weight_decay: float, lr_multiple: float) -> dict[str, Any]:
        return {"params": [], "weight_decay": weight_decay, "lr_multiple": lr_multiple}

    others = group(settings.weight_decay, 1.0)
    gains = group(settings.weight_decay, settings.gain_lr_multiple)
    tables = group(settings.table_weight_decay, settings.table_lr_multiple)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_gain = name.endswith("memory.norm.weight")
            own = tables if name.endswith("memory.weight") else gains if is_gain else others
            own["params"].append(parameter)
    return [each for each in (others, gains, tables) if each["params"]]


def gradient_norm(model: nn.Module, rows: RowOptimizer | None) -> torch.Tensor:
    """Return the norm of all gradients together, of the model and of the rows, over all ranks."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    # A CPU adds squares one by one, and loses digits in float32.
    wide = torch.float64 if gradients[0].device.type == "cpu" else torch.float32
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, wide)))
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if rows is not None:
        of_rows = torch.linalg.vector_norm(rows.gradient_RKD, dtype=wide)
        norm = (norm.square() + process_group.all_sum(of_rows.square())).sqrt()
    return norm.float()


def step(
    optimizer: torch.optim.Optimizer,
    rows: RowOptimizer | None,
    rate: float,
    settings: OptimSection,
    norm: torch.Tensor,
    ahead: StepRows | None = None,
) -> None:
    """Take one step with all gradients, scaled down to the clip norm; `norm` is their norm together.

    On a GPU, the rows `ahead`, which the next step needs, are brought up to date meanwhile.
    """
    limit = settings.clip_norm or math.inf
    scale = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_multiple"]
    if optimizer.defaults["fused"]:
        # The kernel divides by this as it reads, as for a GradScaler: no pass of its own.
        optimizer.grad_scale = scale.reciprocal()  # type: ignore[attr-defined]
    else:
        gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        torch._foreach_mul_([gradient for gradient in gradients if gradient is not None], scale)
    if rows is not None:
        rows.step(rate * settings.table_lr_multiple, scale)
        if ahead is not None:
            rows.catch_up_ahead(ahead)
    optimizer.step()


def named_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return parameters and moments by the names of a checkpoint; make moments that do not exist yet."""
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        state = optimizer.state[parameter]
        if not state:
            # A fused optimiser counts steps on the device, others on the host.
            device = parameter.device if optimizer.defaults["fused"] else "cpu"
            state["step"] = torch.zeros((), device=device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        tensors |= {f"optimizer.{key}.{name}": value for key, value in state.items()}
    return tensors
