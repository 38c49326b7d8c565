"""Batches of packed tokens in an order that a seed fixes, for any number of ranks.

A window is T + 1 tokens of the flat split, and windows start every T tokens: each token after the first is
predicted once per epoch, and a tail shorter than a window is dropped. Documents follow one another inside a
window. The order of windows is endless, one permutation per epoch, so one integer is the position.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tide_lm.data.shards import TokenSplit

Batch = tuple[torch.Tensor, torch.Tensor]
_ROUNDS = 8


class Loader:
    """Endless batches `inputs_BT, targets_BT`: this rank's contiguous share of each global batch.

    The state is `windows`, how many all ranks together have taken. A resume with another `batch` or number
    of ranks continues the same global order.
    """

    def __init__(
        self, split: TokenSplit, sequence: int, batch: int, seed: int, rank: int = 0, world_size: int = 1
    ) -> None:
        assert not batch % world_size
        self.epoch_windows = count_windows(split, sequence)
        if batch > self.epoch_windows:
            raise ValueError(
                f"a global batch takes {batch} windows of {sequence} tokens, but {split.folder} "
                f"({split.split}) has {self.epoch_windows}: lower the batch, shorten the sequence or add text"
            )
        self.split, self.sequence, self.batch, self.seed = split, sequence, batch, seed
        self.rank, self.world_size = rank, world_size
        self.windows = 0

    def peek(self) -> Batch:
        """Read this rank's share of the next global batch, which stays the next."""
        share = self.batch // self.world_size
        positions_B = np.arange(share) + (self.windows + self.rank * share)
        windows_B = window_order(positions_B, self.epoch_windows, self.seed)
        return _read_windows(self.split, self.sequence, windows_B)

    def advance(self) -> None:
        """Advance all ranks by one global batch."""
        self.windows += self.batch

    def state_dict(self) -> dict[str, Any]:
        """Return how many windows all ranks have taken so far, and from what data."""
        return {"windows": self.windows, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        changed = [
            f"{name} was {state.get(name)} and is {value}"
            for name, value in self._identity().items()
            if state.get(name) != value
        ]
        if changed:
            raise ValueError(
                f"the checkpoint has other data or settings ({'; '.join(changed)}): restore them, or begin "
                "another run"
            )
        self.windows = int(state["windows"])

    def _identity(self) -> dict[str, Any]:
        manifest = self.split.manifest
        checksums = "".join(shard.sha256 for shard in manifest.splits[self.split.split])
        return {
            "sequence": self.sequence,
            "seed": self.seed,
            "tokens": len(self.split),
            "tokenizer_sha256": manifest.tokenizer_sha256,
            "shards_sha256": hashlib.sha256(checksums.encode()).hexdigest(),
        }


def validation_windows(
    split: TokenSplit, sequence: int, limit: int, batch: int, rank: int = 0, world_size: int = 1
) -> Iterator[Batch]:
    """Yield the same windows at each call, in the order of the text: all, or `limit` spread evenly.

    Each rank gets as many batches, of at most `batch` windows; the last may be empty.
    """
    windows = count_windows(split, sequence)
    taken = min(limit, windows)
    chosen = np.arange(taken) * windows // taken
    pieces = -(-taken // (batch * world_size)) * world_size
    return (_read_windows(split, sequence, own) for own in np.array_split(chosen, pieces)[rank::world_size])


def count_windows(split: TokenSplit, sequence: int) -> int:
    """Return how many windows of `sequence` predicted tokens a split has; none is an error."""
    windows = (len(split) - 1) // sequence
    if windows < 1:
        raise ValueError(
            f"{split.folder} ({split.split}) has {len(split)} tokens, too few for one window of "
            f"{sequence} + 1: use a shorter sequence or prepare more text"
        )
    return windows


def _read_windows(split: TokenSplit, sequence: int, windows_B: np.ndarray) -> Batch:
    """Return inputs, the first T tokens of each window, and targets, its last T."""
    windows = [split.read(window * sequence, sequence + 1) for window in windows_B.tolist()]
    tokens = np.array(windows).reshape(-1, sequence + 1)
    inputs_BT, targets_BT = tokens[:, :-1].astype(np.int64), tokens[:, 1:].astype(np.int64)
    return torch.from_numpy(inputs_BT), torch.from_numpy(targets_BT)


def window_order(positions: np.ndarray, windows: int, seed: int) -> np.ndarray:
    """Return the windows at these positions of the endless order, one permutation per epoch."""
    epochs, places = np.divmod(positions, windows)
    order = np.empty_like(positions)
    for epoch in np.unique(epochs).tolist():
        keys = np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64)
        order[epochs == epoch] = _permute(places[epochs == epoch].astype(np.uint64), windows, keys)
    return order


def _permute(places: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """Permute 0..n-1 by calculation, with keys: 10^8 windows need no memory.

    A Feistel network permutes the next power of four. A place outside 0..n-1 is permuted again until it is
    inside, which keeps the whole a permutation.
    """
    half = max((n - 1).bit_length() + 1, 2) // 2
    places = _feistel(places, half, keys)
    while (outside := places >= n).any():
        places[outside] = _feistel(places[outside], half, keys)
    return places


def _feistel(places: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    mask = np.uint64((1 << half) - 1)
    left, right = places >> np.uint64(half), places & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return left << np.uint64(half) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """Mix bits with SplitMix64's finaliser: each input bit flips each output bit half the time."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)
