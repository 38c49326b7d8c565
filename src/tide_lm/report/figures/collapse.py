"""How far apart two tokens stay in one context: heatmaps of one run, and runs against one another."""

from collections.abc import Sequence
from itertools import product
from statistics import fmean
from typing import TYPE_CHECKING, Any

from tide_lm.report.drawing import INK, heatmap, legend, look, numbers
from tide_lm.report.figure import Comparison, Figure, Panel, Runs
from tide_lm.report.results import MissingError, Run, shared
from tide_lm.report.wording import NOT_MEASURED, short, token

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURES = {"distance": "L2 distance", "relative": "distance / mean norm"}


def _categories(run: Run) -> dict[str, dict[str, Any]]:
    """Those of which the tokenizer has at least one pair."""
    return {name: found for name, found in run.result("collapse")["categories"].items() if found["pairs"]}


def _has_pairs(run: Run) -> None:
    run.result("collapse", "categories", "delta")
    if not _categories(run):
        raise MissingError(
            f"the tokenizer of {run.path} has no pair of the study: take a larger vocabulary, then run "
            f"`{run.maker('collapse')}`"
        )


def _heatmap_panels(runs: Runs) -> list[Panel]:
    return [
        _heatmap_panel(run, name, category, measure)
        for run in runs
        for name, category in _categories(run).items()
        for measure in MEASURES
    ]


def _heatmap_panel(run: Run, name: str, category: dict[str, Any], measure: str) -> Panel:
    pairs = [short(" / ".join(map(token, pair))) for pair in category["pairs"]]
    cells = category[measure]

    def draw(axes: "Axes") -> None:
        heatmap(axes, cells, MEASURES[measure])
        axes.set_yticks(range(len(pairs)), pairs, fontsize=9)
        axes.set_xlabel("layer")
        axes.locator_params(axis="x", integer=True)

    told = f"from {min(map(min, cells)):.3g} to {max(map(max, cells)):.3g}"
    alt = f"Heatmap of {len(pairs)} pairs of {name} by layer in {run.name}, {MEASURES[measure]}: {told}"
    return Panel(f"{name}: {short(run.name)}", alt, draw, height=max(2.4, 1.3 + 0.19 * len(pairs)))


def _compare_collapse(runs: Runs) -> list[Comparison]:
    def collapsed(run: Run, name: str, layer: int) -> str:
        category = _categories(run).get(name)
        return f"{category['collapsed'][layer]} of {len(category['pairs'])}" if category else NOT_MEASURED

    delta = runs[0].result("collapse")["delta"]
    return [
        Comparison(
            f"{name}: pairs nearer than {delta:g} of their norm, {where} layer",
            stated,
            "Figure 2",
            [collapsed(run, name, layer) for run in runs],
        )
        for name in shared(map(_categories, runs))
        for where, layer, stated in (
            ("first", 0, "distances near zero; no number"),
            ("last", -1, "farther apart, numbers least; no number"),
        )
    ]


COLLAPSE = Figure(
    name="collapse",
    place="Figure 2",
    title="Pairs of tokens in one context",
    says="Distance between the states of two tokens after the same words. Raw distances grow with the norms "
    "of the states, which grow with depth; divided by the mean norm they can be compared between layers. "
    "Pairs and templates are ours, as the paper's are not published.",
    needs={"collapse": ("categories", "delta")},
    check=_has_pairs,
    panels=_heatmap_panels,
    compare=_compare_collapse,
)


def curves(runs: Runs, name: str, measure: str) -> dict[Run, list[float]]:
    """Means over the pairs that all runs have, by layer."""
    categories = {run: _categories(run)[name] for run in runs}
    kept = set.intersection(*({tuple(pair) for pair in found["pairs"]} for found in categories.values()))

    def mean(category: dict[str, Any]) -> list[float]:
        rows = [
            row for pair, row in zip(category["pairs"], category[measure], strict=True) if tuple(pair) in kept
        ]
        return [fmean(column) for column in zip(*rows, strict=True)]

    return {run: mean(category) for run, category in categories.items()} if kept else {}


def _curve_panels(runs: Runs) -> list[Panel]:
    panels = []
    for name in shared(map(_categories, runs)):
        for measure, label in MEASURES.items():
            found = curves(runs, name, measure)
            if not found:
                continue
            panels.append(_lines_panel(name, label, found))
            if len({len(values) for values in found.values()}) == 1:
                panels.append(_differences_panel(name, label, found))
    return panels


def _lines_panel(name: str, label: str, found: dict[Run, list[float]]) -> Panel:
    def draw(axes: "Axes") -> None:
        for run, values in found.items():
            axes.plot(range(len(values)), values, **look(run))
        _layer_axis(axes, label, max(map(len, found.values())))

    told = "; ".join(f"{run.name} {values[0]:.3g} to {values[-1]:.3g}" for run, values in found.items())
    return Panel(f"{name}: separation", f"Lines over layers, {label}: {told}", draw)


def _differences_panel(name: str, label: str, found: dict[Run, list[float]]) -> Panel:
    (first, reference), *others = found.items()
    changes = {run: differences(values, reference) for run, values in others}

    def draw(axes: "Axes") -> None:
        for run, values in changes.items():
            axes.plot(range(len(values)), numbers(values), **look(run))
        axes.axhline(0, color=INK, linewidth=0.8)
        _layer_axis(axes, f"Δ {label}", len(reference))

    told = "; ".join(f"{run.name} {values[0]:+.3g} to {values[-1]:+.3g}" for run, values in changes.items())
    return Panel(f"{name}: difference to {short(first.name, 20)}", f"Lines over layers: {told}", draw)


def differences(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(values, reference, strict=True)]


def _layer_axis(axes: "Axes", label: str, layers: int) -> None:
    axes.set_xlabel("layer")
    axes.set_ylabel(label)
    axes.set_xlim(-0.3, layers - 0.7)
    axes.locator_params(axis="x", integer=True)
    legend(axes)


def _compare_curves(runs: Runs) -> list[Comparison]:
    rows = []
    measures = {"distance": "farther apart", "relative": "farther apart for their norm"}
    for name, (measure, words) in product(shared(map(_categories, runs)), measures.items()):
        found = curves(runs, name, measure)
        if len({len(values) for values in found.values()}) != 1:
            continue
        (_, reference), *others = found.items()
        ours = []
        for _, values in others:
            wider = sum(change > 0 for change in differences(values, reference))
            ours.append(f"{wider} of {len(reference)}")
        rows.append(
            Comparison(
                f"{name}: layers that keep pairs {words} than in the first run",
                "numbers: all; others: from the middle on" if measure == "distance" else "not stated",
                "section 3.3.3, Figure 6",
                ["the first run", *ours],
            )
        )
    return rows


SEPARATION = Figure(
    name="separation",
    place="Figure 6",
    title="Separation of pairs, run against run",
    says="Means over the pairs that all runs' tokenizers have. A larger raw distance may only mean larger "
    "states: the panels divided by the mean norm tell the two apart.",
    needs={"collapse": ("categories", "delta")},
    check=_has_pairs,
    at_least=2,
    panels=_curve_panels,
    compare=_compare_curves,
)
