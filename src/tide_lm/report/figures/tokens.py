"""What frequency does to rows: their norms, the updates they may expect, and the gradient they collected."""

from functools import partial
from operator import lt

from tide_lm.report import drawing, paper
from tide_lm.report.figure import Axes, Figure, Panel, Runs, Table, beside, of_each
from tide_lm.report.formatting import (
    NOT_MEASURED,
    count,
    ends,
    ends_of_lines,
    number,
    short,
    steps,
    three_digits,
    upper_bound,
)
from tide_lm.report.results import Run, alike


def _norm_panels(runs: Runs) -> list[Panel]:
    means: dict[Run, drawing.Values] = {run: run.result("norms")["embedding"] for run in runs}
    alt = f"Lines over ten deciles, rarest to commonest: {ends_of_lines(means, three_digits)}"
    return [
        Panel(
            "Mean norm of a token's row in E",
            alt,
            lambda axes: drawing.by_decile(axes, "mean L2 norm", means),
        ),
        *map(_spread_panel, runs),
        *(_growth_panel(run) for run in runs if len(run.result("norms")["growth"]) > 1),
        *(_tables_panel(run) for run in runs if run.result("norms")["tables"]),
    ]


def _spread_panel(run: Run) -> Panel:
    spread = run.result("norms")["spread"]

    def draw(axes: Axes) -> None:
        for group in ("rare", "common"):
            ids, colour = spread[group]["ids"], drawing.GROUPS[group]
            shares = [number / max(ids, 1) for number in spread[group]["histogram"]]
            axes.stairs(shares, spread["edges"], fill=True, alpha=0.3, color=colour)
            label = f"{group} ({ids:,} tokens)"
            axes.stairs(shares, spread["edges"], color=colour, label=label, linewidth=1.4)
        axes.set(xlabel="L2 norm of a row of E", ylabel="share of the group's tokens")
        drawing.legend(axes)

    means = ", ".join(f"{group} mean {three_digits(spread[group]['mean'])}" for group in ("rare", "common"))
    return Panel(f"Rare and common rows: {short(run.name)}", f"Histograms of norms in {run}: {means}", draw)


def _growth_panel(run: Run) -> Panel:
    points = run.result("norms")["growth"]

    def draw(axes: Axes) -> None:
        tokens = [point["tokens"] for point in points]
        for decile, colour in enumerate(drawing.sequence(10)):
            grown = [growth(point["embedding"][decile], points[0]["embedding"][decile]) for point in points]
            label = {0: "0, rarest", 9: "9, commonest"}.get(decile)
            axes.plot(tokens, drawing.numbers(grown), color=colour, label=label, marker=".")
        drawing.zero_line(axes)
        drawing.token_axis(axes, "change since the first, %", "decile")

    alt = f"Lines over training, one per decile: {_growth_in_words(run)} on the rarest and the commonest"
    return Panel(f"Growth over training: {short(run.name)}", alt, draw)


def _tables_panel(run: Run) -> Panel:
    tables = run.result("norms")["tables"]

    def draw(axes: Axes) -> None:
        for block, values in enumerate(tables):
            label = f"each of {len(tables)} tables" if block == 0 else None
            axes.plot(range(10), drawing.numbers(values), **(drawing.look(run) | {"label": label}), alpha=0.6)
        drawing.decile_axis(axes, "mean L2 norm, before RMSNorm")

    alt = f"Lines over ten deciles, one for each of {len(tables)} tables of {run}"
    return Panel(f"Norms in the tables: {short(run.name)}", alt, draw)


def _rises(run: Run) -> str:
    return steps(run.result("norms")["embedding"], lt)


def _deviations(run: Run) -> str:
    spread = run.result("norms")["spread"]
    return " and ".join(three_digits(spread[group]["deviation"]) for group in ("rare", "common"))


def _growth_in_words(run: Run) -> str:
    points = run.result("norms")["growth"]
    if len(points) < 2:
        return f"{NOT_MEASURED}: one checkpoint is kept" if points else f"{NOT_MEASURED}: no checkpoints"
    first, last = points[0]["embedding"], points[-1]["embedding"]
    changes = [growth(last[decile], first[decile]) for decile in (0, 9)]
    return " and ".join(
        NOT_MEASURED if change is None else f"{number(change, '+.1f')} %" for change in changes
    )


