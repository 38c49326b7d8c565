"""How far apart two tokens stay in one context: heatmaps of each run, and runs against one another."""

from functools import partial
from itertools import product
from statistics import fmean
from typing import Any

from tide_lm.report import paper
from tide_lm.report.drawing import Lines, heatmap, layer_axis, legend, plot, zero_line
from tide_lm.report.figure import Axes, Comparison, Figure, Panel, Runs, Table
from tide_lm.report.formatting import short, three_digits, token
from tide_lm.report.results import Run, shared

LAYERS_SHOWN = 8  # of a category; of more, the first, the middle and the last
MEASURES = {"distance": "L2 distance", "relative": "distance / mean norm"}
FFN = {
    "input_distance": "input distance",
    "slope": "slope, at least",
    "bound": "bound from it",
    "separation": "separation",
}


def _categories(run: Run) -> dict[str, dict[str, Any]]:
    """Return the categories of which the tokenizer has at least one pair."""
    return {name: found for name, found in run.result("collapse")["categories"].items() if found["pairs"]}


def _lacks_pairs(run: Run) -> str | None:
    if _categories(run):
        return None
    return (
        f"the tokenizer of {run.path} knows no pair of words as single tokens: take a model with a larger "
        f"vocabulary for {', '.join(run.result('collapse')['categories'])}"
    )


def _heatmap_panels(runs: Runs) -> list[Panel]:
    """Draw each run, category and measure; the colours of all runs compare."""
    panels = []
    for run in runs:
        for (name, category), measure in product(_categories(run).items(), MEASURES):
            rows = [row for other in runs for row in _categories(other).get(name, {}).get(measure, [])]
            limits = min(map(min, rows)), max(map(max, rows))
            draw = partial(_draw_heatmap, category=category, measure=measure, limits=limits)
            height = max(2.4, 1.3 + 0.19 * len(category["pairs"]))
            panels.append(Panel(f"{name}: {short(run.name)}", draw, height))
    return panels


def _draw_heatmap(axes: Axes, category: dict[str, Any], measure: str, limits: tuple[float, float]) -> None:
    pairs = [short(" / ".join(map(token, pair))) for pair in category["pairs"]]
    heatmap(axes, category[measure], MEASURES[measure], limits)
    axes.set_yticks(range(len(pairs)), pairs, fontsize=9)
    layer_axis(axes)


def _ffn_tables(runs: Runs) -> list[Table]:
    """Return the FFN of the pairs that have collapsed before it, where a run has any."""
    tables = []
    for run in runs:
        categories = _categories(run).items()
        rows = [row for name, found in categories if found["ffn"] for row in _ffn_rows(name, found["ffn"])]
        caption = f"{run}: the FFN of pairs whose inputs are nearer than {_delta(run)} of their norm, means"
        tables += [Table(caption, ["", "pairs", *FFN.values()], rows)] if rows else []
    return tables


