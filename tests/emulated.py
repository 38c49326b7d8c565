"""The decode kernel on the host: its own source, by a C++ compiler, with fibers for its threads."""

import ctypes
import fcntl
import hashlib
import shutil
import subprocess
from pathlib import Path

import torch

from tide_lm.ops.decode import SOURCE, Args, DecodeShape, DecodeWeights, RowBytes, buffers

COMPILER = shutil.which("g++") or shutil.which("clang++")
HEADER = Path(__file__).with_name("emulate.hpp")
FLAGS = ["-O1", "-std=c++17", "-w", "-shared", "-fPIC"]
FLAGS += ["-U_FORTIFY_SOURCE"]  # which forbids jumps between stacks
FLAGS += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]  # as a GPU wants it
_ENTRIES = """
extern "C" void run_decode(const Args *args, unsigned blocks, unsigned seed) {
    run([=] { decode(args); }, blocks, ALL_THREADS, ROOM, seed);
}
extern "C" int words() { return mail_words; }
"""


def built(folder: Path, macros: dict[str, int]) -> Path:
    """Compile the kernel, unless the same was compiled before; another process that wants it waits."""
    assert COMPILER is not None
    defines = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    source = f'#include "{HEADER}"\n{defines}#include "{SOURCE}"\n{_ENTRIES}'
    version = subprocess.run([COMPILER, "--version"], check=True, capture_output=True, text=True).stdout
    texts = [path.read_text() for path in (HEADER, *sorted(SOURCE.parent.iterdir()))]
    parts = [source, *texts, version, *FLAGS]
    library = folder / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}.so"
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            library.with_suffix(".cpp").write_text(source)
            unfinished = library.with_suffix(".tmp")
            command = [COMPILER, *FLAGS, "-o", unfinished, library.with_suffix(".cpp")]
            subprocess.run(command, check=True)
            unfinished.rename(library)
    return library


class EmulatedKernel:
    """The `DecodeKernel` of tensors on the host. `blocks` run at once; `folder` keeps what is compiled."""

    def __init__(self, folder: Path, shape: DecodeShape, blocks: int, **macros: int) -> None:
        self.shape, self.blocks, self.seed = shape, blocks, 0
        self._code = ctypes.CDLL(str(built(folder, shape.macros(blocks, 16384) | macros)))

    def bind(
        self,
        weights: DecodeWeights,
        cache_L2GTd: torch.Tensor,
        rope_Td: torch.Tensor,
        ids_1: torch.Tensor,
        previous_1: torch.Tensor,
        place_1: torch.Tensor,
        eps: float,
        value_scale: float,
        rows: RowBytes | None = None,
    ) -> None:
        given = {"rope": rope_Td, "cache": cache_L2GTd, "token": ids_1, "place": place_1}
        given["previous"] = previous_1
        given |= buffers(self.shape, self.blocks, self._code.words(), ids_1.device)
        self.logits_V, self.rows_KD = given["logits"], given["rows"]
        self._kept = weights, given, rows
        self._args = Args.of(vars(weights) | given, rows, eps, value_scale)

    def decode(self) -> None:
        self.seed += 1
        if self._args.bytes:
            self.rows_KD.fill_(torch.nan)  # which nothing may read before it is looked up
        self._code.run_decode(ctypes.byref(self._args), self.blocks, self.seed)
