"""One sentence on what a result means for its model; each condition is beside its words."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from tide_lm.report.formatting import count, gigabytes, percent, quantity

RARE, COMMON = slice(0, 3), slice(7, 10)  # deciles
ACCEPTABLE = 0.01  # of perplexity, for a smaller form of the tables
Result = dict[str, Any]


def sentence(what: str, result: Result) -> str | None:
    """Return what a result means, or None if it has too few numbers to say."""
    return _OF[what](result) if what in _OF else None


def _norms(result: Result) -> str | None:
    ratio = _ratio(result["embedding"])
    if ratio is None:
        return None
    said = f"a rare token's row of E is {ratio:.2f} times as long as a common one's"
    if ratio < 0.9:
        return f"{said}: rare rows are shorter, as the paper finds"
    if ratio > 1.1:
        return f"{said}: rare rows are longer, where the paper finds them shorter after a long training"
    return f"{said}: length does not set rare tokens apart"


def _updates(result: Result) -> str | None:
    rare, common = (result["rows"][name] for name in ("rare", "common"))
    if rare is None or common is None:
        return None
    rare, common = rare["expected_updates"], common["expected_updates"]
    said = (
        f"in a training on {quantity(result['tokens'])} tokens, a rare token's row can expect {count(rare)} "
        f"updates and a common one's {count(common)}"
    )
    if rare < 1:
        return f"{said}: many rare rows would never be updated"
    if common > 2 * rare:
        return f"{said}, {common / rare:,.1f} times as many"
    return f"{said}: nearly as many, so rare tokens are hardly at a disadvantage"


def _gradients(result: Result) -> str | None:
    ratio = _ratio(result["embedding_input"])
    if ratio is None:
        return None
    said = f"a rare token's row of E collected {ratio:.2g} times the squared gradient of a common one's"
    known = [value for value in result.get("amplification", ()) if value is not None]
    if not known:
        return f"{said} at the input"
    return f"{said} at the input, and all tables together {fmean(known):.1f} times as much as E"


def _collapse(result: Result) -> str | None:
    found = [some for some in result["categories"].values() if some["pairs"]]
    pairs = sum(len(some["pairs"]) for some in found)
    if not pairs:
        return None
    last = sum(len(some["collapse_set"][-1]) for some in found)
    said = f"{last} of {pairs} pairs of words have nearly the same state after the last layer"
    others = "every pair" if not last else "none" if last == pairs else f"the other {pairs - last}"
    return f"{said}: the model tells {others} apart"


def _routing(result: Result) -> str | None:
    by_row: list[float | None] = []
    for layers in zip(*result["by_layer"], strict=True):
        null = [slots[-1] for slots in layers if slots]
        by_row.append(1 - fmean(null) if null else None)

    def drawn(rows: slice) -> float | None:
        return _weighted(by_row[rows], result["tokens"][rows])

    whole, rare, common = drawn(slice(None)), drawn(RARE), drawn(COMMON)
    if whole is None:
        return None
    said = f"routers give {whole:.0%} of their weight to the tables, and the rest to the null bank"
    if rare is None or common is None:
        return said
    said += f"; for rare tokens it is {rare:.0%}, for common ones {common:.0%}"
    if abs(rare - common) < 0.02:
        return f"{said}: frequency makes hardly any difference"
    return f"{said}: memory serves {'rare' if rare > common else 'common'} tokens more"


def _layer_drop(result: Result) -> str | None:
    name, text = next(iter(result["texts"].items()))
    if not text["full"]:
        return None
    without = text["without_any"] / text["full"]
    if without <= 1:
        return f"without memory, perplexity on {name} is not higher: the tables do not help there"
    said = f"without memory in all layers, perplexity on {name} is {without:,.2f} times as high"
    layer = max(range(len(text["change"])), key=text["change"].__getitem__)
    if text["change"][layer] <= 0:
        return f"{said}; without it in any single layer it is not higher"
    return f"{said}; of single layers, {layer} matters most ({percent(text['change'][layer])})"


def _distances(result: Result) -> str | None:
    to_e, *others = result["distance"]
    mean = fmean(to_e[1:])
    repeat, share, do = ("repeat", "share", "do") if len(others) > 1 else ("repeats", "shares", "does")
    own = (
        f"{repeat} much of E"
        if mean < 0.5
        else f"{share} something with E"
        if mean < 0.9
        else f"{do} not repeat E"
    )
    said = f"rows of E and of a table are {mean:.2f} apart by cosine (0: one direction, 1: unrelated)"
    apart = [value for row, values in enumerate(others, 1) for value in values[1:row]]
    if not apart:
        return f"{said}: the table {own}"
    alike = "are much alike" if fmean(apart) < 0.5 else "differ from each other"
    return f"{said}, and rows of two tables {fmean(apart):.2f}: the tables {own}, and {alike}"


def _neighbours(result: Result) -> str | None:
    shares = {
        name: [value for block in result[name]["jaccard"] for value in block] for name in ("rare", "common")
    }
    if not all(shares.values()):
        return None
    rare, common = (fmean(values) for values in shares.values())
    said = (
        f"a table shares {rare:.0%} of nearest neighbours with E for rare tokens, and {common:.0%} for "
        "common ones"
    )
    if max(rare, common) < 0.1:
        return f"{said}: the tables group tokens differently from E"
    return f"{said}: the tables group tokens {'as E does' if min(rare, common) > 0.5 else 'partly as E does'}"


def _footprint(result: Result) -> str | None:
    blocks = result["blocks"]
    row = next((row for row in result["rows"] if (row["blocks"], row["bits"]) == (blocks, 4)), None)
    if row is None:
        return None
    said = f"in 4 bits the model needs {gigabytes(row['vram_bytes'])} of GPU memory"
    return f"{said}, and its {blocks} tables {gigabytes(row['ssd_bytes'])} on an SSD" if blocks else said


def _compression(result: Result) -> str:
    form = best_form(result)
    rise = _rise(result, form)
    said = f"{form['form']} takes {form['relative_bytes']:.0%} of the bytes of 16 bits"
    changes = f"changes perplexity by {percent(rise)}"
    if rise <= ACCEPTABLE:
        return f"{said} and {changes}: the best value of the forms measured"
    return f"{said} and {changes}; no form measured stays within {ACCEPTABLE:.0%}"


def best_form(result: Result) -> Result:
    """Return the smallest form that hardly raises perplexity, or else the one that raises it least."""
    good = [form for form in result["forms"] if _rise(result, form) <= ACCEPTABLE]
    if good:
        return min(good, key=lambda form: form["bytes"])
    return min(result["forms"], key=lambda form: _rise(result, form))


def _rise(result: Result, form: Result) -> float:
    """Return by what share perplexity rises on the text where it rises most."""
    whole = result["as_trained"]
    most = max(text["loss"] - whole[name]["loss"] for name, text in form["texts"].items())
    return math.expm1(min(most, 700))


def _ratio(by_decile: Sequence[float | None]) -> float | None:
    """Return the mean of rare deciles over that of common ones."""
    rare, common = ([value for value in by_decile[part] if value is not None] for part in (RARE, COMMON))
    return fmean(rare) / fmean(common) if rare and common and fmean(common) else None


def _weighted(values: Sequence[float | None], weights: Sequence[int]) -> float | None:
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


_OF: dict[str, Callable[[Result], str | None]] = {
    "norms": _norms,
    "updates": _updates,
    "gradients": _gradients,
    "collapse": _collapse,
    "routing": _routing,
    "layer-drop": _layer_drop,
    "distances": _distances,
    "neighbours": _neighbours,
    "footprint": _footprint,
    "compression": _compression,
}
