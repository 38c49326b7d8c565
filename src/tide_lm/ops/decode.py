"""Decode one token of one sequence in one launch of the kernel in decode_kernel/ (docs/engine.md).

Shapes: L layers, D hidden, G key heads, T positions, d of a head, V rows of the tables, R bytes, K blocks.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from tide_lm.ops.nvrtc import Module, compile_source

SOURCE = Path(__file__).with_name("decode_kernel") / "decode.cu"
_BYTES_UNDER_WAY = 1 << 15  # copies of a block: with more all wait longer, with fewer memory is idle
_WARPS = (8, 6, 4)
_SPLITS = 16
_EARLY = 3  # readers look at a vector when all blocks but one in so many, two thirds, have written


@dataclass(frozen=True)
class DecodeShape:
    """The sizes that the kernel is compiled for, by their names in decode_kernel/sizes.cuh."""

    D: int
    F: int
    H: int
    KV: int
    HD: int
    L: int
    V: int
    K: int = 0
    PAIR_ROWS: int = 0
    GATES: int = 0
    BITS: int = 0
    ROW_GROUP: int = 32

    @property
    def slots(self) -> int:
        return self.K + 1 if self.K else 0

    def why_not(self, device: torch.device) -> str | None:
        """Return what keeps the kernel from these sizes on a device, if anything does."""
        lanes = self.HD // 8
        if self.HD % 16 or lanes & (lanes - 1) or lanes > 32:
            return f"heads of {self.HD} numbers"
        if self.D % 8 or self.F % 8:
            return "sizes that 8 does not divide"
        if self.slots > 32:
            return f"more than 31 blocks ({self.K})"
        try:
            self.macros(*_sizes(device))
        except ValueError as error:
            return str(error)
        return None

    def macros(self, processors: int, shared: int) -> dict[str, int]:
        """Return the macros for a device: its multiprocessors, and bytes of shared memory per block."""
        if processors < self.KV:
            raise ValueError(f"{self.KV} key heads, more than {processors} multiprocessors")
        slot = max(4 * self.D, 4 * self.H * self.HD, 2 * self.F)
        slot += -slot % 16
        group = self.H // self.KV
        share = -(-self.D // processors)
        held = 4096 + 4 * share * self.K
        held += 2 * max(self.D, self.F + 32, self.H * self.HD)
        limit = max(2, min(_BYTES_UNDER_WAY, shared // 4) // slot)
        for warps in _WARPS:
            merged = 4 * group * warps * (self.HD + 2) + 4 * (group + 3) * self.HD
            if (warps + limit) * (slot + 16) + held + merged <= shared:
                break
        else:
            raise ValueError(f"rows of {slot} bytes, too long for {shared} bytes of shared memory")
        return {
            **vars(self),
            "S": self.slots,
            "SPLITS": max(1, min(_SPLITS, processors // self.KV)),
            "WARPS": warps,
            "ROOM": shared,
            "SLOT": slot,
            "LIMIT": limit,
            "EARLY": _EARLY,
            "SHARE": share,
        }


@dataclass(frozen=True)
class DecodeWeights:
    """Weights in bfloat16, stacked by layers; the head may be the embedding.

    `qkv` ends with the gates of rows in values, `ffn` is gate, up and router; rows of 0 fill both up to
    multiples of 8.
    """

    qkv: torch.Tensor
    o: torch.Tensor
    ffn: torch.Tensor
    down: torch.Tensor
    embed: torch.Tensor
    head: torch.Tensor
    norm1: torch.Tensor
    norm2: torch.Tensor
    norm3: torch.Tensor


@dataclass(frozen=True)
class RowBytes:
    """All rows, on the device or in pinned memory, and `which` of them are wanted.

    That is the token itself, or the places that the host gives its rows. Tables as trained have gains; packed
    rows have levels and columns.
    """

    bytes_VR: torch.Tensor
    which: torch.Tensor
    gains_KD: torch.Tensor | None = None
    levels: torch.Tensor | None = None
    columns: torch.Tensor | None = None


class Args(ctypes.Structure):
    """The arguments of the kernel, as decode_kernel/sizes.cuh has them."""

    _fields_ = (
        *((field, ctypes.c_void_p) for field in DecodeWeights.__dataclass_fields__),
        *((name, ctypes.c_void_p) for name in ("rope", "rows", "cache", "mail", "logits", "best")),
        *((name, ctypes.c_void_p) for name in ("token", "previous", "place", "step", "times")),
        *((name, ctypes.c_void_p) for name in ("bytes", "which", "gains", "levels", "columns")),
        ("stride", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("value_scale", ctypes.c_float),
        ("T", ctypes.c_int),
    )

    @classmethod
    def of(
        cls, tensors: Mapping[str, torch.Tensor], rows: RowBytes | None, eps: float, value_scale: float
    ) -> "Args":
        """Point at tensors, which must outlive the arguments. Without rows, fill `rows` before a launch."""
        args = cls(eps=eps, value_scale=value_scale, T=tensors["cache"].shape[-2])
        given: dict[str, torch.Tensor | None] = dict(tensors)
        if rows is not None:
            args.stride = rows.bytes_VR.stride(0)
            given |= {"bytes": rows.bytes_VR, "which": rows.which, "gains": rows.gains_KD}
            given |= {"levels": rows.levels, "columns": rows.columns}
        for name, tensor in given.items():
            setattr(args, name, None if tensor is None else tensor.data_ptr())
        return args


def buffers(shape: DecodeShape, blocks: int, words: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Allocate what the kernel writes in so many blocks, by its names."""
    return {
        "rows": torch.zeros(max(shape.K, 1), shape.D, device=device),
        "logits": torch.zeros(shape.V, device=device),
        "mail": torch.zeros(words, dtype=torch.int64, device=device),
        "best": torch.zeros(blocks, dtype=torch.int64, device=device),
        "step": torch.zeros(1, dtype=torch.int32, device=device),
    }


