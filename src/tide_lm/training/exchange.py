"""One step's exchange of table rows between processes.

Shapes: U rows that this process requests, W rows that are requested from it, R different ones among those.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from tide_lm.ops.transfer import upload
from tide_lm.run import process_group


@dataclass(frozen=True)
class Exchange:
    """Which rows go where: planned once per step on the host, and used for rows and for gradients."""

    own_R: torch.Tensor  # rows of this process that are requested, as places in its table
    requested: list[int]  # how many rows this process requests from each
    served: list[int]  # how many rows each requests from this process
    place_W: torch.Tensor  # where in own_R each served row is, in the order of the processes that request

    @classmethod
    def plan(cls, keys_U: torch.Tensor, rows_per_rank: int, device: torch.device) -> "Exchange":
        """Plan an exchange for ascending `ShardedMemory.keys` on the host, of rows that are on a device."""
        requested_by_rank = torch.bincount(keys_U // rows_per_rank, minlength=process_group.world_size())
        served_by_rank = torch.empty_like(requested_by_rank)
        dist.all_to_all_single(served_by_rank, requested_by_rank)
        requested, served = requested_by_rank.tolist(), served_by_rank.tolist()
        keys_W = keys_U.new_empty(sum(served))
        dist.all_to_all_single(keys_W, keys_U, served, requested)
        own_R, place_W = (keys_W - process_group.rank() * rows_per_rank).unique(return_inverse=True)
        return cls(upload(own_R, device), requested, served, upload(place_W, device))

    def fetch(self, own: torch.Tensor) -> torch.Tensor:
        """Return the requested rows; `own` holds this process's rows `own_R`."""
        sent = own[self.place_W]
        fetched = sent.new_empty(sum(self.requested), *sent.shape[1:])
        dist.all_to_all_single(fetched, sent, self.requested, self.served)
        return fetched

    def reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Return each row's values to its owner, and add them up there, for the rows `own_R`."""
        received = values.new_empty(sum(self.served), *values.shape[1:])
        dist.all_to_all_single(received, values, self.served, self.requested)
        return received.new_zeros(len(self.own_R), *received.shape[1:]).index_add_(0, self.place_W, received)
