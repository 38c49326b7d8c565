"""Nearest neighbours in E and in each table: how far they agree, and what they are."""

from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from tide_lm.report import paper
from tide_lm.report.drawing import GROUPS, INK, legend
from tide_lm.report.figure import Comparison, Figure, Panel, Runs, Table
from tide_lm.report.formatting import NOT_MEASURED, short, token
from tide_lm.report.results import MissingError, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _overlap_panel(run: Run) -> Panel:
    result = run.result("neighbours")
    blocks = len(result["tables"]) - 1
    groups = {name: result[name]["jaccard"] for name in ("rare", "common") if result[name]["ids"]}

    def draw(axes: "Axes") -> None:
        for shift, (name, values) in zip((-0.2, 0.2), groups.items(), strict=False):
            boxes = axes.boxplot(
                values,
                positions=[block + shift for block in range(blocks)],
                widths=0.32,
                patch_artist=True,
                manage_ticks=False,
                flierprops={"marker": ".", "markersize": 3, "markeredgecolor": GROUPS[name]},
                medianprops={"color": INK, "linewidth": 1.6},
                whiskerprops={"color": INK, "linewidth": 0.8},
                capprops={"color": INK, "linewidth": 0.8},
                boxprops={"facecolor": GROUPS[name], "edgecolor": INK, "linewidth": 0.8},
            )
            boxes["boxes"][0].set_label(f"{name} ({result[name]['ids']:,} tokens)")
        axes.set_xticks(range(blocks), result["tables"][1:], fontsize=9)
        axes.set_ylabel("Jaccard overlap with E")
        axes.set_ylim(bottom=-0.02)
        legend(axes)

    told = ", ".join(f"{name} mean {fmean(map(fmean, values)):.3f}" for name, values in groups.items())
    return Panel(f"Agreement with E: {short(run.name)}", f"Box plots for {blocks} tables: {told}", draw)


def _compare_overlap(runs: Runs) -> list[Comparison]:
    def lower(run: Run) -> str:
        rare, common = (run.result("neighbours")[name]["jaccard"] for name in ("rare", "common"))
        pairs = [(median(a), median(b)) for a, b in zip(rare, common, strict=True) if a and b]
        return f"in {sum(a < b for a, b in pairs)} of {len(pairs)} tables" if pairs else NOT_MEASURED

    return [
        Comparison(
            "median overlap is lower for rare tokens than for common ones",
            "in every table; no number",
            "Figure 13",
            [lower(run) for run in runs],
        )
    ]


NEIGHBOURS = Figure(
    of_memory=True,
    name="neighbours",
    place="Figure 13",
    title="Neighbours in E and in the tables",
    says="1 means that a table has the same ten neighbours as E, 0 none of them. Little agreement is what "
    "random rows give as well, so it is no evidence of meaning by itself.",
    needs=("neighbours",),
    panels=lambda runs: [_overlap_panel(run) for run in runs],
    compare=_compare_overlap,
)


def _words(run: Run) -> dict[str, dict[str, Any]]:
    return run.result("neighbours")["words"]


def _has_words(run: Run) -> None:
    if not _words(run):
        raise MissingError(f"{run.path} has the neighbours of no words: {run.cure('neighbours')}")


def _word_tables(runs: Runs) -> list[Table]:
    tables = []
    for run in runs:
        names = run.result("neighbours")["tables"]
        for word, found in _words(run).items():
            overlaps = ["", *(f"{value:.2f}" for value in found["jaccard"])]
            rows = [
                (name, overlap, ", ".join(map(token, near)))
                for name, overlap, near in zip(names, overlaps, found["neighbours"], strict=True)
            ]
            columns = ["table", "overlap with E", "nearest neighbours, the nearest first"]
            tables.append(Table(f"{token(word)}, in {run.name}", columns, rows, numbers=False))
    return tables


def _word_panel(table: Table) -> Panel:
    import textwrap

    lines = [
        (f"{name} {overlap}".strip(), textwrap.wrap(near, 46, break_on_hyphens=False) or [""])
        for name, overlap, near in table.rows
    ]
    total = sum(len(near) for _, near in lines)

    def draw(axes: "Axes") -> None:
        axes.set_axis_off()
        axes.set_xlim(0, 1)
        axes.set_ylim(total, 0)
        place = 0.5
        for name, near in lines:
            axes.text(0, place, name, fontsize=9, fontweight="bold", va="center")
            for line in near:
                axes.text(0.16, place, line, fontsize=8.5, va="center")
                place += 1

    return Panel(table.caption, f"Neighbours of {table.caption}", draw, height=0.6 + 0.2 * total)


def _compare_words(runs: Runs) -> list[Comparison]:
    def ours(run: Run, word: str) -> str:
        values = _words(run).get(word, {}).get("jaccard")
        return f"{min(values):.2f} to {max(values):.2f}" if values else NOT_MEASURED

    return [
        Comparison(
            f"overlap of the tables with E for “{word}”",
            f"{least:.2f} to {most:.2f} (TIDE-8E-1B)",
            "Table 6",
            [ours(run, word) for run in runs],
        )
        for word, (least, most) in paper.WORD_OVERLAP.items()
    ]


WORDS = Figure(
    of_memory=True,
    name="words",
    place="Table 6",
    title="Neighbours of words",
    says="The tokens whose rows point most nearly the same way; ␣ is a space. Examples, chosen by hand.",
    needs=("neighbours",),
    check=_has_words,
    panels=lambda runs: [_word_panel(table) for table in _word_tables(runs)],
    tables=_word_tables,
    compare=_compare_words,
    drawn_on_page=False,
)
