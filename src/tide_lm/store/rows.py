"""Decode the bytes of rows to numbers, to the same bits on any device."""

from collections.abc import Mapping

import numpy as np
import torch

from tide_lm.store.codec import words_of
from tide_lm.store.format import Header

_ROWS_PER_PIECE = 256  # intermediate results take several times the memory of rows


class RowDecoder:
    """Decodes bytes of rows to K x D numbers each, in float32."""

    def __init__(self, header: Header, sections: Mapping[str, np.ndarray]) -> None:
        self.header = header
        self._arrays = {name: torch.from_numpy(array) for name, array in sections.items() if name != "counts"}
        if "levels" in self._arrays:
            self._arrays["words"] = words_of(self._arrays["levels"], header.bits)
        if "basis" in self._arrays:
            self._arrays["basis"] = self._arrays["basis"].to(torch.float32)
        self._device = torch.device("cpu")

    def __call__(self, bytes_UR: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        if torch.compiler.is_compiling() or len(bytes_UR) <= _ROWS_PER_PIECE:
            return self._decoded(bytes_UR).to(dtype)
        size = len(bytes_UR), self.header.blocks, self.header.hidden
        rows_UKD = torch.empty(size, dtype=dtype, device=bytes_UR.device)
        for some, into in zip(bytes_UR.split(_ROWS_PER_PIECE), rows_UKD.split(_ROWS_PER_PIECE), strict=True):
            into.copy_(self._decoded(some))
        return rows_UKD

    def _decoded(self, bytes_UR: torch.Tensor) -> torch.Tensor:
        header, arrays = self.header, self.arrays_on(bytes_UR.device)
        numbers_UN = header.codec.decode(bytes_UR, arrays.get("words"))
        if "columns" in arrays:
            numbers_UN = numbers_UN * arrays["columns"]
        if header.ranks:
            parts = zip(numbers_UN.split(header.ranks, 1), arrays["basis"].split(header.ranks), strict=True)
            with torch.autocast(bytes_UR.device.type, enabled=False):
                numbers_UN = torch.cat([coefficients @ basis for coefficients, basis in parts], 1)
        return numbers_UN.unflatten(1, (header.blocks, header.hidden))

    def arrays_on(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return what all rows share: levels and their words, columns, the basis, as far as there are any."""
        if device != self._device:
            self._arrays = {name: array.to(device) for name, array in self._arrays.items()}
            self._device = device
        return self._arrays
