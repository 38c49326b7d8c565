"""How much gradient each token's rows collect over a run: the measured side of Proposition 3.2.

E's gradient has two parts when its head is tied: one reaches only tokens of the batch, through the input,
and one reaches every token, through the head. They are recorded apart. V vocabulary, K blocks, D hidden.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tide_lm.model import TideForCausalLM


class GradientRecorder:
    """Adds up the squared norm of each row's gradient, step by step, before clipping."""

    def __init__(self, model: TideForCausalLM) -> None:
        self.model = model
        embeddings = model.get_input_embeddings()
        self._input_VD = torch.zeros_like(embeddings.weight)
        self.squared = {
            "embedding_input": embeddings.weight.new_zeros(len(embeddings.weight)),
            "embedding_head": embeddings.weight.new_zeros(len(embeddings.weight)),
        }
        if model.model.memory is not None:
            self.squared["tables"] = embeddings.weight.new_zeros(model.model.memory.weight.shape[:2])
        embeddings.register_forward_hook(self._watch)

    def _watch(self, module: Any, args: tuple[torch.Tensor, ...], output_BTD: torch.Tensor) -> None:
        def add(gradient_BTD: torch.Tensor) -> None:
            self._input_VD.index_add_(0, args[0].flatten(), gradient_BTD.flatten(0, 1).to(self._input_VD))

        if output_BTD.requires_grad:
            output_BTD.register_hook(add)

    @torch.no_grad()
    def collect(self) -> None:
        """Takes in one step's gradients, which must still be on the parameters."""
        head = self.model.lm_head.weight
        tied = head is self.model.get_input_embeddings().weight
        assert head.grad is not None
        head_VD = head.grad - self._input_VD if tied else head.grad
        self.squared["embedding_input"] += self._input_VD.square().sum(-1)
        self.squared["embedding_head"] += head_VD.square().sum(-1)
        memory = self.model.model.memory
        if memory is not None and memory.weight.grad is not None:
            self.squared["tables"] += memory.weight.grad.square().sum(-1)
        self._input_VD.zero_()

    def write(self, results: Path) -> None:
        temporary = results / ".gradients.tmp"
        save_file(self.squared, temporary)
        temporary.replace(results / "gradients.safetensors")