def _ffn_rows(name: str, ffn: dict[str, Any]) -> list[tuple[str, ...]]:
    members = {layer: pairs for layer, pairs in enumerate(ffn["members"]) if pairs}
    layers = list(members)
    if len(layers) > LAYERS_SHOWN:
        layers = [layers[0], layers[len(layers) // 2], layers[-1]]
    rows = []
    for layer in layers:
        means = (fmean(ffn[key][pair][layer] for pair in members[layer]) for key in FFN)
        rows.append((f"{name}, layer {layer}", f"{len(members[layer])}", *map(three_digits, means)))
    return rows


def _delta(run: Run) -> str:
    return f"{run.result('collapse')['delta']:g}"


def _collapsed(run: Run, name: str, layer: int) -> str:
    category = _categories(run)[name]
    return f"{len(category['collapse_set'][layer])} of {len(category['pairs'])} (δ = {_delta(run)})"


def _skipped(run: Run, name: str) -> str:
    category = run.result("collapse")["categories"][name]
    return f"{len(category['skipped'])} of {len(category['skipped']) + len(category['pairs'])}"


def _compare_collapse(runs: Runs) -> list[Comparison]:
    what = "pairs left out, as they are not single tokens"
    rows = [
        Comparison(f"{name}: {what}", "not published", "Figure 2", [_skipped(run, name) for run in runs])
        for name in shared(run.result("collapse")["categories"] for run in runs)
    ]
    for name, (where, layer, stated) in product(shared(map(_categories, runs)), paper.COLLAPSE):
        what = f"{name}: pairs nearer than δ of their norm, {where} layer"
        rows.append(Comparison(what, stated, "Figure 2", [_collapsed(run, name, layer) for run in runs]))
    return rows


COLLAPSE = Figure(
    name="collapse",
    place="Figure 2",
    title="Pairs of tokens in one context",
    says="Distance between the states of two tokens after the same words. Raw distances grow with the norms "
    "of the states, which grow with depth; divided by the mean norm they can be compared between layers. "
    "Pairs and templates are ours, as the paper's are not published. Proposition 2.2 bounds how far an FFN "
    "separates two near inputs by its slope between them. The slope here is the largest at nine points, an "
    "estimate from below, so a separation may exceed the bound from it.",
    reads="collapse",
    lacks=_lacks_pairs,
    panels=_heatmap_panels,
    tables=_ffn_tables,
    compare=_compare_collapse,
)


def curves(runs: Runs, name: str, measure: str) -> dict[Run, list[float]]:
    """Return the means over the pairs that all runs have, by layer."""
    found = {}
    for run in runs:
        category = _categories(run)[name]
        found[run] = dict(zip(map(tuple, category["pairs"]), category[measure], strict=True))
    if not (kept := shared(found.values())):
        return {}
    by_layer = {run: zip(*(rows[pair] for pair in kept), strict=True) for run, rows in found.items()}
    return {run: list(map(fmean, columns)) for run, columns in by_layer.items()}


def _changes(found: dict[Run, list[float]]) -> dict[Run, list[float]]:
    """Return the differences to the first run, if all runs have as many layers."""
    if len({len(values) for values in found.values()}) != 1:
        return {}
    (_, reference), *others = found.items()
    return {run: [a - b for a, b in zip(values, reference, strict=True)] for run, values in others}


def _curve_panels(runs: Runs) -> list[Panel]:
    panels = []
    for name, (measure, label) in product(shared(map(_categories, runs)), MEASURES.items()):
        if found := curves(runs, name, measure):
            panels.append(Panel(f"{name}: separation", partial(_draw_lines, lines=found, what=label)))
        if changes := _changes(found):
            title = f"{name}: difference to {short(runs[0].name, 20)}"
            draw = partial(_draw_lines, lines=changes, what=f"Δ {label}", zero=True)
            panels.append(Panel(title, draw))
    return panels


def _draw_lines(axes: Axes, lines: Lines, what: str, zero: bool = False) -> None:
    plot(axes, lines)
    if zero:
        zero_line(axes)
    axes.set(ylabel=what, xlim=(-0.3, max(map(len, lines.values())) - 0.7))
    layer_axis(axes)
    legend(axes)


def _compare_curves(runs: Runs) -> list[Comparison]:
    rows = []
    measures = {
        "distance": ("farther apart", "numbers: all; others: from the middle on"),
        "relative": ("farther apart for their norm", "not stated"),
    }
    for name, (measure, (words, stated)) in product(shared(map(_categories, runs)), measures.items()):
        if changes := _changes(curves(runs, name, measure)):
            what = f"{name}: layers that keep pairs {words} than in the first run"
            wider = [f"{sum(c > 0 for c in line)} of {len(line)}" for line in changes.values()]
            rows.append(Comparison(what, stated, "section 3.3.3, Figure 6", ["the first run", *wider]))
    return rows


SEPARATION = Figure(
    name="separation",
    place="Figure 6",
    title="Separation of pairs, run against run",
    says="Means over the pairs that all runs' tokenizers have. A larger raw distance may only mean larger "
    "states: the panels divided by the mean norm tell the two apart.",
    reads="collapse",
    lacks=_lacks_pairs,
    at_least=2,
    panels=_curve_panels,
    compare=_compare_curves,
)
