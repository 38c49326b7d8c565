"""Run by torchrun: initialises a sharded model and compares it with one that is whole."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tide_lm.model import TideConfig, TideForCausalLM
from tide_lm.run import process_group

torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
config = TideConfig(
    vocab_size=2_501,  # more than one chunk of rows a rank, and not the same number on each
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_memory_blocks=3,
    pad_token_id=2,
)
torch.manual_seed(9)
whole = TideForCausalLM(config)
with torch.device("meta"):
    model = TideForCausalLM(config)
fully_shard(model.model.memory, mesh=mesh)
fully_shard(model, mesh=mesh)
model.to_empty(device="cpu")
torch.manual_seed(9)
model.init_weights()
for name, parameter in model.named_parameters():
    assert parameter.to_local().shape[0] < whole.get_parameter(name).shape[0], name
    assert torch.equal(parameter.full_tensor(), whole.get_parameter(name)), name
print(f"equal on rank {dist.get_rank()}")
dist.destroy_process_group()
process_group.leave(0)
