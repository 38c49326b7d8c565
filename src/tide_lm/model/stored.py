"""Memory whose rows are packed: on the device, in the host's memory, or in a file.

Shapes: B batch, T tokens, V vocabulary, U different tokens, K blocks, D hidden, R bytes of a row.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tide_lm.model.checks import check_token_ids
from tide_lm.model.memory import Memory, MemorySource
from tide_lm.ops.decode import RowBytes
from tide_lm.run import files
from tide_lm.spec.config import Place, Residence
from tide_lm.store.format import Header
from tide_lm.store.reader import Counters, StoredRows, StoreFile
from tide_lm.store.rows import RowDecoder

_ROWS_PER_READ = 4096


class StoredMemory(MemorySource):
    """The rows of a store; their norm and gain are in them already.

    It has no parameters, so a checkpoint has none for it. `open` gives it its rows.
    """

    bytes_VR: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.file: StoreFile | None = None
        self.rows: StoredRows | None = None
        self._decode: RowDecoder | None = None
        self._host_VR: torch.Tensor | None = None
        self.register_buffer("bytes_VR", None, persistent=False)

    def open(self, file: StoreFile, residence: Residence, device: torch.device) -> None:
        """Read the rows of a store; with the place `"store"`, later, when they are asked for."""
        self.file = file
        self.header, self._decode = file.header, RowDecoder(file.header, file.sections)
        if residence.place == Place.store:
            self.rows = StoredRows(file, residence.cache_bytes)
            return
        vocab_size, row_bytes = file.header.vocab_size, file.header.codec.row_bytes
        self._host_VR = torch.empty(vocab_size, row_bytes, dtype=torch.uint8)
        for tokens in torch.arange(vocab_size).split(_ROWS_PER_READ):
            self._host_VR[tokens] = torch.from_numpy(file.read(tokens.numpy()))
        if residence.place == Place.device and device.type != "meta":  # where weights are offloaded
            self.bytes_VR, self._host_VR = self._host_VR.to(device), None

    def hold(self, header: Header, sections: Mapping[str, np.ndarray], bytes_VR: torch.Tensor) -> None:
        """Hold all rows on the device that they are on."""
        self.header, self._decode = header, RowDecoder(header, sections)
        self.bytes_VR = bytes_VR

    @property
    def on_device(self) -> bool:  # type: ignore[override]
        return self.bytes_VR is not None

    def directions(self, ids_U: torch.Tensor) -> torch.Tensor:
        return self.rows_of(ids_U).float()

    @property
    def tables(self) -> Any:
        raise ValueError("this model is packed, and has no tables: take the model that it was packed from")

    @property
    def counters(self) -> Counters:
        """What was read; all zero where rows are in memory."""
        return self.rows.counters if self.rows is not None else Counters()

    def forward(self, input_ids_BT: torch.Tensor, dtype: torch.dtype = torch.float32) -> Memory:
        """Return the rows of each token once, and which of them belongs to each position."""
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

    def row_bytes(self, ids_1: torch.Tensor) -> RowBytes | None:
        """Return where a kernel finds rows: by token, or in a file's cache by a place that the host sets."""
        if self._decode is None or self._decode.header.ranks:
            return None
        bytes_VR, which_1 = self.bytes_VR, ids_1
        if self._host_VR is not None:
            bytes_VR = self._host_VR = self._host_VR.pin_memory() if ids_1.is_cuda else self._host_VR
        # With two rows or more, the one that a step reads is never the one that is replaced meanwhile.
        if self.rows is not None and len(self.rows.cached_CR) >= 2 and ids_1.is_cuda:
            bytes_VR = torch.from_numpy(self.rows.cached_CR)
            if not bytes_VR.is_pinned():
                bytes_VR = torch.empty_like(bytes_VR, pin_memory=True)
                self.rows.move_to(bytes_VR.numpy())
            which_1 = torch.zeros(1, dtype=torch.long, pin_memory=True)
        if bytes_VR is None:
            return None
        arrays = self._decode.arrays_on(ids_1.device)
        return RowBytes(bytes_VR, which_1, levels=arrays.get("levels"), columns=arrays.get("columns"))

    def save(self, store: Path) -> None:
        """Copy the store, unless it is there."""
        if self.file is None:
            raise ValueError("this packed model has no rows to save: open it with from_pretrained")
        self.file.check_name()
        if not (store.exists() and store.samefile(self.file.path)):
            store.parent.mkdir(parents=True, exist_ok=True)
            files.copy_atomically(self.file.path, store)

    @torch.compiler.disable
    def _from_host(self, input_ids_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.header is not None
        device = input_ids_BT.device
        tokens_U, index_BT = input_ids_BT.cpu().unique(return_inverse=True)
        check_token_ids(tokens_U, self.header.vocab_size)
        shape = (len(tokens_U), self.header.codec.row_bytes)
        staged_UR = torch.empty(shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
        if self.rows is not None:
            self.rows.fetch(tokens_U.numpy(), staged_UR.numpy())
        else:
            assert self._host_VR is not None
            torch.index_select(self._host_VR, 0, tokens_U, out=staged_UR)
        return staged_UR.to(device, non_blocking=device.type == "cuda"), index_BT.to(device)
