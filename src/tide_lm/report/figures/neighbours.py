"""Nearest neighbours in E and in each table: how far they agree, and what they are."""

from functools import partial
from statistics import median
from typing import Any

from tide_lm.report import paper
from tide_lm.report.drawing import GROUPS, INK, legend
from tide_lm.report.figure import Axes, Each, Figure, Runs, Table, beside, of_each
from tide_lm.report.formatting import NOT_MEASURED, token
from tide_lm.report.results import Run
from tide_lm.report.values import HIDDEN


def _groups(run: Run) -> dict[str, dict[str, Any]]:
    """Return the groups of tokens that have an overlap in each table."""
    result = run.result("neighbours")
    return {name: result[name] for name in ("rare", "common") if all(result[name]["jaccard"])}


def _medians(run: Run) -> str:
    """Say the medians of the groups, of the first and of the last table."""
    ends = {name: (group["jaccard"][0], group["jaccard"][-1]) for name, group in _groups(run).items()}
    said = (f"{name} from {median(a):.3g} to {median(b):.3g}" for name, (a, b) in ends.items())
    return "; ".join(("median Jaccard overlap with E, by table", *said))


def _draw_overlaps(axes: Axes, run: Run) -> None:
    result = run.result("neighbours")
    blocks = len(result["tables"]) - 1
    thin = {"color": INK, "linewidth": 0.8}
    for shift, (name, group) in zip((-0.2, 0.2), _groups(run).items(), strict=False):
        boxes = axes.boxplot(
            group["jaccard"],
            positions=[block + shift for block in range(blocks)],
            widths=0.32,
            patch_artist=True,
            manage_ticks=False,
            flierprops={"marker": ".", "markersize": 3, "markeredgecolor": GROUPS[name]},
            medianprops={"color": INK, "linewidth": 1.6},
            whiskerprops=thin,
            capprops=thin,
            boxprops={"facecolor": GROUPS[name], "edgecolor": INK, "linewidth": 0.8},
        )
        middle: dict[str, Any] = {
            "linestyle": "none",
            "color": GROUPS[name],
            "label": f"{HIDDEN}{name}, median",
        }
        axes.plot(range(blocks), list(map(median, group["jaccard"])), **middle)
        boxes["boxes"][0].set_label(f"{name} ({group['ids']:,} tokens)")
    axes.set_xticks(range(blocks), result["tables"][1:], fontsize=9)
    axes.set_ylim(bottom=-0.02)
    axes.set_ylabel("Jaccard overlap with E")
    legend(axes)


def _word_tables(runs: Runs) -> list[Table]:
    tables = []
    for run in runs:
        result = run.result("neighbours")
        for word, found in result["words"].items():
            overlaps = ["", *(f"{value:.2f}" for value in found["jaccard"])]
            rows = [
                (name, overlap, ", ".join(map(token, near)))
                for name, overlap, near in zip(result["tables"], overlaps, found["neighbours"], strict=True)
            ]
            columns = ["table", "overlap with E", "nearest neighbours, the nearest first"]
            tables.append(Table(f"{token(word)}, in {run}", columns, rows, numbers=False))
    return tables


def _lower_for_rare(run: Run) -> str:
    rare, common = (run.result("neighbours")[name]["jaccard"] for name in ("rare", "common"))
    pairs = [(median(a), median(b)) for a, b in zip(rare, common, strict=True) if a and b]
    return f"in {sum(a < b for a, b in pairs)} of {len(pairs)} tables" if pairs else NOT_MEASURED


def _word_overlap(run: Run, word: str) -> str:
    values = run.result("neighbours")["words"].get(word, {}).get("jaccard")
    return f"{min(values):.2f} to {max(values):.2f}" if values else NOT_MEASURED


NEIGHBOURS = Figure(
    of_memory=True,
    name="neighbours",
    place="Figure 13 and Table 6",
    title="Neighbours in E and in the tables",
    says="1 means that a table has the same ten neighbours as E, 0 none of them. Little agreement is what "
    "random rows give as well, so it is no evidence of meaning by itself. The words are examples, chosen by "
    "hand; ␣ is a space.",
    reads="neighbours",
    panels=of_each(Each("Agreement with E", _draw_overlaps, numbers=_medians)),
    tables=_word_tables,
    compare=beside(
        [paper.NEIGHBOURS, *paper.WORDS.values()],
        _lower_for_rare,
        *(partial(_word_overlap, word=word) for word in paper.WORDS),
    ),
)
