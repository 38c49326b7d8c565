"""A small store that tests share."""

import numpy as np

from tide_lm.store.format import Header, checksum, write_store

FINGERPRINT = "0123456789abcdef" * 4
LEVELS, COLUMNS = np.linspace(-1, 1, 16, dtype="<f4"), np.ones(96, "<f4")
HEADER = Header(
    vocab_size=50,
    blocks=3,
    hidden=32,
    bits=4,
    group=32,
    ranks=(),
    fingerprint=FINGERPRINT,
    checksums={"levels": checksum(LEVELS), "columns": checksum(COLUMNS)},
)


def written(path, header=HEADER, sections=None, sizes=(50,)):
    """A store with rows of random bytes, which come so many at once."""
    random = np.random.default_rng(0)
    rows = [random.integers(256, size=(size, header.codec.row_bytes), dtype=np.uint8) for size in sizes]
    sections = {"levels": LEVELS, "columns": COLUMNS} if sections is None else sections
    write_store(path, header, sections, rows)
    return np.concatenate(rows)
