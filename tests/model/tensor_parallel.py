"""Run by torchrun: opens a folder split among processes and compares it with the model that is whole."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from tide_lm.model import TideForCausalLM
from tide_lm.run import process_group

torch.set_num_threads(1)
dist.init_process_group("gloo")
ids = torch.arange(3, 21).view(2, 9)
with torch.no_grad():
    whole = TideForCausalLM.from_pretrained(sys.argv[1])(ids).logits
    split = TideForCausalLM.from_pretrained(sys.argv[1], distributed_config=DistributedConfig(tp_plan="auto"))
    assert isinstance(split.model.layers[0].mlp.gate_proj.weight, DTensor)
    found = split(ids).logits
assert torch.allclose(found, whole, atol=1e-5), (found - whole).abs().max()
print(f"equal on rank {dist.get_rank()}")
dist.destroy_process_group()
process_group.leave(0)