class DecodeKernel:
    """Reads a token, the one before it and its place; leaves logits, and the next ones with the likeliest."""

    def __init__(
        self,
        shape: DecodeShape,
        weights: DecodeWeights,
        cache_L2GTd: torch.Tensor,
        rope_Td: torch.Tensor,
        ids_1: torch.Tensor,
        previous_1: torch.Tensor,
        place_1: torch.Tensor,
        rows: RowBytes | None,
        eps: float,
        value_scale: float,
        changes: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Compile the kernel; `changes` of macros are for measuring, such as TIMES, which fills `times`."""
        device = ids_1.device
        self.blocks, shared = _sizes(device)
        macros = {**shape.macros(self.blocks, shared), **changes}
        architecture = "sm_{}{}a".format(*torch.cuda.get_device_capability(device))
        module = Module(compile_source(SOURCE.read_text(), macros, architecture, SOURCE.parent))
        self._decode = module.kernel("decode", module.number("threads"), shared)
        given = {"rope": rope_Td, "cache": cache_L2GTd, "token": ids_1, "place": place_1}
        given["previous"] = previous_1
        given |= buffers(shape, self.blocks, module.number("mail_words"), device)
        if "TIMES" in macros:
            self.times = given["times"] = ids_1.new_zeros(shape.L * self.blocks * 16)
        self.logits_V, self.rows_KD = given["logits"], given["rows"]
        self._kept = weights, given, rows  # what the kernels read, as long as they do
        args = Args.of(vars(weights) | given, rows, eps, value_scale)
        self._args = torch.frombuffer(bytearray(args), dtype=torch.uint8).to(device)
        self._place = ctypes.c_void_p(self._args.data_ptr())

    def decode(self) -> None:
        self._decode(self.blocks, self._place)


def _sizes(device: torch.device) -> tuple[int, int]:
    """Return the number of multiprocessors, and the bytes of shared memory per block."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, getattr(properties, "shared_memory_per_block_optin", 49152)
