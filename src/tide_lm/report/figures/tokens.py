"""What frequency does to rows: their norms, the updates they may expect, the gradient they collected."""

from operator import lt
from typing import TYPE_CHECKING, Any

from tide_lm.report import paper
from tide_lm.report.drawing import (
    GROUPS,
    INK,
    by_decile,
    decile_axis,
    legend,
    log_scale,
    look,
    numbers,
    sequence,
    token_axis,
)
from tide_lm.report.figure import Comparison, Figure, Panel, Runs, Table
from tide_lm.report.formatting import MINUS, NOT_MEASURED, bound, count, ends, short, steps
from tide_lm.report.results import Run, alike

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Deciles = list[float | None]


def _norm_panels(runs: Runs) -> list[Panel]:
    means: dict[Run, Deciles] = {run: run.result("norms")["embedding"] for run in runs}
    told = "; ".join(f"{run.name} {ends(values, _three)}" for run, values in means.items())
    panels = [
        Panel(
            "Mean norm of a token's row in E",
            f"Lines over ten deciles, rarest to commonest: {told}",
            lambda axes: by_decile(axes, "mean L2 norm", means),
        )
    ]
    panels += [_spread_panel(run) for run in runs]
    panels += [_growth_panel(run) for run in runs if len(run.result("norms")["growth"]) > 1]
    panels += [_tables_panel(run) for run in runs if run.result("norms")["tables"]]
    return panels


def _spread_panel(run: Run) -> Panel:
    spread = run.result("norms")["spread"]

    def draw(axes: "Axes") -> None:
        for group in ("rare", "common"):
            counts, ids, colour = spread[group]["histogram"], spread[group]["ids"], GROUPS[group]
            shares = [number / max(ids, 1) for number in counts]
            axes.stairs(shares, spread["edges"], fill=True, alpha=0.3, color=colour)
            axes.stairs(
                shares, spread["edges"], color=colour, label=f"{group} ({ids:,} tokens)", linewidth=1.4
            )
        axes.set_xlabel("L2 norm of a row of E")
        axes.set_ylabel("share of the group's tokens")
        legend(axes)

    told = ", ".join(f"{group} mean {_three(spread[group]['mean'])}" for group in ("rare", "common"))
    return Panel(
        f"Rare and common rows: {short(run.name)}", f"Histograms of norms in {run.name}: {told}", draw
    )


def _growth_panel(run: Run) -> Panel:
    points = run.result("norms")["growth"]

    def draw(axes: "Axes") -> None:
        tokens = [point["tokens"] for point in points]
        for decile, colour in enumerate(sequence(10)):
            grown = [growth(point["embedding"][decile], points[0]["embedding"][decile]) for point in points]
            label = {0: "0, rarest", 9: "9, commonest"}.get(decile)
            axes.plot(tokens, numbers(grown), color=colour, label=label, marker=".")
        axes.axhline(0, color=INK, linewidth=0.8)
        token_axis(axes)
        axes.set_ylabel("change since the first, %")
        legend(axes, title="decile")

    alt = f"Lines over training, one a decile: {_growth_in_words(run)} on the rarest and the commonest"
    return Panel(f"Growth over training: {short(run.name)}", alt, draw)


def _tables_panel(run: Run) -> Panel:
    tables = run.result("norms")["tables"]

    def draw(axes: "Axes") -> None:
        for block, values in enumerate(tables):
            label = f"each of {len(tables)} tables" if block == 0 else None
            axes.plot(range(10), numbers(values), **(look(run) | {"label": label}), alpha=0.6)
        decile_axis(axes, "mean L2 norm, before RMSNorm")
        legend(axes)

    alt = f"Lines over ten deciles, one for each of {len(tables)} tables of {run.name}"
    return Panel(f"Norms in the tables: {short(run.name)}", alt, draw)


def _compare_norms(runs: Runs) -> list[Comparison]:
    def spread(run: Run) -> str:
        found = run.result("norms")["spread"]
        return " and ".join(_three(found[group]["deviation"]) for group in ("rare", "common"))

    return [
        Comparison(
            "mean norm rises from decile to decile",
            "at every step, for the base model",
            "Figure 1a",
            [steps(run.result("norms")["embedding"], lt) for run in runs],
        ),
        Comparison(
            "standard deviation of norms, rare and common",
            "wide and narrow; no number",
            "Figure 1b",
            [spread(run) for run in runs],
        ),
        Comparison(
            "change of the mean norm over the checkpoints, decile 0 and 9",
            "falls and rises; no number",
            "Figure 1c",
            [_growth_in_words(run) for run in runs],
        ),
    ]


def _growth_in_words(run: Run) -> str:
    points = run.result("norms")["growth"]
    if len(points) < 2:
        return f"{NOT_MEASURED}: one checkpoint is kept" if points else f"{NOT_MEASURED}: no checkpoints"
    first, last = points[0]["embedding"], points[-1]["embedding"]
    changes = [growth(last[decile], first[decile]) for decile in (0, 9)]
    told = " and ".join(NOT_MEASURED if change is None else f"{change:+.1f} %" for change in changes)
    return told.replace("-", MINUS)


def growth(now: float | None, start: float | None) -> float | None:
    """Return growth in per cent."""
    return None if now is None or not start else (now / start - 1) * 100


