"""Files and folders that are written whole or not at all, and locks on them."""

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

_CURES = {
    errno.ENOSPC: "the disk is full; free some space, or choose a place on another disk",
    errno.EDQUOT: "your quota on this disk is used up; free some space, or choose another place",
    errno.EROFS: "the disk can only be read; choose another place",
    errno.EACCES: "you have no permission; choose another place, or change the permission",
    errno.EPERM: "the system does not permit it; choose another place",
    errno.ENOENT: "nothing can be made there; choose another place",
    errno.ENOTDIR: "there is a file where a folder is needed; choose another place",
    errno.EEXIST: "there is a file where a folder is needed; choose another place",
    errno.EISDIR: "it is a folder, and a file is needed; name a file",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
}


class WriteError(OSError):
    """Something cannot be written; the message names it, the reason and the cure."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name what is written in an error of the system, which may say neither the file nor what to do."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(f"cannot write {path}: {in_words(error)}") from error


def in_words(error: OSError) -> str:
    """Return the reason why something could not be written, and the cure if there is one."""
    return _CURES.get(error.errno or 0) or error.strerror or str(error)


def sentence(error: OSError) -> str:
    """Return an error of the system as a line for a user."""
    if error.errno is None or isinstance(error, WriteError):
        return str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return f"cannot write {error.filename or 'a file'}: {in_words(error)}"
    reason = error.strerror or str(error)
    return f"{error.filename} cannot be used: {reason}" if error.filename else reason


def make_folder(folder: Path) -> Path:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def check_writable(folder: Path) -> None:
    """Check that a folder can be written, or made; long work calls this before it starts."""
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    with writing(folder), TemporaryDirectory(dir=there, prefix=".tide-lm-"):
        pass


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
    with writing(path):
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
        with writing(final):
            temporary.mkdir(parents=True)
        try:
            yield temporary
        except OSError as error:
            if error.errno is None or error.filename is not None:
                raise
            raise WriteError(f"cannot write {final}: {in_words(error)}") from error  # it names no file
        with writing(final):
            publish(temporary, final)
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
    make_folder(out.parent)
    busy = f"{out} is being {work} by another process: wait for it, or choose another --out"
    with locked(out.with_name(f".{out.name}.lock"), busy):
        check_free(out)  # again, since another may have made it meanwhile
        yield


def check_free(out: Path) -> None:
    """Check that a folder can be made where there is none, or an empty one."""
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder: remove it, or choose another --out")
    if os.path.ismount(out):
        raise ValueError(f"{out} is where a disk is mounted, and cannot be replaced: choose a folder in it")
    check_writable(out.absolute().parent)  # where the folder is filled under another name
