"""The shape of each file in results/, checked when it is read, so that figures can rely on it.

A shape is a type; a list with the shape of its items, and its length; a dictionary of shapes by key, where
"?" marks a key that may be missing and `str` stands for any; or two shapes, of which one must fit. A length
is a number or a name: "L" stands for one length, at least 1, throughout a file or an item under `str`, and
"L+1" for one more. A key "*texts" stands for all keys, at least one, which are the same wherever it is. Only
what a figure, the page or a model card reads is listed.
"""

from typing import Any

NUMBER = int | float
NUMBER_OR_NULL = int | float | None
DECILES = [NUMBER_OR_NULL, 10]
_BY_LAYER = [[int], "L"]
_BY_PAIR = [[NUMBER, "L"], "P"]


def _each(shape: Any, *keys: str) -> dict[Any, Any]:
    return dict.fromkeys(keys, shape)


_GROUPS = _each({"loss": NUMBER_OR_NULL, "tokens": int}, "rare?", "mid?", "common?", "unbinned?")
_BY_DECILE = {"loss_by_decile?": DECILES, "tokens_by_decile?": [int, 10], **_GROUPS}
_LOSSES = {"loss": NUMBER, "tokens": int, **_BY_DECILE}
_WINDOWS = _each(int, "bytes", "window", "stride")
_PROVENANCE = {"provenance?": {"machine?": {"gpus?": (None, [str])}, "versions?": dict}}
_PERPLEXITIES = _each(NUMBER_OR_NULL, "perplexity", "word_perplexity", "bits_per_byte")
_SUBJECT = {"model?": str, **_each(int | None, "step?", "tokens?")}
_TASK = {"score": NUMBER_OR_NULL, "stderr": NUMBER_OR_NULL, "metric": str, "samples": int, "split": str}
_SPREAD = {"ids": int, "mean": NUMBER_OR_NULL, "deviation": NUMBER_OR_NULL, "histogram": [NUMBER, "bins"]}
_UPDATES = {"ids": int, **_each(NUMBER, "frequency", "expected_updates", "occurrences", "ratio_bound")}
_FFN = {"members": _BY_LAYER, **_each(_BY_PAIR, "input_distance", "slope", "bound", "separation")}
_DISTANCES = {**_each(_BY_PAIR, "distance", "relative"), "collapse_set": _BY_LAYER, "ffn": (None, _FFN)}
_SKIPPED = {"skipped": [[str, 2]]}
_COMPRESSED = {"*texts": {**_LOSSES, "perplexity": NUMBER_OR_NULL}}
METRICS = {  # a line of metrics.jsonl; "losses" are of the steps since the line before
    **_each(int, "step", "tokens"),
    **_each(NUMBER_OR_NULL, "loss?", "learning_rate?"),
    "losses?": [NUMBER_OR_NULL],
    "timing?": _each(NUMBER_OR_NULL, "tokens_per_s", "memory_gb", "seconds_left"),
}
_FORM = {"form": str, "bits": int, "blocks": str, **_each(NUMBER, "rank", "weighted?", "relative_bytes")}

SCHEMAS: dict[str, dict] = {
    "validation": _LOSSES,
    "perplexity": {"texts": {str: {**_LOSSES, **_WINDOWS, **_PROVENANCE, **_PERPLEXITIES}}},
    "checkpoints": {
        "texts": {"*texts": _WINDOWS},
        "points": [{"tokens": int, "perplexity": {"*texts": NUMBER_OR_NULL}}, "points"],
    },
    "benchmarks": {
        "tasks": {str: _TASK},
        "average": NUMBER_OR_NULL,
        "lambada_perplexity": NUMBER_OR_NULL,
        "limit": int | None,
    },
    "norms": {
        "embedding": DECILES,
        "tables": [DECILES],
        "spread": {"edges": [NUMBER, "bins+1"], "rare": _SPREAD, "common": _SPREAD},
        "growth": [{"tokens": int, "embedding": DECILES}],
    },
    "updates": {
        "tokens": NUMBER,
        "batch": int,
        "sequence": int,
        "rows": {**_each((None, _UPDATES), *map(str, range(10)), "rare", "common"), str: (None, _UPDATES)},
    },
    "gradients": {
        **_each(DECILES, "embedding_input", "embedding_head", "amplification?"),
        "tables?": [DECILES],
    },
    "collapse": {
        "delta": NUMBER,
        "categories": {
            str: ({"pairs": [str, 0], **_SKIPPED}, {"pairs": [[str, 2], "P"], **_SKIPPED, **_DISTANCES})
        },
    },
    "routing": {"text": str, "by_layer": [[(None, [NUMBER, "K+1"]), 11], "L"], "tokens": [int, 11]},
    "layer-drop": {"texts": {"*texts": {"change": [NUMBER, "L"], "full": NUMBER, "without_any": NUMBER}}},
    "distances": {"tables": [str, "K+1"], "distance": [[NUMBER, "K+1"], "K+1"]},
    "neighbours": {
        "tables": [str, "K+1"],
        **_each({"ids": int, "jaccard": [[NUMBER], "K"]}, "rare", "common"),
        "words": {str: {"neighbours": [[str], "K+1"], "jaccard": [NUMBER, "K"]}},
    },
    "words": {
        "against": str,
        **_each(int, "least", "words", "better"),
        "largest": [{"word": str, "times": int, "gain": NUMBER, "sentence": str}],
    },
    "compression": {"as_trained": _COMPRESSED, "forms": [{**_FORM, "texts": _COMPRESSED}, "forms"]},
    "footprint": {"blocks": int, "rows": [_each(int, "blocks", "bits", "vram_bytes", "ssd_bytes"), "rows"]},
}


def check_result(name: str, result: Any) -> None:
    """Raise ValueError if a result is not as the commands write it."""
    check(result, {"subject?": _SUBJECT, **_PROVENANCE, **SCHEMAS.get(name, {})}, name, {})


def check(value: Any, shape: Any, where: str, known: dict[str, Any]) -> None:
    """Raise ValueError at the first part of a value that has not its shape, and say which.

    `known` has the lengths and the keys that names stand for so far.
    """
    if isinstance(shape, tuple):
        first, second = shape
        try:
            check(value, first, where, dict(known))
        except ValueError:
            check(value, second, where, known)
        return
    kind: Any = type(shape) if isinstance(shape, dict | list | None) else shape
    if not isinstance(value, kind):
        name = getattr(kind, "__name__", kind)
        raise ValueError(f"{where} is {str(value)[:40]!r} and should be {name}")
    if isinstance(shape, list):
        inner, length = (*shape, None)[:2]
        _check_length(len(value), length, where, known)
        for place, part in enumerate(value):
            check(part, inner, f"{where}[{place}]", known)
    elif isinstance(shape, dict):
        for key, inner in shape.items():
            if key is str:
                for name, part in value.items():
                    check(part, inner, f"{where}.{name}", dict(known))
                continue
            names = known.setdefault(key, list(value)) if key[0] == "*" else [key.removesuffix("?")]
            if not names:
                raise ValueError(f"{where} is empty")
            for name in names:
                if name in value:
                    check(value[name], inner, f"{where}.{name}", known)
                elif not key.endswith("?"):
                    raise ValueError(f"{where} has no {name!r}")


def _check_length(found: int, length: int | str | None, where: str, known: dict[str, Any]) -> None:
    if isinstance(length, str):
        name, _, more = length.partition("+")
        length = known.setdefault(name, max(found - int(more or 0), 1)) + int(more or 0)
    if length is not None and found != length:
        raise ValueError(f"{where} has {found} items and should have {length}")
