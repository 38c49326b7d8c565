"""The hit rate of a cache of rows by its bytes, on held-out text, with a store on disk.

Shapes: V vocabulary, N tokens of a text, U different tokens of one fetch, R bytes of a row.
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from tide_lm.bench.store import random_store
from tide_lm.data import tokenizers
from tide_lm.data.frequency import FrequencyBins
from tide_lm.evaluation.perplexity import TextSize, document_tokens
from tide_lm.spec import presets
from tide_lm.spec.config import Residence
from tide_lm.store.reader import StoredRows, StoreFile

CACHE_BYTES = Residence().cache_bytes
AT_ONCE = {"decode": 1, "prefill": 2048}  # tokens of a fetch


def measure(
    texts: Mapping[str, Path],
    data: Path,
    model: str,
    bits: int,
    most_tokens: int,
    folder: Path,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Look texts up in a store of a preset's rows, with the ids and counts of prepared data, at all budgets.

    The store holds random bytes, and is in `folder` for as long as it takes.
    """
    shape = presets.get(model).model
    if not shape.num_memory_blocks:
        raise ValueError(f"{model} has no rows to keep: name a preset with memory, such as tide-8e-1b")
    counts_V = FrequencyBins.from_prepared(data).counts_V
    tokenizer = tokenizers.load(str(data / "tokenizer"))
    streams = {name: first_tokens(text, tokenizer, most_tokens) for name, text in texts.items()}
    with TemporaryDirectory(dir=folder, prefix=".cache-study-") as place:
        path = Path(place) / "rows.tide"
        header = random_store(path, replace(shape, vocab_size=len(counts_V)), bits, counts_V)
        file, table_bytes = StoreFile(path), header.vocab_size * header.codec.row_bytes
        curve = []
        for cache_bytes in budgets(table_bytes):
            curve.append(at_budget(file, cache_bytes, streams))
            rates = (
                f"{name} {found['decode']['hit_rate']:.1%}" for name, found in curve[-1]["texts"].items()
            )
            log(f"{cache_bytes / 2**20:,.1f} MiB: hits {', '.join(rates)}")
    return {
        "model": model,
        "bits": bits,
        "vocab_size": header.vocab_size,
        "row_bytes": header.codec.row_bytes,
        "table_bytes": table_bytes,
        "default_cache_bytes": CACHE_BYTES,
        "at_once": AT_ONCE,
        "direct": file.is_direct,
        "texts": {
            name: {
                "source": str(texts[name]),
                "sha256": hashlib.sha256(tokens_N.tobytes()).hexdigest(),  # of the ids
                "tokens": len(tokens_N),
                "different": len(np.unique(tokens_N)),
            }
            for name, tokens_N in streams.items()
        },
        "curve": curve,
    }


def first_tokens(text: Path, tokenizer: PreTrainedTokenizerBase, most: int) -> np.ndarray:
    """Return the first tokens of a text, document by document."""
    pieces, tokens = [], 0
    for piece in chain.from_iterable(document_tokens(str(text), "text", tokenizer, TextSize())):
        pieces.append(piece)
        tokens += len(piece)
        if tokens >= most:
            break
    if not tokens:
        raise ValueError(f"{text} holds no tokens: give a file with text")
    return np.concatenate(pieces)[:most]


def budgets(table_bytes: int) -> list[int]:
    """Return the cache sizes: nothing, powers of two from 1 MiB on, and the whole table."""
    powers = (1 << power for power in range(20, table_bytes.bit_length()))
    return [0, *(size for size in powers if size < table_bytes), table_bytes]


def at_budget(file: StoreFile, cache_bytes: int, streams: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return the hits of a cache of so many bytes on each text, and the hits of two simpler caches.

    `by_frequency` has the rows that are most frequent in training all the time, and `by_use` those that were
    used last; token by token, as decoding does.
    """
    header = file.header
    rows = min(cache_bytes // header.codec.row_bytes, header.vocab_size)
    hottest = np.argsort(-file.sections["counts"].astype(np.float64), kind="stable")[:rows]
    texts = {}
    for name, tokens_N in streams.items():
        ways = {way: look_up(StoredRows(file, cache_bytes), tokens_N, size) for way, size in AT_ONCE.items()}
        rates = {
            "by_frequency": float(np.isin(tokens_N, hottest).mean()),
            "by_use": hits_by_use(tokens_N, rows) / len(tokens_N),
        }
        texts[name] = ways | rates
    return {"cache_bytes": cache_bytes, "rows": rows, "share": rows / header.vocab_size, "texts": texts}


def look_up(rows: StoredRows, tokens_N: np.ndarray, at_once: int) -> dict[str, Any]:
    """Fetch the rows of a text: the distinct ones of so many tokens at a time."""
    into_UR = np.empty((at_once, rows.file.header.codec.row_bytes), np.uint8)
    seconds = []
    for start in range(0, len(tokens_N), at_once):
        tokens_U = np.unique(tokens_N[start : start + at_once])
        started = time.perf_counter()
        rows.fetch(tokens_U, into_UR[: len(tokens_U)])
        seconds.append(time.perf_counter() - started)
    found = rows.counters
    return {
        "hits": found.hits,
        "misses": found.misses,
        "hit_rate": found.hits / (found.hits + found.misses),
        "bytes_per_token": found.bytes / len(tokens_N),
        "mean_us": 1e6 * mean(seconds),
        "median_us": 1e6 * median(seconds),
    }


def hits_by_use(tokens_N: np.ndarray, rows: int) -> int:
    """Return the hits of a cache that begins empty and drops the row that was used least recently."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for token in tokens_N.tolist():
        hits += token in cached
        cached[token] = None
        cached.move_to_end(token)
        if len(cached) > rows:
            cached.popitem(last=False)
    return hits
