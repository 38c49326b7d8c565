"""Memory whose rows are packed: on the device, in the host's memory, or in a file.

Shapes: B batch, T tokens, V rows of the store, U different rows, P rows of a position, J blocks of a row, D
hidden, R bytes of a row.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tide_lm.model.checks import check_token_ids
from tide_lm.model.memory import Memory, MemorySource, taking_turns
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

    def __init__(self, pair_rows: int = 0) -> None:
        super().__init__()
        self.pair_rows = pair_rows
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
    def height(self) -> int:
        assert self.header is not None
        return self.header.vocab_size

    @property
    def on_device(self) -> bool:  # type: ignore[override]
        return self.bytes_VR is not None

    def directions(self, ids_U: torch.Tensor) -> torch.Tensor:
        assert self._decode is not None
        if self.bytes_VR is not None:
            return self._decode(self.bytes_VR[ids_U])
        tokens_W, index_U = ids_U.cpu().unique(return_inverse=True)
        return self._decode(self._staged(tokens_W).to(ids_U.device))[index_U.to(ids_U.device)]

    @property
    def tables(self) -> Any:
        raise ValueError("this model is packed, and has no tables: take the model that it was packed from")

    @property
    def counters(self) -> Counters:
        """What was read; all zero where rows are in memory."""
        return self.rows.counters if self.rows is not None else Counters()

    def forward(
        self,
        input_ids_BT: torch.Tensor,
        dtype: torch.dtype = torch.float32,
        previous_BT: torch.Tensor | None = None,
    ) -> Memory:
        """Return each row once, and which of them belong to each position."""
        if self._decode is None:
            raise ValueError("the rows of this memory are in a store: open the model with from_pretrained")
        if self.training:
            raise ValueError(
                "a packed memory cannot be trained: call model.eval(), or train the model it was packed from"
            )
        if self.bytes_VR is None:
            bytes_UR, index = self._from_host(input_ids_BT, previous_BT)
        elif torch.compiler.is_compiling():  # how many rows are different is not known then
            numbers_BTP = torch.stack(self.numbers(input_ids_BT, previous_BT), -1)
            rows = self._decode(self.bytes_VR[numbers_BTP.flatten()], dtype)
            return Memory(taking_turns(rows.unflatten(0, (-1, numbers_BTP.shape[-1]))))
        else:
            numbers = torch.stack(self.numbers(input_ids_BT, previous_BT))
            numbers_U, index = numbers.unique(return_inverse=True)
            bytes_UR = self.bytes_VR[numbers_U]
        return Memory(self._decode(bytes_UR, dtype), index if len(index) > 1 else index[0])

    def row_bytes(self, ids_1: torch.Tensor) -> RowBytes | None:
        """Return where a kernel finds rows: by token, or in a file's cache by places that the host sets."""
        if self._decode is None or self._decode.header.ranks:
            return None
        bytes_VR, which = self.bytes_VR, ids_1
        if self._host_VR is not None:
            bytes_VR = self._host_VR = self._host_VR.pin_memory() if ids_1.is_cuda else self._host_VR
        # With twice a step's rows or more, none that a step reads is replaced for the next one.
        if (
            self.rows is not None
            and len(self.rows.cached_CR) >= (4 if self.pair_rows else 2)
            and ids_1.is_cuda
        ):
            bytes_VR = torch.from_numpy(self.rows.cached_CR)
            if not bytes_VR.is_pinned():
                bytes_VR = torch.empty_like(bytes_VR, pin_memory=True)
                self.rows.move_to(bytes_VR.numpy())
            which = torch.zeros(2 if self.pair_rows else 1, dtype=torch.long, pin_memory=True)
        if bytes_VR is None:
            return None
        arrays = self._decode.arrays_on(ids_1.device)
        return RowBytes(bytes_VR, which, levels=arrays.get("levels"), columns=arrays.get("columns"))

    def save(self, store: Path) -> None:
        """Copy the store, unless it is there."""
        if self.file is None:
            raise ValueError("this packed model has no rows to save: open it with from_pretrained")
        self.file.check_name()
        if not (store.exists() and store.samefile(self.file.path)):
            store.parent.mkdir(parents=True, exist_ok=True)
            files.copy_atomically(self.file.path, store)

    @torch.compiler.disable
    def _from_host(
        self, input_ids_BT: torch.Tensor, previous_BT: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the bytes of each row once, and which of them belong to each position, P x B x T."""
        device = input_ids_BT.device
        ids_BT, previous_BT = input_ids_BT.cpu(), None if previous_BT is None else previous_BT.cpu()
        check_token_ids(ids_BT, self.height - self.pair_rows)
        numbers_U, index_PBT = torch.stack(self.numbers(ids_BT, previous_BT)).unique(return_inverse=True)
        staged_UR = self._staged(numbers_U, pinned=device.type == "cuda")
        return staged_UR.to(device, non_blocking=device.type == "cuda"), index_PBT.to(device)

    def _staged(self, numbers_U: torch.Tensor, pinned: bool = False) -> torch.Tensor:
        """Return the bytes of rows, by ascending numbers, in the host's memory."""
        assert self.header is not None
        shape = (len(numbers_U), self.header.codec.row_bytes)
        staged_UR = torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)
        if self.rows is not None:
            self.rows.fetch(numbers_U.numpy(), staged_UR.numpy())
        else:
            assert self._host_VR is not None
            torch.index_select(self._host_VR, 0, numbers_U, out=staged_UR)
        return staged_UR
