"""Compile CUDA C++ at run time, with the NVRTC that torch brings along, and launch it."""

import ctypes
import importlib.util
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

# CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, and ..._PREFERRED_SHARED_MEMORY_CARVEOUT
_DYNAMIC_SHARED, _CARVEOUT = 8, 9


def compile_source(source: str, macros: Mapping[str, int], architecture: str, folder: Path) -> bytes:
    """Return machine code for an architecture, as in `sm_90`; the source may include files of a folder."""
    nvrtc, program = _compiler(), ctypes.c_void_p()
    _check_compiler(
        nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), None, 0, None, None)
    )
    try:
        options = [f"--gpu-architecture={architecture}", "--std=c++17", "-default-device"]
        options.append(f"--include-path={folder}")
        options += [f"-D{name}={value}" for name, value in macros.items()]
        words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), words):
            said = _text(nvrtc, program, "ProgramLog").decode()
            raise ValueError(f"a kernel does not compile for {architecture}: {said}")
        return _text(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


class Module:
    """Machine code on the current device."""

    def __init__(self, code: bytes) -> None:
        torch.cuda.current_stream()  # makes torch's context the current one
        self._handle = ctypes.c_void_p()
        _call("cuModuleLoadData", ctypes.byref(self._handle), code)
        weakref.finalize(self, _driver().cuModuleUnload, self._handle).atexit = False

    def kernel(self, name: str, threads: int, shared: int) -> Callable[..., None]:
        """Return a function that launches a kernel in so many blocks on the current stream.

        A block has so many threads, and bytes of shared memory; all blocks must be able to run at the same
        time. Arguments are ctypes' numbers and structures.
        """
        function = ctypes.c_void_p()
        _call("cuModuleGetFunction", ctypes.byref(function), self._handle, name.encode())
        _call("cuFuncSetAttribute", function, _CARVEOUT, 100)  # as all have it, none waits for it to change
        _call("cuFuncSetAttribute", function, _DYNAMIC_SHARED, shared)
        return partial(self._launch, function, threads, shared)

    def _launch(self, function: ctypes.c_void_p, threads: int, shared: int, blocks: int, *args: Any) -> None:
        places = (ctypes.c_void_p * len(args))(*(ctypes.addressof(arg) for arg in args))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        size = (blocks, 1, 1, threads, 1, 1, shared)
        _call("cuLaunchCooperativeKernel", function, *size, stream, places)

    def number(self, name: str) -> int:
        """Return a constant of the source."""
        place, size, value = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_int()
        _call("cuModuleGetGlobal_v2", ctypes.byref(place), ctypes.byref(size), self._handle, name.encode())
        _call("cuMemcpyDtoH_v2", ctypes.byref(value), place, ctypes.c_size_t(4))
        return value.value


def _candidates() -> Iterator[str]:
    major = (torch.version.cuda or "13").split(".")[0]
    yield f"libnvrtc.so.{major}"
    nvidia = importlib.util.find_spec("nvidia")
    for folder in (nvidia.submodule_search_locations or ()) if nvidia else ():
        yield from map(str, sorted(Path(folder).glob(f"*/lib/libnvrtc.so.{major}*")))


@cache
def _compiler() -> ctypes.CDLL:
    for name in _candidates():
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise ValueError("there is no libnvrtc, which comes with torch for CUDA: pip install nvidia-cuda-nvrtc")


def _check_compiler(nvrtc: ctypes.CDLL, status: int) -> None:
    if status:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise ValueError(f"libnvrtc failed: {nvrtc.nvrtcGetErrorString(status).decode()}")


def _text(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, text)
    return text.raw if what == "CUBIN" else text.value


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *args: Any) -> None:
    if status := getattr(_driver(), name)(*args):
        message = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(message))
        raise RuntimeError(f"{name} failed: {(message.value or b'').decode()} ({status})")
