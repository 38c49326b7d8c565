"""Files and folders that are written whole or not at all, and locks on them."""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file under a temporary name, sync it and rename it."""
    with _written_whole(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def copy_atomically(source: Path, path: Path) -> None:
    """Copy a file under a temporary name, sync it and rename it."""
    with _written_whole(path) as temporary:
        shutil.copyfile(source, temporary)


@contextmanager
def _written_whole(path: Path) -> Iterator[Path]:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of entries, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def write_folder(final: Path) -> Iterator[Path]:
    """Give a temporary folder to fill; it takes the place of `final`, or is removed after an error."""
    temporary = final.with_name(f".{final.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        publish(temporary, final)
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(final)) from error  # a full disk names no file
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish(folder: Path, final: Path) -> None:
    """Sync all of a folder, then rename it to `final`, which it replaces."""
    mask = os.umask(0)
    os.umask(mask)
    for path in (*folder.rglob("*"), folder):
        if path.is_file():
            path.chmod(0o666 & ~mask)  # some libraries let only the owner read
        sync(path)
    before = final.with_name(f".{final.name}.before.tmp")
    shutil.rmtree(before, ignore_errors=True)
    if final.exists():
        final.rename(before)
    folder.rename(final)
    sync(final.parent)
    shutil.rmtree(before, ignore_errors=True)


@contextmanager
def locked(path: Path, busy: str, patience: float = 0) -> Iterator[None]:
    """Hold a lock file until the context or the process ends, and then remove it.

    If another process holds it for longer than `patience` seconds, raise an error that says `busy`.
    """
    given_up = time.monotonic() + patience
    while True:
        with path.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= given_up:
                    raise ValueError(busy) from None
                time.sleep(0.5)
                continue
            if not os.fstat(file.fileno()).st_nlink:  # its holder removed it after it was opened here
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


@contextmanager
def claimed(out: Path, work: str) -> Iterator[None]:
    """Reserve the folder `out`, which must be free, for the length of the context.

    `work` is a participle, as in "prepared": an error tells other processes what is being done.
    """
    check_free(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    busy = f"{out} is being {work} by another process: wait for it, or choose another --out"
    with locked(out.with_name(f".{out.name}.lock"), busy):
        check_free(out)  # again, since another may have made it meanwhile
        yield


def check_free(out: Path) -> None:
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder: remove it, or choose another --out")
