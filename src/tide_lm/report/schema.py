"""The shape of each file in results/, checked when it is read, so that figures can rely on it.

A shape is a type or several; a list with the shape of its items, and its length or `...` for one at least;
a dictionary of shapes by key, where `str` stands for any key and "?" marks one that may be missing; or
`OrNull`. Only what a figure, the page or a model card reads is listed.
"""

from typing import Any, NamedTuple


class OrNull(NamedTuple):
    shape: Any


NUMBER = (int, float)
NUMBER_OR_NULL = OrNull(NUMBER)
DECILES = [NUMBER_OR_NULL, 10]
MATRIX = [[NUMBER]]


def _each(shape: Any, *keys: str) -> dict[str, Any]:
    return dict.fromkeys(keys, shape)


_GROUPS = _each({"loss": NUMBER_OR_NULL, "tokens": int}, "rare?", "mid?", "common?", "unbinned?")
_BY_DECILE = {"loss_by_decile?": DECILES, "tokens_by_decile?": [int, 10], **_GROUPS}
_LOSSES = {"loss": NUMBER, "tokens": int, **_BY_DECILE}
_WINDOWS = _each(int, "bytes", "window", "stride")
_PROVENANCE = {"provenance?": {"machine?": dict, "versions?": dict}}
_PERPLEXITIES = _each(NUMBER_OR_NULL, "perplexity", "word_perplexity", "bits_per_byte")
_TASK = {"score": NUMBER_OR_NULL, "stderr": NUMBER_OR_NULL, "metric": str, "samples": int, "split": str}
_SPREAD = {"ids": int, "mean": NUMBER_OR_NULL, "deviation": NUMBER_OR_NULL, "histogram": [NUMBER]}
_UPDATES = _each(NUMBER, "frequency", "expected_updates", "occurrences", "ratio_bound")
_FFN = {"members": [[int]], **_each(MATRIX, "input_distance", "slope", "bound", "separation")}
_DISTANCES = {"distance?": MATRIX, "relative?": MATRIX, "collapse_set?": [[int]], "ffn?": OrNull(_FFN)}
_COMPRESSED = {"texts": {str: {**_LOSSES, "perplexity": NUMBER_OR_NULL}}}
_FORM = {"form": str, "bits": int, "blocks": str, **_each(NUMBER, "rank", "weighted", "relative_bytes")}

SCHEMAS: dict[str, dict] = {
    "validation": _LOSSES,
    "perplexity": {"texts": {str: {**_LOSSES, **_WINDOWS, **_PROVENANCE, **_PERPLEXITIES}}},
    "checkpoints": {
        "points": [{"tokens": int, "perplexity": {str: NUMBER_OR_NULL}}],
        "texts": {str: _WINDOWS},
    },
    "benchmarks": {
        "tasks": {str: _TASK},
        "average": NUMBER_OR_NULL,
        "lambada_perplexity": NUMBER_OR_NULL,
        "limit": OrNull(int),
    },
    "norms": {
        "embedding": DECILES,
        "tables": [DECILES],
        "spread": {"edges": [NUMBER], "rare": _SPREAD, "common": _SPREAD},
        "growth": [{"tokens": int, "embedding": DECILES}],
    },
    "updates": {
        "tokens": NUMBER,
        "batch": int,
        "sequence": int,
        "rows": _each(OrNull({"ids": int, **_UPDATES}), *map(str, range(10))),
    },
    "gradients": {
        **_each(DECILES, "embedding_input", "embedding_head", "amplification?"),
        "tables?": [DECILES],
    },
    "collapse": {
        "delta": NUMBER,
        "categories": {str: {"pairs": [[str, 2]], "skipped": [[str, 2]], **_DISTANCES}},
    },
    "routing": {"text": str, "tokens": [int], "by_layer": [[OrNull([NUMBER, ...]), 11], ...]},
    "layer-drop": {"texts": {str: {"change": [NUMBER, ...], "full": NUMBER, "without_any": NUMBER}}},
    "distances": {"tables": [str], "distance": [[NUMBER, ...], ...]},
    "neighbours": {
        "tables": [str],
        **_each({"ids": int, "jaccard": MATRIX}, "rare", "common"),
        "words": {str: {"neighbours": [[str]], "jaccard": [NUMBER]}},
    },
    "compression": {"as_trained": _COMPRESSED["texts"], "forms": [{**_FORM, **_COMPRESSED}]},
    "footprint": {"blocks": int, "rows": [_each(int, "blocks", "bits", "vram_bytes", "ssd_bytes"), ...]},
}


def check_result(name: str, result: Any) -> None:
    """Raise ValueError if a result is not as the commands write it."""
    check(result, {"subject?": dict, **_PROVENANCE, **SCHEMAS.get(name, {})}, name)


def check(value: Any, shape: Any, where: str) -> None:
    """Raise ValueError at the first part of a value that has not its shape, and say which."""
    if isinstance(shape, OrNull):
        if value is not None:
            check(value, shape.shape, where)
        return
    kind: Any = type(shape) if isinstance(shape, dict | list) else shape
    if not isinstance(value, kind):
        names = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
        raise ValueError(f"{where} is {str(value)[:40]!r} and should be {names}")
    if isinstance(value, dict) and isinstance(shape, dict):
        for key, inner in shape.items():
            name = key if key is str else key.removesuffix("?")
            if key is str:
                for each, part in value.items():
                    check(part, inner, f"{where}.{each}")
            elif name in value:
                check(value[name], inner, f"{where}.{name}")
            elif name == key:
                raise ValueError(f"{where} has no {name!r}")
    elif isinstance(value, list) and isinstance(shape, list):
        inner, length = (*shape, None)[:2]
        if (length is ... and not value) or (isinstance(length, int) and len(value) != length):
            raise ValueError(f"{where} has {len(value)} items")
        for place, part in enumerate(value):
            check(part, inner, f"{where}[{place}]")