def growth(now: float | None, start: float | None) -> float | None:
    """Return growth in per cent."""
    return None if now is None or not start else (now / start - 1) * 100


NORMS = Figure(
    name="norms",
    place="Figure 1",
    title="Norms of embedding rows",
    says="How long the rows of E are, by how often their token occurs. Whether rare rows end up shorter "
    "depends on weight decay and on how long the run was.",
    needs=("norms",),
    panels=_norm_panels,
    compare=beside(paper.NORMS, _rises, _deviations, _growth_in_words),
)


def _update_panel(name: str, run: Run) -> Panel:
    result = run.result("updates")
    rows = [result["rows"][str(decile)] or {} for decile in range(10)]
    expected = [row.get("expected_updates") for row in rows]

    def draw(axes: Axes) -> None:
        for label, values, style, colour in (
            ("occurrences", [row.get("occurrences") for row in rows], "s--", drawing.GROUPS["common"]),
            ("expected updates", expected, "o-", drawing.GROUPS["rare"]),
        ):
            axes.plot(range(10), drawing.numbers(values), style, color=colour, label=label)
        drawing.log_scale(axes)
        drawing.decile_axis(axes, f"in {count(result['tokens'])} tokens")

    alt = f"Lines over ten deciles, on a log scale: expected updates {ends(expected, count)} in {name}, and "
    return Panel(f"Updates of a row: {short(name)}", alt + "occurrences", draw)


def _update_table(named: str, run: Run) -> Table:
    result = run.result("updates")
    counts = ("frequency", "expected_updates", "occurrences")
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
            *(count(row[key]) for key in counts),
            upper_bound(row["ratio_bound"]),
        )
        for name, row in result["rows"].items()
        if row
    ]
    budget = f"{count(result['tokens'])} tokens, batches of {result['batch']} x {result['sequence']:,}"
    return Table(f"{named}: {budget}", columns, rows)


def _expected(run: Run, name: str) -> str:
    row = run.result("updates")["rows"].get(name)
    return f"{count(row['expected_updates'])} (f = {count(row['frequency'])})" if row else NOT_MEASURED


UPDATES = Figure(
    name="updates",
    place="Table 1",
    title="Updates that a row may expect",
    says="Arithmetic on real counts, not a measurement. A row can be updated at most once per step, so "
    "expected updates level off where occurrences go on. The last column bounds the gradient signal of a row "
    "over that of the commonest decile (eq. 2.3); above 1 it says nothing.",
    needs=("updates",),
    panels=lambda runs: [_update_panel(*item) for item in alike(runs, "updates", "rows").items()],
    compare=beside(paper.UPDATES.values(), *(partial(_expected, name=name) for name in paper.UPDATES)),
    tables=lambda runs: [_update_table(*item) for item in alike(runs, "updates", "rows").items()],
)


def gradient_lines(run: Run) -> dict[str, drawing.Values]:
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

    def draw(axes: Axes) -> None:
        drawing.by_decile(
            axes, "squared norm, summed over steps", lines, colours=drawing.GROUPS.values(), log=True
        )

    alt = f"Lines over ten deciles, log scale: {ends_of_lines(lines, three_digits)}"
    return Panel(f"Gradient of a row: {short(run.name)}", alt, draw, 3.6)


def _amplification(run: Run, decile: int) -> str:
    ratio = run.result("gradients").get("amplification", [None] * 10)[decile]
    return NOT_MEASURED if ratio is None else f"{ratio:.3g} (K = {run.blocks})"


GRADIENTS = Figure(
    name="gradients",
    place="Proposition 3.2",
    title="Gradient that rows collected",
    says="What the trainer recorded, before clipping. With a tied head, E gets gradient in two ways, shown "
    "apart: through the input only tokens of the batch, through the head every token at every step.",
    needs=("gradients",),
    panels=of_each(_gradient_panel),
    compare=beside(
        paper.AMPLIFICATION.values(),
        *(partial(_amplification, decile=decile) for decile in paper.AMPLIFICATION),
    ),
)
