"""How far apart two tokens stay in one context: heatmaps of each run, and runs against one another."""

from itertools import product
from statistics import fmean
from typing import Any

from tide_lm.report import paper
from tide_lm.report.drawing import Lines, heatmap, legend, plot, zero_line
from tide_lm.report.figure import Axes, Comparison, Figure, Panel, Runs, Table
from tide_lm.report.formatting import short, three_digits, token
from tide_lm.report.results import MissingError, Run, shared

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


def _check_pairs(run: Run) -> None:
    if not _categories(run):
        raise MissingError(
            f"the tokenizer of {run.path} has no pair of the study: take a larger vocabulary, then "
            f"{run.cure('collapse')}"
        )


def _heatmap_panels(runs: Runs) -> list[Panel]:
    def limits(name: str, measure: str) -> tuple[float, float]:
        """Return the same for all runs, so that colours compare."""
        cells = [row for run in runs for row in _categories(run).get(name, {}).get(measure, [])]
        return min(map(min, cells)), max(map(max, cells))

    return [
        _heatmap_panel(run, name, category, measure, limits(name, measure))
        for run in runs
        for name, category in _categories(run).items()
        for measure in MEASURES
    ]


def _heatmap_panel(
    run: Run, name: str, category: dict[str, Any], measure: str, limits: tuple[float, float]
) -> Panel:
    pairs = [short(" / ".join(map(token, pair))) for pair in category["pairs"]]
    cells = category[measure]

    def draw(axes: Axes) -> None:
        heatmap(axes, cells, MEASURES[measure], limits)
        axes.set_yticks(range(len(pairs)), pairs, fontsize=9)
        axes.set_xlabel("layer")
        axes.locator_params(axis="x", integer=True)

    span = f"from {min(map(min, cells)):.3g} to {max(map(max, cells)):.3g}"
    alt = f"Heatmap of {len(pairs)} pairs of {name} by layer in {run}, {MEASURES[measure]}: {span}"
    return Panel(f"{name}: {short(run.name)}", alt, draw, height=max(2.4, 1.3 + 0.19 * len(pairs)))


def _ffn_tables(runs: Runs) -> list[Table]:
    """Return the FFN of the pairs that have collapsed before it, where a run has any."""
    tables = []
    for run in runs:
        categories = _categories(run).items()
        rows = [row for name, category in categories if category["ffn"] for row in _ffn_rows(name, category)]
        caption = f"{run}: the FFN of pairs whose inputs are nearer than {_delta(run)} of their norm, means"
        tables += [Table(caption, ["", "pairs", *FFN.values()], rows)] if rows else []
    return tables


def _ffn_rows(name: str, category: dict[str, Any]) -> list[tuple[str, ...]]:
    ffn = category["ffn"]
    layers = [layer for layer, members in enumerate(ffn["members"]) if members]
    if len(layers) > LAYERS_SHOWN:
        layers = [layers[0], layers[len(layers) // 2], layers[-1]]
    rows = []
    for layer in layers:
        members = ffn["members"][layer]
        means = (fmean(ffn[key][pair][layer] for pair in members) for key in FFN)
        rows.append((f"{name}, layer {layer}", f"{len(members)}", *map(three_digits, means)))
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
    needs=("collapse",),
    check=_check_pairs,
    panels=_heatmap_panels,
    tables=_ffn_tables,
    compare=_compare_collapse,
)


def curves(runs: Runs, name: str, measure: str) -> dict[Run, list[float]]:
    """Return the means over the pairs that all runs have, by layer."""
    categories = {run: _categories(run)[name] for run in runs}
    kept = set.intersection(*({tuple(pair) for pair in found["pairs"]} for found in categories.values()))

    def mean(category: dict[str, Any]) -> list[float]:
        pairs = zip(category["pairs"], category[measure], strict=True)
        rows = [row for pair, row in pairs if tuple(pair) in kept]
        return [fmean(column) for column in zip(*rows, strict=True)]

    return {run: mean(category) for run, category in categories.items()} if kept else {}


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
            panels.append(_by_layer(f"{name}: separation", label, found, f", {label}"))
        if changes := _changes(found):
            title = f"{name}: difference to {short(runs[0].name, 20)}"
            panels.append(_by_layer(title, f"Δ {label}", changes, sign="+"))
    return panels


def _by_layer(title: str, label: str, lines: Lines, measured: str = "", sign: str = "") -> Panel:
    """Draw lines over layers; with a sign they are differences, and have a line at zero."""

    def draw(axes: Axes) -> None:
        plot(axes, lines)
        if sign:
            zero_line(axes)
        axes.set(xlabel="layer", ylabel=label, xlim=(-0.3, max(map(len, lines.values())) - 0.7))
        axes.locator_params(axis="x", integer=True)
        legend(axes)

    ends = (f"{run} {values[0]:{sign}.3g} to {values[-1]:{sign}.3g}" for run, values in lines.items())
    return Panel(title, f"Lines over layers{measured}: {'; '.join(ends)}", draw)


def _compare_curves(runs: Runs) -> list[Comparison]:
    rows = []
    measures = {"distance": "farther apart", "relative": "farther apart for their norm"}
    for name, (measure, words) in product(shared(map(_categories, runs)), measures.items()):
        if changes := _changes(curves(runs, name, measure)):
            wider = [f"{sum(c > 0 for c in line)} of {len(line)}" for line in changes.values()]
            rows.append(
                Comparison(
                    f"{name}: layers that keep pairs {words} than in the first run",
                    "numbers: all; others: from the middle on" if measure == "distance" else "not stated",
                    "section 3.3.3, Figure 6",
                    ["the first run", *wider],
                )
            )
    return rows


SEPARATION = Figure(
    name="separation",
    place="Figure 6",
    title="Separation of pairs, run against run",
    says="Means over the pairs that all runs' tokenizers have. A larger raw distance may only mean larger "
    "states: the panels divided by the mean norm tell the two apart.",
    needs=("collapse",),
    check=_check_pairs,
    at_least=2,
    panels=_curve_panels,
    compare=_compare_curves,
)
