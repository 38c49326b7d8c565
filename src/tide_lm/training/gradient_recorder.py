"""How much gradient each token's rows receive over a run: the measured side of Proposition 3.2.

E's gradient has two parts when its head is tied: one reaches only tokens of the batch, through the input,
and one reaches every token, through the head. They are recorded apart. V vocabulary, K blocks, D hidden.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from tide_lm.model import TideForCausalLM
from tide_lm.run import files
from tide_lm.run.directory import results_folder
from tide_lm.run.provenance import provenance
from tide_lm.spec.config import table_shape
from tide_lm.training.row_optimizer import RowOptimizer


class GradientRecorder:
    """Adds up the squared norm of each token's gradient, step by step, before clipping."""

    def __init__(self, model: TideForCausalLM) -> None:
        self.model = model
        embeddings = model.get_input_embeddings()
        self._input_VD = torch.zeros_like(embeddings.weight)
        shapes = dict.fromkeys(("embedding_input", "embedding_head"), self._input_VD.shape[:1])
        if model.model.tables is not None:
            shapes["tables"] = torch.Size([len(embeddings.weight), table_shape(model.config)[1]])
        # In float64: a long run adds to a sum that is far larger than what is added.
        self.squared = {
            name: self._input_VD.new_zeros(shape, dtype=torch.float64) for name, shape in shapes.items()
        }
        embeddings.register_forward_hook(self._watch)

    def _watch(self, module: Any, args: tuple[torch.Tensor, ...], output_BTD: torch.Tensor) -> None:
        def add(gradient_BTD: torch.Tensor) -> None:
            self._input_VD.index_add_(0, args[0].flatten(), gradient_BTD.flatten(0, 1).to(self._input_VD))

        if output_BTD.requires_grad:
            output_BTD.register_hook(add)

    @torch.no_grad()
    def collect(self, rows: RowOptimizer | None = None) -> None:
        """Add one step's gradients, which must still be on the parameters and the rows."""
        self._add("embedding_input", self._input_VD)
        head = self.model.lm_head.weight
        tied = head is self.model.get_input_embeddings().weight
        assert head.grad is not None
        self._add("embedding_head", head.grad - self._input_VD if tied else head.grad)
        memory = self.model.model.tables
        if rows is not None:
            of_tokens = rows.own_R < len(head)  # and not of pairs of them
            squared = _squared_norms(rows.gradient_RKD[of_tokens])
            self.squared["tables"].index_add_(0, rows.own_R[of_tokens], squared)
        elif memory is not None and memory.weight.grad is not None:
            self._add("tables", memory.weight.grad[: len(head)])
        self.forget()

    def forget(self) -> None:
        """Leave the present step out."""
        self._input_VD.zero_()

    def _add(self, name: str, gradient: torch.Tensor) -> None:
        self.squared[name] += _squared_norms(gradient)

    def write(self, run: Path, seed: int) -> None:
        """Write `results/gradients.safetensors`, with its provenance in the header."""
        header = {"provenance": json.dumps(provenance(seed))}
        path = results_folder(run) / "gradients.safetensors"
        files.write_atomically(path, save(self.squared, header))


def _squared_norms(gradient: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(gradient, dim=-1).double().square()
