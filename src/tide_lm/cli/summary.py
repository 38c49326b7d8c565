"""Print an analysis as one table; the results file holds all of it."""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from tide_lm.cli.output import print_table

Summary = tuple[Sequence[str], Sequence[Sequence[object]]]  # columns, rows
DECILES = ["0, rarest", *map(str, range(1, 9)), "9, commonest"]


def print_summary(what: str, title: str, result: dict[str, Any]) -> None:
    columns, rows = SUMMARIES[what](result)
    print_table(title, columns, rows)
    for word, found in result.get("words", {}).items():
        nearest = zip(result["tables"], map(", ".join, found["neighbours"]), strict=True)
        print_table(f"Nearest to {word!r}", ["table", "tokens"], nearest, numbers=False)


def _norms(result: dict[str, Any]) -> Summary:
    tables = [_mean(column) for column in zip(*result["tables"], strict=True)] or [None] * 10
    rows = zip(DECILES, map(_short, result["embedding"]), map(_short, tables), strict=True)
    return ["decile", "norm of E's rows", "of the tables', mean"], list(rows)


def _updates(result: dict[str, Any]) -> Summary:
    keys = ("mean_count", "expected_updates", "occurrences", "ratio_bound")
    rows = [
        (name, *(_short(row and row[key]) for key in keys))
        for name, row in zip([*DECILES, "rare", "mid", "common"], result["rows"].values(), strict=True)
    ]
    return ["ids", "mean count", "expected updates", "occurrences", "signal, at most"], rows


def _gradients(result: dict[str, Any]) -> Summary:
    columns = [result["embedding_input"], result["embedding_head"], result.get("amplification", [None] * 10)]
    rows = zip(DECILES, *(map(_short, column) for column in columns), strict=True)
    return ["decile", "squared gradient, E as input", "as head", "tables / input"], list(rows)


def _collapse(result: dict[str, Any]) -> Summary:
    def ends(found: dict[str, Any]) -> list[object]:
        if not found["pairs"]:
            return ["-"] * 4
        apart = [_short(fmean(layer)) for layer in zip(*found["relative"], strict=True)]
        nearer = [len(pairs) for pairs in found["collapse_set"]]
        return [apart[0], apart[-1], nearer[0], nearer[-1]]

    rows = [
        [name, len(found["pairs"]), len(found["skipped"]), *ends(found)]
        for name, found in result["categories"].items()
    ]
    columns = ["apart, first layer", "last", f"nearer than {result['delta']:g}, first", "last"]
    return ["pairs", "taken", "skipped", *columns], rows


def _routing(result: dict[str, Any]) -> Summary:
    rows = []
    for name, tokens, row in zip(DECILES, result["tokens"], result["by_layer"][-1], strict=False):
        largest = f"M{row.index(max(row[:-1])) + 1} {max(row[:-1]):.3f}" if row else "-"
        rows.append((name, f"{tokens:,}", _short(row and row[-1]), largest))
    return ["decile", "tokens", "null bank, last layer", "largest block"], rows


def _layer_drop(result: dict[str, Any]) -> Summary:
    texts = result["texts"]
    changes = zip(*(text["change"] for text in texts.values()), strict=True)
    rows = [(layer, *(f"{value:+.2%}" for value in row)) for layer, row in enumerate(changes)]
    rows.append(("all", *(f"{text['without_any'] / text['full'] - 1:+.2%}" for text in texts.values())))
    return ["without the memory of layer", *(f"perplexity, {name}" for name in texts)], rows


def _distances(result: dict[str, Any]) -> Summary:
    rows = zip(result["tables"], map(_short, result["distance"][0]), strict=True)
    return ["table", "mean cosine distance to E"], list(rows)


def _neighbours(result: dict[str, Any]) -> Summary:
    columns = ["shared neighbours with E (Jaccard)", "ids", "least", "mean", "most"]
    groups = {name: result[name] for name in ("rare", "common")}
    rows = [
        (name, group["ids"], *_spread([fmean(block) for block in group["jaccard"] if block]))
        for name, group in groups.items()
    ]
    return columns, rows + [(word, 1, *_spread(found["jaccard"])) for word, found in result["words"].items()]


def _spread(blocks: list[float]) -> tuple[str, ...]:
    return (_short(min(blocks)), _short(fmean(blocks)), _short(max(blocks))) if blocks else ("-",) * 3


def _footprint(result: dict[str, Any]) -> Summary:
    rows = [
        (row["blocks"], row["bits"], _short(row["vram_bytes"] / 1e9), _short(row["ssd_bytes"] / 1e9))
        for row in result["rows"]
    ]
    return ["blocks", "bits", "VRAM, GB", "tables on SSD, GB"], rows


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


SUMMARIES: dict[str, Callable[[dict[str, Any]], Summary]] = {
    "norms": _norms,
    "updates": _updates,
    "gradients": _gradients,
    "collapse": _collapse,
    "routing": _routing,
    "layer-drop": _layer_drop,
    "distances": _distances,
    "neighbours": _neighbours,
    "footprint": _footprint,
}
