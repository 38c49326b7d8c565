"""Files that other parts read: written whole or not at all, with what is needed to run them again."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Writes under a temporary name, syncs, then renames."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
