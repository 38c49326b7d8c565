"""What frequency does to rows: their norms, the updates they may expect, and the gradient they collected."""

from functools import partial
from operator import lt
from typing import Any

from tide_lm.report import drawing, paper
from tide_lm.report.figure import Axes, Each, Figure, Panel, Runs, Table, beside, of_alike, of_each
from tide_lm.report.formatting import (
    DECILE_NAMES,
    NOT_MEASURED,
    count,
    number,
    percent,
    percents,
    steps,
    three_digits,
    upper_bound,
)
from tide_lm.report.results import Run, alike
from tide_lm.report.values import HIDDEN


def _norm_panels(runs: Runs) -> list[Panel]:
    means: dict[Run, drawing.Values] = {run: run.result("norms")["embedding"] for run in runs}
    draw = partial(drawing.by_decile, what="mean L2 norm", lines=means)
    return [
        Panel("Mean norm of a token's row in E", draw),
        *of_each(Each("Rare and common rows", _draw_spread, numbers=_spread_means))(runs),
        *of_each(Each("Growth over training", _draw_growth, shows=lambda run: len(_points(run)) > 1))(runs),
        *of_each(Each("Norms in the tables", _draw_tables, shows=_tables))(runs),
    ]


def _spread_means(run: Run) -> str:
    spread = run.result("norms")["spread"]
    said = (f"{group} {number(spread[group]['mean'])}" for group in ("rare", "common"))
    return "; ".join(("mean L2 norm of the rows of E", *said))


def _draw_spread(axes: Axes, run: Run) -> None:
    spread = run.result("norms")["spread"]
    for group in ("rare", "common"):
        ids, colour = spread[group]["ids"], drawing.GROUPS[group]
        shares = [count / max(ids, 1) for count in spread[group]["histogram"]]
        axes.stairs(shares, spread["edges"], fill=True, alpha=0.3, color=colour)
        label = f"{group} ({ids:,} tokens)"
        axes.stairs(shares, spread["edges"], color=colour, label=label, linewidth=1.4)
    axes.set(xlabel="L2 norm of a row of E", ylabel="share of the group's tokens")
    drawing.legend(axes)


def _points(run: Run) -> list[dict[str, Any]]:
    return run.result("norms")["growth"]


def _draw_growth(axes: Axes, run: Run) -> None:
    points = _points(run)
    for decile, colour in enumerate(drawing.sequence(10)):
        grown = [growth(point["embedding"][decile], points[0]["embedding"][decile]) for point in points]
        label = DECILE_NAMES[decile] if decile in (0, 9) else f"{HIDDEN}{decile}"
        style = {"color": colour, "label": label, "marker": "."}
        axes.plot([point["tokens"] for point in points], drawing.numbers(percents(grown)), **style)
    drawing.zero_line(axes)
    drawing.token_axis(axes, "change since the first, %", "decile")


def _tables(run: Run) -> list[drawing.Values]:
    return run.result("norms")["tables"]


def _draw_tables(axes: Axes, run: Run) -> None:
    for block, values in enumerate(_tables(run)):
        style = drawing.look(run) | {"label": f"{HIDDEN}M{block + 1}"}
        axes.plot(range(10), drawing.numbers(values), **style, alpha=0.6)
    axes.plot([], [], **(drawing.look(run) | {"label": f"each of {len(_tables(run))} tables"}))
    drawing.decile_axis(axes, "mean L2 norm, before RMSNorm")


def _deviations(run: Run) -> str:
    spread = run.result("norms")["spread"]
    return " and ".join(three_digits(spread[group]["deviation"]) for group in ("rare", "common"))


def _growth_in_words(run: Run) -> str:
    points = _points(run)
    if len(points) < 2:
        return f"{NOT_MEASURED}: one checkpoint is kept" if points else f"{NOT_MEASURED}: no checkpoints"
    first, last = points[0]["embedding"], points[-1]["embedding"]
    return " and ".join(percent(growth(last[decile], first[decile])) for decile in (0, 9))


def growth(now: float | None, start: float | None) -> float | None:
    return None if now is None or not start else now / start - 1


NORMS = Figure(
    name="norms",
    place="Figure 1",
    title="Norms of embedding rows",
    says="How long the rows of E are, by how often their token occurs. Whether rare rows end up shorter "
    "depends on weight decay and on how long the run was.",
    reads="norms",
    panels=_norm_panels,
    compare=beside(
        paper.NORMS,
        lambda run: steps(run.result("norms")["embedding"], lt),
        _deviations,
        _growth_in_words,
    ),
)


def _draw_updates(axes: Axes, run: Run) -> None:
    result = run.result("updates")
    rows = [result["rows"][str(decile)] or {} for decile in range(10)]
    for key, style, group in (("occurrences", "s--", "common"), ("expected_updates", "o-", "rare")):
        values = drawing.numbers([row.get(key) for row in rows])
        label, colour = key.replace("_", " "), drawing.GROUPS[group]
        axes.plot(range(10), values, style, color=colour, label=label)
    drawing.log_scale(axes)
    drawing.decile_axis(axes, f"in {count(result['tokens'])} tokens")


def _update_table(named: str, run: Run) -> Table:
    result = run.result("updates")
    counts = ("frequency", "expected_updates", "occurrences")
    columns = ["tokens", "ids", "mean frequency", "expected updates", "occurrences"]
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
    return Table(f"{named}: {budget}", [*columns, "gradient ratio, at most"], rows)


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
    reads="updates",
    panels=of_alike("updates", "Updates of a row", _draw_updates),
    compare=beside(paper.UPDATES.values(), *(partial(_expected, name=name) for name in paper.UPDATES)),
    tables=lambda runs: [_update_table(*item) for item in alike(runs, "updates").items()],
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


def _draw_gradients(axes: Axes, run: Run) -> None:
    what, colours = "squared norm, summed over steps", drawing.GROUPS.values()
    drawing.by_decile(axes, what, gradient_lines(run), colours, log=True)


def _amplification(run: Run, decile: int) -> str:
    result = run.result("gradients")
    if not (tables := result.get("tables")):
        return "no tables"
    ratio = result.get("amplification", [None] * 10)[decile]
    return NOT_MEASURED if ratio is None else f"{ratio:.3g} (K = {len(tables)})"


GRADIENTS = Figure(
    name="gradients",
    place="Proposition 3.2",
    title="Gradient that rows collected",
    says="What the trainer recorded, before clipping. With a tied head, E gets gradient in two ways, shown "
    "apart: through the input only tokens of the batch, through the head every token at every step.",
    reads="gradients",
    panels=of_each(Each("Gradient of a row", _draw_gradients, 3.6)),
    compare=beside(
        paper.AMPLIFICATION.values(),
        *(partial(_amplification, decile=decile) for decile in paper.AMPLIFICATION),
    ),
)
