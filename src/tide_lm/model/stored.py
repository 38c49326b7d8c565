"""Memory whose rows are packed: on the device, in the host's memory, or in a file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import StoppingCriteria

from tide_lm.model.memory import Memory
from tide_lm.spec.config import Place, Residence
from tide_lm.store.format import Header
from tide_lm.store.reader import Counters, StoredRows, StoreFile
from tide_lm.store.rows import RowDecoder

_AT_ONCE = 4096  # rows that are read into memory


class StoredMemory(nn.Module):
    """The rows of a store with the forward of `EmbeddingMemory`: their norm and gain are in them already.

    It has no parameters, so a checkpoint has none for it. `open` gives it its rows.
    """

    bytes_VR: torch.Tensor | None

    def __init__(self, vocab_size: int, blocks: int, hidden: int) -> None:
        super().__init__()
        self.vocab_size, self.blocks, self.hidden = vocab_size, blocks, hidden
        self.file: StoreFile | None = None
        self.rows: StoredRows | None = None
        self._decode: RowDecoder | None = None
        self._host_VR: np.ndarray | None = None
        self.register_buffer("bytes_VR", None, persistent=False)

    def open(self, path: Path, fingerprint: str, residence: Residence, device: torch.device) -> None:
        """Reads the rows from a store, or with the place `"store"` when they are asked for."""
        file = StoreFile(path)
        file.check_model(
            vocab_size=self.vocab_size, blocks=self.blocks, hidden=self.hidden, fingerprint=fingerprint
        )
        self.file = file
        if residence.place is Place.store:
            self.rows = StoredRows(file, residence.cache_bytes)
            self._decode = RowDecoder(file.header, file.sections)
            return
        bytes_VR = np.empty((self.vocab_size, file.header.codec.row_bytes), np.uint8)
        for start in range(0, self.vocab_size, _AT_ONCE):
            some = bytes_VR[start : start + _AT_ONCE]
            some[:] = file.read(np.arange(start, start + len(some)))
        offloaded = device.type == "meta"
        if residence.place is Place.device and not offloaded:
            self.hold(file.header, file.sections, torch.from_numpy(bytes_VR).to(device))
        else:
            self._decode, self._host_VR = RowDecoder(file.header, file.sections), bytes_VR

    def hold(self, header: Header, sections: Mapping[str, np.ndarray], bytes_VR: torch.Tensor) -> None:
        """Hold all rows on the device that they are on."""
        self._decode, self.bytes_VR = RowDecoder(header, sections), bytes_VR

    def all_bytes(self) -> torch.Tensor | None:
        """Every token's row where a GPU can read it: on the device, or pinned; None if they are in a file."""
        if self.bytes_VR is not None or self._host_VR is None:
            return self.bytes_VR
        pinned_VR = torch.from_numpy(self._host_VR)
        if not pinned_VR.is_pinned():
            pinned_VR = pinned_VR.pin_memory()
            self._host_VR = pinned_VR.numpy()
        return pinned_VR

    @property
    def counters(self) -> Counters:
        """What was read; all zero where rows are in memory."""
        return self.rows.counters if self.rows is not None else Counters()

    def forward(self, input_ids_BT: torch.Tensor, dtype: torch.dtype = torch.float32) -> Memory:
        """Rows of each token once, and which of them belongs to each position."""
        if self._decode is None:
            raise ValueError("the rows of this memory are in a store: open the model with from_pretrained")
        if self.training:
            raise ValueError(
                "a packed memory cannot be trained: call model.eval(), or train the model it was packed from"
            )
        if self.bytes_VR is None:
            bytes_UR, index_BT = self._from_host(input_ids_BT)
        elif torch.compiler.is_compiling():  # how many tokens are different is not known then
            bytes_UR, index_BT = self.bytes_VR[input_ids_BT.flatten()], None
        else:
            tokens_U, index_BT = input_ids_BT.unique(return_inverse=True)
            bytes_UR = self.bytes_VR[tokens_U]
        return Memory(self._decode(bytes_UR, dtype), index_BT)

    def rows_of(self, ids_U: torch.Tensor) -> torch.Tensor:
        rows_UKD, index_U, _ = self(ids_U)
        return rows_UKD if index_U is None else rows_UKD[index_U]

    def prefetch(self, input_ids: torch.Tensor) -> None:
        """Begins to read rows that will be looked up next."""
        if self.rows is not None:
            self.rows.prefetch(np.unique(input_ids.cpu().numpy()))

    @torch.compiler.disable
    def _from_host(self, input_ids_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._decode is not None
        device = input_ids_BT.device
        tokens_U, index_N = np.unique(input_ids_BT.cpu().numpy(), return_inverse=True)
        for token in tokens_U[:1], tokens_U[-1:]:
            if token.size and not 0 <= token[0] < self.vocab_size:
                raise ValueError(
                    f"token id {token[0]} is outside the vocabulary of {self.vocab_size}: use the tokenizer "
                    "that this model was trained with"
                )
        shape = (len(tokens_U), self._decode.header.codec.row_bytes)
        staged_UR = torch.empty(shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
        if self.rows is not None:
            self.rows.fetch(tokens_U, staged_UR.numpy())
        else:
            assert self._host_VR is not None
            np.take(self._host_VR, tokens_U, 0, out=staged_UR.numpy())
        index_BT = torch.from_numpy(index_N.reshape(input_ids_BT.shape)).to(device)
        return staged_UR.to(device, non_blocking=device.type == "cuda"), index_BT


class ReadAhead(StoppingCriteria):
    """Stops nothing: it is called as soon as tokens are sampled, and has their rows read."""

    def __init__(self, memory: StoredMemory) -> None:
        self.memory = memory

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.memory.prefetch(input_ids[:, -1])
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
