"""The page's section on rows in memory, from results/study/cache.json."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from studies.figures import cache_hits
from studies.markdown import table

Cache = Mapping[str, Any]  # what `studies.cache.measure` found


def read(results: Path) -> Cache | None:
    """What `python -m studies cache` wrote, if it did."""
    path = results / "cache.json"
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} is no JSON ({error}): make it again with `python -m studies cache`"
        ) from None


def section(cache: Cache) -> Iterable[str]:
    """What the cache of a store finds, by its bytes."""
    texts, curve, panel = cache["texts"], cache["curve"], cache_hits(cache)
    lengths = ", ".join(f"{text['tokens']:,} tokens of {name}" for name, text in texts.items())
    yield "## Rows in memory"
    yield (
        "How many rows of a store need not be read from disk. The store has the shape of "
        f"`{cache['model']}` in {cache['bits']} bits and the {cache['vocab_size']:,} ids of this study: "
        f"{cache['row_bytes']:,} bytes a row, {cache['table_bytes'] / 2**20:.1f} MiB in all. The cache has "
        "the rows that were used last, and begins with those that are most frequent in the training text. "
        f"Held-out text is looked up token by token: {lengths}. "
        "[cache.json](../results/study/cache.json) has all of it, and the command."
    )
    yield f"![{panel.alt}](study/cache.svg)"
    columns = ["cache, MiB", "vocabulary", *texts, *(f"{name}, by frequency alone" for name in texts)]
    yield table(columns, map(_rates, curve))
    yield (
        "In percent: how much of the vocabulary has a place, and hits. By frequency alone, the rows that are "
        "most frequent in training stay whatever is read. Dashed is a cache that begins empty."
    )
    for point in curve:
        if point["cache_bytes"] == cache["default_cache_bytes"]:
            yield from _details(cache, point)


def _rates(point: Mapping[str, Any]) -> list[str]:
    found = point["texts"].values()
    rates = [*(text["decode"]["hit_rate"] for text in found), *(text["by_frequency"] for text in found)]
    return [_mebibytes(point), *_percent(point["share"], *rates)]


def _details(cache: Cache, point: Mapping[str, Any]) -> Iterable[str]:
    """All that was measured with one size."""
    rows = []
    for name, found in point["texts"].items():
        decode, prefill = found["decode"], found["prefill"]
        rates = decode["hit_rate"], found["by_frequency"], found["by_use"], prefill["hit_rate"]
        costs = decode["bytes_per_token"], decode["mean_us"], decode["median_us"]
        different = f"{cache['texts'][name]['different']:,}"
        rows.append([name, different, *_percent(*rates), *(f"{cost:,.0f}" for cost in costs)])
    columns = ["text", "different tokens", "hits", "by frequency alone", "by use alone", "prefill"]
    yield f"With {_mebibytes(point)} MiB, the default:"
    yield table([*columns, "row bytes a token", "mean µs", "median µs"], rows)
    yield (
        f"Prefill looks up {cache['at_once']['prefill']:,} tokens at once, and its hits are of the different "
        "ones. Row bytes are read from disk; they and times are of single tokens, hits and misses together."
    )


def _mebibytes(point: Mapping[str, Any]) -> str:
    return f"{point['cache_bytes'] / 2**20:,.1f}".removesuffix(".0")


def _percent(*shares: float) -> list[str]:
    return [f"{100 * share:.1f}" for share in shares]
