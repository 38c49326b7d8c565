"""The shape of each file in results/, checked when it is read, so that figures can rely on it.

A shape is a type or several; a list with the shape of its items, and its length or `...` for one at least;
a dictionary of shapes by key, where `str` stands for any key and "?" marks one that may be missing; or
`OrNull`. What no figure, page or model card reads is not listed.
"""

from typing import Any, NamedTuple


class OrNull(NamedTuple):
    shape: Any


NUMBER = (int, float)
NUMBER_OR_NULL = OrNull(NUMBER)
DECILES = [NUMBER_OR_NULL, 10]
MATRIX = [[NUMBER]]
_GROUP = {"loss": NUMBER_OR_NULL, "tokens": int}
_LOSSES = {
    "loss": NUMBER,
    "tokens": int,
    "loss_by_decile?": DECILES,
    "tokens_by_decile?": [int, 10],
    **{f"{group}?": _GROUP for group in ("rare", "mid", "common", "unbinned")},
}
_READ = {"bytes": int, "window": int, "stride": int}  # how a text was read
_ORIGIN = {"provenance?": {"machine?": dict, "versions?": dict}}
_SPREAD = {"ids": int, "mean": NUMBER_OR_NULL, "deviation": NUMBER_OR_NULL, "histogram": [NUMBER]}
_COMPRESSED = {str: {**_LOSSES, "perplexity": NUMBER_OR_NULL}}
_FFN = dict.fromkeys(("input_distance", "slope", "bound", "separation"), MATRIX)

SCHEMAS: dict[str, dict] = {
    "validation": _LOSSES,
    "perplexity": {
        "texts": {
            str: {
                **_LOSSES,
                **_READ,
                **_ORIGIN,
                "perplexity": NUMBER_OR_NULL,
                "word_perplexity": NUMBER_OR_NULL,
                "bits_per_byte": NUMBER_OR_NULL,
            }
        }
    },
    "checkpoints": {
        "points": [{"tokens": int, "perplexity": {str: NUMBER_OR_NULL}}],
        "texts": {str: _READ},
    },
    "benchmarks": {
        "tasks": {
            str: {
                "score": NUMBER_OR_NULL,
                "stderr": NUMBER_OR_NULL,
                "metric": str,
                "samples": int,
                "split": str,
            }
        },
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
        "rows": {
            str: OrNull(
                {
                    "ids": int,
                    **dict.fromkeys(("frequency", "expected_updates", "occurrences", "ratio_bound"), NUMBER),
                }
            )
        },
    },
    "gradients": {
        "embedding_input": DECILES,
        "embedding_head": DECILES,
        "tables?": [DECILES],
        "amplification?": DECILES,
    },
    "collapse": {
        "delta": NUMBER,
        "categories": {
            str: {
                "pairs": [[str, 2]],
                "skipped": [[str, 2]],
                "distance?": MATRIX,
                "relative?": MATRIX,
                "collapse_set?": [[int]],
                "ffn?": OrNull({"members": [[int]], **_FFN}),
            }
        },
    },
    "routing": {"text": str, "tokens": [int], "by_layer": [[OrNull([NUMBER, ...]), 11], ...]},
    "layer-drop": {"texts": {str: {"change": [NUMBER, ...], "full": NUMBER, "without_any": NUMBER}}},
    "distances": {"tables": [str], "distance": MATRIX},
    "neighbours": {
        "tables": [str],
        **{group: {"ids": int, "jaccard": MATRIX} for group in ("rare", "common")},
        "words": {str: {"neighbours": [[str]], "jaccard": [NUMBER]}},
    },
    "compression": {
        "as_trained": _COMPRESSED,
        "forms": [
            {
                "form": str,
                "bits": int,
                "rank": NUMBER,
                "blocks": str,
                "weighted": NUMBER,
                "relative_bytes": NUMBER,
                "texts": _COMPRESSED,
            }
        ],
    },
    "footprint": {
        "blocks": int,
        "rows": [dict.fromkeys(("blocks", "bits", "vram_bytes", "ssd_bytes"), int)],
    },
}


def check_result(name: str, result: Any) -> None:
    """Raise ValueError if a result is not as the commands write it."""
    check(result, {"subject?": dict, **_ORIGIN, **SCHEMAS.get(name, {})}, name)


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
            if key is str:
                for name, part in value.items():
                    check(part, inner, f"{where}.{name}")
            elif key.removesuffix("?") in value:
                check(value[key.removesuffix("?")], inner, f"{where}.{key.removesuffix('?')}")
            elif not key.endswith("?"):
                raise ValueError(f"{where} has no {key!r}")
    elif isinstance(value, list) and isinstance(shape, list):
        inner, length = (*shape, None)[:2]
        if (length is ... and not value) or (isinstance(length, int) and len(value) != length):
            raise ValueError(f"{where} has {len(value)} items")
        for place, part in enumerate(value):
            check(part, inner, f"{where}[{place}]")