def _three(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.3g}"


NORMS = Figure(
    name="norms",
    place="Figure 1",
    title="Norms of embedding rows",
    says="How long the rows of E are, by how often their token occurs. Whether rare rows end up shorter "
    "depends on weight decay and on how long the run was.",
    needs=("norms",),
    panels=_norm_panels,
    compare=_compare_norms,
)


def _update_panel(name: str, run: Run) -> Panel:
    rows = [run.result("updates")["rows"][str(decile)] or {} for decile in range(10)]

    def draw(axes: "Axes") -> None:
        for key, label, style, colour in (
            ("occurrences", "occurrences", "s--", GROUPS["common"]),
            ("expected_updates", "expected updates", "o-", GROUPS["rare"]),
        ):
            axes.plot(range(10), numbers([row.get(key) for row in rows]), style, color=colour, label=label)
        log_scale(axes)
        decile_axis(axes, f"in {count(run.result('updates')['tokens'])} tokens")
        legend(axes)

    told = ends([row.get("expected_updates") for row in rows], count)
    alt = f"Lines over ten deciles, on a log scale: expected updates {told} in {name}, and occurrences"
    return Panel(f"Updates of a row: {short(name)}", alt, draw)


def _update_table(named: str, run: Run) -> Table:
    result = run.result("updates")
    columns = [
        "tokens",
        "ids",
        "mean frequency",
        "expected updates",
        "occurrences",
        "gradient ratio, at most",
    ]
    rows = [
        (
            f"decile {name}" if name.isdigit() else name,
            f"{row['ids']:,}",
            count(row["frequency"]),
            count(row["expected_updates"]),
            count(row["occurrences"]),
            bound(row["ratio_bound"]),
        )
        for name, row in result["rows"].items()
        if row
    ]
    budget = f"{count(result['tokens'])} tokens, batches of {result['batch']} x {result['sequence']:,}"
    return Table(f"{named}: {budget}", columns, rows)


def _compare_updates(runs: Runs) -> list[Comparison]:
    def ours(run: Run, name: str) -> str:
        row: dict[str, Any] | None = run.result("updates")["rows"].get(name)
        return f"{count(row['expected_updates'])} (f = {count(row['frequency'])})" if row else NOT_MEASURED

    return [
        Comparison(
            f"expected updates, {row.tier}",
            f"{row.expected} (f = {row.frequency})",
            "Table 1",
            [ours(run, row.row) for run in runs],
        )
        for row in paper.TABLE_1
    ]


UPDATES = Figure(
    name="updates",
    place="Table 1",
    title="Updates that a row may expect",
    says="Arithmetic on real counts, not a measurement. A row can be updated at most once a step, so "
    "expected updates level off where occurrences go on. The last column bounds the gradient signal of a row "
    "over that of the commonest decile (eq. 2.3); above 1 it says nothing.",
    needs=("updates",),
    panels=lambda runs: [_update_panel(*item) for item in alike(runs, "updates", "rows").items()],
    compare=_compare_updates,
    tables=lambda runs: [_update_table(*item) for item in alike(runs, "updates", "rows").items()],
)


def gradient_lines(run: Run) -> dict[str, Deciles]:
    """Return lines by decile: the two parts of E, and all tables together."""
    result = run.result("gradients")
    lines = {
        "E, through the input": result["embedding_input"],
        "E, through the head": result["embedding_head"],
    }
    if tables := result.get("tables"):
        together = [None if None in column else sum(column) for column in zip(*tables, strict=True)]
        lines[f"all {len(tables)} tables together"] = together
    return lines


def _gradient_panel(run: Run) -> Panel:
    lines = gradient_lines(run)

    def draw(axes: "Axes") -> None:
        for (label, values), colour, marker in zip(lines.items(), GROUPS.values(), "os^", strict=False):
            axes.plot(range(10), numbers(values), color=colour, marker=marker, label=label)
        log_scale(axes)
        decile_axis(axes, "squared norm, summed over steps")
        legend(axes)

    told = "; ".join(f"{name} {ends(line, _three)}" for name, line in lines.items())
    return Panel(
        f"Gradient of a row: {short(run.name)}", f"Lines over ten deciles, log scale: {told}", draw, 3.6
    )


def _compare_gradients(runs: Runs) -> list[Comparison]:
    def ours(run: Run, decile: int) -> str:
        ratio = run.result("gradients").get("amplification", [None] * 10)[decile]
        return NOT_MEASURED if ratio is None else f"{ratio:.3g} (K = {run.blocks})"

    return [
        Comparison(
            f"gradient of all tables over that of E's input, decile {decile}",
            "K, if each table's gradient is as large as E's",
            "Proposition 3.2",
            [ours(run, decile) for run in runs],
        )
        for decile in (0, 9)
    ]


GRADIENTS = Figure(
    name="gradients",
    place="Proposition 3.2",
    title="Gradient that rows collected",
    says="What the trainer recorded, before clipping. With a tied head, E gets gradient by two ways, shown "
    "apart: through the input only tokens of the batch, through the head every token at every step.",
    needs=("gradients",),
    panels=lambda runs: [_gradient_panel(run) for run in runs],
    compare=_compare_gradients,
)
