"""Low-rank changes of a model's matrices (LoRA), which are merged into them in the end."""

from collections.abc import Iterator

import torch
from torch import nn

from tide_lm.model import TideForCausalLM
from tide_lm.pretrained import shard_like
from tide_lm.seeded_init import normal

_SCALE = 2.0  # as with LoRA's alpha twice the rank


class LowRank(nn.Module):
    """`W x + 2 B A x`; what is added begins as 0."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        device = base.weight.device
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False, device=device)
        self.up = nn.Linear(rank, base.out_features, bias=False, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + _SCALE * self.up(self.down(x))


def add(model: TideForCausalLM, rank: int) -> None:
    """To all matrices of attention and FFN; `draw` gives them their first values."""
    for part in _parts(model):
        for name, matrix in list(part.named_children()):
            if name.endswith("_proj") and isinstance(matrix, nn.Linear):
                if rank > (most := min(matrix.in_features, matrix.out_features)):
                    raise ValueError(f"train.lora_rank is {rank}, and {name} has {most}: lower it")
                setattr(part, name, LowRank(matrix, rank))


@torch.no_grad()
def draw(model: TideForCausalLM, seed: int) -> None:
    for name, module in model.named_modules():
        if isinstance(module, LowRank):
            rank, width = module.down.weight.shape
            drawn = torch.from_numpy(normal(seed, f"{name}.down.weight", (rank, width))) * width**-0.5
            module.down.weight.copy_(shard_like(module.down.weight, drawn))
            module.up.weight.zero_()


@torch.no_grad()
def merge(model: TideForCausalLM) -> None:
    """Leaves a model of its usual names."""
    for part in _parts(model):
        for name, matrix in list(part.named_children()):
            if isinstance(matrix, LowRank):
                matrix.base.weight += _SCALE * (matrix.up.weight @ matrix.down.weight)
                setattr(part, name, matrix.base)


def _parts(model: TideForCausalLM) -> Iterator[nn.Module]:
    for layer in model.model.layers:
        yield from (layer.get_submodule(name) for name in ("self_attn", "mlp"))
