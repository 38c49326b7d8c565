"""A memory whose rows are spread over two ranks, against one that is whole."""

import torch

from tide_lm.model import EmbeddingMemory, TideConfig
from tide_lm.model.initialisation import draw_table
from tide_lm.run import process_group
from tide_lm.training.sharded_memory import ShardedMemory

V, K, D = 23, 2, 6


def check(pairs: int) -> None:
    config = TideConfig(
        vocab_size=V, num_memory_blocks=K, memory_pair_rows=pairs, hidden_size=D, num_attention_heads=2
    )
    whole, memory = EmbeddingMemory(config), ShardedMemory(config)
    for each in (whole, memory):
        draw_table(each.weight, each.own, seed=5, std=0.02)
        each.norm.weight.data = torch.arange(1.0, K * D + 1).view(K, D)

    # Each rank has every second row, and no more.
    assert torch.equal(memory.weight, whole.weight[process_group.rank() :: process_group.world_size()])

    # Batches of different sizes, with tokens of one rank alone, and the rows that they look up.
    ids = [torch.tensor([[22, 3, 3], [0, 22, 8]]), torch.tensor([[1, 1, 21]])][process_group.rank()]
    found = memory(ids)
    torch.testing.assert_close(found.of_positions(), whole(ids).rows_UJD, rtol=1e-6, atol=0)
    assert len(found.rows_UJD) == sum(len(part.unique()) for part in whole.numbers(ids))

    # Gradients add up with the owner: rank 0 gives 1 for each of its rows, rank 1 gives 2.
    ids_U = [torch.tensor([3, 8, 22]), torch.tensor([1, 3])][process_group.rank()]
    keys_U = memory.keys(ids_U).sort().values
    exchange = memory.plan(keys_U, keys_U.device)
    sums_R = exchange.reduce(torch.full((len(ids_U),), process_group.rank() + 1.0))
    found = {
        memory.own[place]: total
        for place, total in zip(exchange.own_R.tolist(), sums_R.tolist(), strict=True)
    }
    assert found == [{8: 1.0, 22: 1.0}, {1: 2.0, 3: 3.0}][process_group.rank()]

    # As a checkpoint holds it, and back.
    held = memory.to_dtensor(memory.weight.detach())
    assert torch.equal(held.full_tensor(), whole.weight)
    assert torch.equal(held.to_local(), whole.weight.chunk(process_group.world_size())[process_group.rank()])
    back = torch.zeros_like(memory.weight)
    memory.from_dtensor(back, held)
    assert torch.equal(back, memory.weight)


def main() -> None:
    check(pairs=0)
    check(pairs=8)
    print(f"equal on rank {process_group.rank()}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with process_group.joined():
        main()
    process_group.leave(0)
