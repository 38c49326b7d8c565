"""The command `tide-lm` in tests: in this process, or in one of its own where that is what is tested."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest import mock


@dataclass(frozen=True)
class Done:
    """What a call left, under the names that `subprocess` gives it."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def said(self) -> str:
        """stderr in one line, without the frame that wrong calls are shown in."""
        return " ".join(self.stderr.replace("│", " ").split())


def tide_lm(*arguments: object, env: Mapping[str, str] | None = None, stdin: str = "") -> Done:
    """Run `tide-lm` in this process, since a new one takes seconds to load torch.

    An exception that a user would see as a traceback reaches the test. `env` adds to the environment, in
    which lines are so long that no path is broken.
    """
    from tide_lm.cli import main

    starts = (stdin.encode(), b"", b"")
    files = [io.TextIOWrapper(io.BytesIO(start), "utf-8", write_through=True) for start in starts]
    status: object = 0
    with (
        mock.patch.object(sys, "argv", ["tide-lm", *map(str, arguments)]),
        mock.patch.object(sys, "stdin", files[0]),
        mock.patch.dict(os.environ, {"COLUMNS": "1000", **(env or {})}),  # what the command sets goes with it
        redirect_stdout(files[1]),
        redirect_stderr(files[2]),
    ):
        try:
            main()
        except SystemExit as end:
            status = end.code
    if isinstance(status, str):  # as the interpreter does with it
        files[2].write(status + "\n")
        status = 1
    stdout, stderr = (file.buffer.getvalue().decode() for file in files[1:])
    return Done(int(status or 0), stdout, stderr)


def result_of(*arguments: object, **options) -> dict:
    """Run a command that must succeed, and return the JSON that it prints."""
    done = tide_lm(*arguments, "--json", **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def process(*arguments: object, **options) -> subprocess.CompletedProcess:
    """Run `tide-lm` in a process of its own: for signals, locks, limits, terminals and what is imported."""
    return subprocess.run(call(*arguments), capture_output=True, text=True, **{"timeout": 600, **options})


def call(*arguments: object) -> list[str]:
    """The command line of `tide-lm` in a process of its own."""
    return [sys.executable, "-m", "tide_lm", *map(str, arguments)]
