"""Do many reads at once with Linux's asynchronous I/O, in two system calls.

Sixteen threads take three times as long (results/cpu/store_reader.json): each of them waits for Python's lock
after every read.
"""

import ctypes
import errno
import os
import platform
import sys
import weakref

import numpy as np

_CALLS = {  # io_setup, io_destroy, io_submit, io_getevents
    "x86_64": (206, 207, 209, 208),
    "aarch64": (0, 1, 2, 4),
}
_REQUEST = np.dtype(  # struct iocb
    [
        ("data", "<u8"),
        ("key", "<u4"),
        ("rw_flags", "<u4"),
        ("opcode", "<u2"),  # 0 is a read
        ("priority", "<i2"),
        ("file", "<u4"),
        ("buffer", "<u8"),
        ("bytes", "<u8"),
        ("offset", "<i8"),
        ("reserved", "<u8"),
        ("flags", "<u4"),
        ("event_file", "<u4"),
    ]
)
_EVENT = np.dtype([("data", "<u8"), ("request", "<u8"), ("result", "<i8"), ("more", "<i8")])


class AsyncReads:
    """Up to `depth` reads under way, for one thread. Raises OSError where the system has no such reads."""

    def __init__(self, depth: int) -> None:
        if not sys.platform.startswith("linux") or platform.machine() not in _CALLS:
            raise OSError(errno.ENOSYS, "no asynchronous reads on this system")
        setup, destroy, self._submit, self._events = _CALLS[platform.machine()]
        self.into: np.ndarray | None = None  # what is read into, to live no shorter than the reads
        self.depth, self._libc = depth, ctypes.CDLL(None, use_errno=True)
        self._context = ctypes.c_ulong(0)
        self._call(setup, ctypes.c_ulong(depth), ctypes.byref(self._context))
        self.close = weakref.finalize(self, self._libc.syscall, ctypes.c_long(destroy), self._context)
        self._events_S = np.zeros(depth, _EVENT)

    def begin(
        self, descriptor: int, first: int, addresses: np.ndarray, offsets: np.ndarray, sizes: np.ndarray
    ) -> int:
        """Begin reads, numbered from `first` on; return how many of them the system had room for."""
        requests = np.zeros(len(offsets), _REQUEST)
        requests["data"], requests["file"] = first + np.arange(len(offsets)), descriptor
        requests["buffer"], requests["offset"], requests["bytes"] = addresses, offsets, sizes
        pointers = requests.ctypes.data + np.arange(len(offsets)) * _REQUEST.itemsize
        return self._call(
            self._submit,
            self._context,
            ctypes.c_long(len(offsets)),
            ctypes.c_void_p(pointers.ctypes.data),
        )

    def done(self) -> tuple[np.ndarray, np.ndarray]:
        """Wait for a read to end; return the numbers of all that have ended, and the bytes of each.

        Bytes below 0 are the number of an error.
        """
        while True:
            try:
                count = self._call(
                    self._events,
                    self._context,
                    ctypes.c_long(1),
                    ctypes.c_long(len(self._events_S)),
                    ctypes.c_void_p(self._events_S.ctypes.data),
                    None,
                )
            except InterruptedError:
                continue
            ended = self._events_S[:count]
            return ended["data"].astype(np.int64), ended["result"].copy()

    def _call(self, number: int, *arguments: object) -> int:
        found = self._libc.syscall(ctypes.c_long(number), *arguments)
        if found < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return found
