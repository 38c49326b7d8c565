"""Tables and the figure of rows in memory, from results/study/cache.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from studies.figures import cache_hits
from studies.markdown import table

Cache = Mapping[str, Any]  # what `studies.cache.measure` found


def read(results: Path) -> Cache | None:
    """Read what `python -m studies cache` wrote; return None if it has not run."""
    path = results / "cache.json"
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} is no JSON ({error}): make it again with `python -m studies cache`"
        ) from None


def store(cache: Cache) -> str:
    """Return the store that is read, and the texts that are looked up in it."""
    rows = {
        "shape": f"`{cache['model']}`",
        "bits per number": f"{cache['bits']}",
        "vocabulary, token ids": f"{cache['vocab_size']:,}",
        "bytes per row, without its checksum": f"{cache['row_bytes']:,}",
        "all rows, MiB": f"{cache['table_bytes'] / 2**20:.1f}",
        **{f"tokens of {name}": f"{text['tokens']:,}" for name, text in cache["texts"].items()},
        "tokens at once in prefill": f"{cache['at_once']['prefill']:,}",
    }
    return table(["store and texts", "value"], rows.items())


def figure(cache: Cache) -> str:
    """Return the figure, with its numbers in words."""
    return f"![{cache_hits(cache).alt}](study/cache.svg)"


def hits(cache: Cache) -> str:
    """Return the hit rate of a cache by its bytes."""
    texts = cache["texts"]
    named = [*(f"{name}, %" for name in texts), *(f"{name}, by frequency alone, %" for name in texts)]
    return table(["cache, MiB", "vocabulary, %", *named], map(_rates, cache["curve"]))


def _rates(point: Mapping[str, Any]) -> list[str]:
    found = point["texts"].values()
    rates = [*(text["decode"]["hit_rate"] for text in found), *(text["by_frequency"] for text in found)]
    return [_mebibytes(point), *_percent(point["share"], *rates)]


def with_default(cache: Cache) -> str:
    """Return all that was measured with the default size."""
    (point,) = (one for one in cache["curve"] if one["cache_bytes"] == cache["default_cache_bytes"])
    rows = []
    for name, found in point["texts"].items():
        decode, prefill = found["decode"], found["prefill"]
        rates = decode["hit_rate"], found["by_frequency"], found["by_use"], prefill["hit_rate"]
        costs = decode["bytes_per_token"], decode["mean_us"], decode["median_us"]
        different = f"{cache['texts'][name]['different']:,}"
        rows.append([name, different, *_percent(*rates), *(f"{cost:,.0f}" for cost in costs)])
    kinds = ("hits", "hits by frequency alone", "hits by use alone", "hits in prefill")
    first = [f"text, with {_mebibytes(point)} MiB", "different tokens", *(f"{kind}, %" for kind in kinds)]
    return table([*first, "row bytes per token", "mean µs", "median µs"], rows)


def _mebibytes(point: Mapping[str, Any]) -> str:
    return f"{point['cache_bytes'] / 2**20:,.1f}".removesuffix(".0")


def _percent(*shares: float) -> list[str]:
    return [f"{100 * share:.1f}" for share in shares]
