"""The memory from the inside: what it takes, how far apart its tables are, who draws on it, and where."""

from operator import le
from typing import TYPE_CHECKING, Any

from tide_lm.report import paper
from tide_lm.report.drawing import (
    DECILES,
    INK,
    MARKERS,
    PALETTE,
    decile_axis,
    heatmap,
    legend,
    log_scale,
    numbers,
    sequence,
)
from tide_lm.report.figure import Comparison, Figure, Panel, Runs
from tide_lm.report.formatting import NOT_MEASURED, ends, gigabytes, percent, short, steps
from tide_lm.report.results import MissingError, Run, alike

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def footprint_bytes(run: Run, blocks: int, bits: int, where: str) -> int | None:
    rows = run.result("footprint")["rows"]
    return next((row[where] for row in rows if (row["blocks"], row["bits"]) == (blocks, bits)), None)


def _footprint_panel(name: str, run: Run) -> Panel:
    """Draw, as the paper does, weights in VRAM in 8 bits and tables on SSD in 4."""
    rows = run.result("footprint")["rows"]
    blocks = sorted({row["blocks"] for row in rows})
    vram = [footprint_bytes(run, k, 8, "vram_bytes") or 0 for k in blocks]
    ssd = [footprint_bytes(run, k, 4, "ssd_bytes") or 0 for k in blocks]
    size, unit = (1e9, "GB") if max(vram) >= 1e8 else (1e6, "MB")

    def draw(axes: "Axes") -> None:
        places = range(len(blocks))
        axes.bar(
            [place - 0.2 for place in places],
            [value / size for value in vram],
            0.38,
            color=PALETTE[0],
            label="VRAM, 8 bits",
        )
        axes.bar(
            [place + 0.2 for place in places],
            [value / size for value in ssd],
            0.38,
            color=PALETTE[1],
            label="tables on SSD, 4 bits",
        )
        axes.set_xticks(places, [str(k) for k in blocks])
        axes.set_xlabel("memory blocks K")
        axes.set_ylabel(unit)
        legend(axes)

    alt = f"Bars over K for the shape of {name}: VRAM {gigabytes(vram[0])} at K = {blocks[0]}, "
    alt += f"{gigabytes(vram[-1])} at K = {blocks[-1]}; SSD up to {gigabytes(ssd[-1])}"
    return Panel(f"VRAM and SSD: {short(name)}", alt, draw)


def _compare_footprint(runs: Runs) -> list[Comparison]:
    return [
        Comparison(
            "VRAM without memory, 8 bits",
            f"{paper.VRAM_8_BIT / 1e9:.2f} GB at 1B",
            "section 3.2, Figure 4",
            [gigabytes(footprint_bytes(run, 0, 8, "vram_bytes")) for run in runs],
        ),
        Comparison(
            "tables on SSD at K = 24, 4 bits",
            f"{paper.SSD_24_BLOCKS / 1e9:.3f} GB at 1B",
            "section 3.2, Figure 4",
            [gigabytes(footprint_bytes(run, 24, 4, "ssd_bytes")) for run in runs],
        ),
    ]


FOOTPRINT = Figure(
    name="footprint",
    place="Figure 4",
    title="VRAM and SSD by number of blocks",
    says="Computed from the shape of the model, for its own K and the paper's. As in the paper, 4 bits count "
    "the codes alone, without a codec's scales.",
    needs=("footprint",),
    panels=lambda runs: [_footprint_panel(*item) for item in alike(runs, "footprint", "rows").items()],
    compare=_compare_footprint,
)


def _distance_panel(run: Run) -> Panel:
    result = run.result("distances")
    names = result["tables"]

    def draw(axes: "Axes") -> None:
        heatmap(axes, result["distance"], "mean cosine distance", written="z.2f" if len(names) < 12 else None)
        axes.set_xticks(range(len(names)), names, fontsize=9)
        axes.set_yticks(range(len(names)), names, fontsize=9)

    to_e = result["distance"][0][1:]
    alt = (
        f"Heatmap of {len(names)} tables of {run.name}; distance to E from {min(to_e):.2f} to {max(to_e):.2f}"
    )
    return Panel(f"Distance between tables: {short(run.name)}", alt, draw, height=3.8)


def _compare_distances(runs: Runs) -> list[Comparison]:
    def to_e(run: Run) -> str:
        row = run.result("distances")["distance"][0][1:]
        return f"{min(row):.3f} to {max(row):.3f}"

    def between(run: Run) -> str:
        rows = run.result("distances")["distance"][1:]
        found = [value for place, row in enumerate(rows) for value in row[1 : place + 1]]
        return f"{min(found):.3f} to {max(found):.3f}" if found else NOT_MEASURED

    least, most = paper.DISTANCE_TO_E
    return [
        Comparison(
            "mean cosine distance of the tables to E",
            f"{least:.2f} to {most:.2f} (TIDE-8E-1B)",
            "section 4.2, Figure 9",
            [to_e(run) for run in runs],
        ),
        Comparison(
            "mean cosine distance between tables",
            "smaller than to E; no number",
            "section 4.2",
            [between(run) for run in runs],
        ),
    ]


DISTANCES = Figure(
    of_memory=True,
    name="distances",
    place="Figure 9",
    title="Distance between E and the tables",
    says="0 is the same direction, 1 is at right angles. Random directions are near 1, so tables that have "
    "hardly been trained are far apart too.",
    needs=("distances",),
    panels=lambda runs: [_distance_panel(run) for run in runs],
    compare=_compare_distances,
)


def null_bank(layer: list[list[float] | None]) -> list[float | None]:
    """The weight of the null bank in each decile."""
    return [row[-1] if row else None for row in layer[:10]]


def _routing_panels(run: Run) -> list[Panel]:
    result = run.result("routing")
    layers = result["by_layer"]
    last = layers[-1]
    text = f"{sum(result['tokens']):,} tokens of {short(result['text'])}"
    slots = max(len(row) for row in last if row)
    names = [*(f"M{slot + 1}" for slot in range(slots - 1)), "null"]
    rows = [row or [None] * slots for row in last[:10]]
    highest = max(max(row) for row in last[:10] if row)

    def draw_slots(axes: "Axes") -> None:
        heatmap(axes, rows, "mean weight", limits=(0, highest), written="z.2f" if slots < 10 else None)
        axes.set_xticks(range(slots), names, fontsize=9)
        axes.set_xlabel(f"slots, on {text}")
        axes.set_yticks(range(10))
        axes.set_ylabel(DECILES)

    def draw_null(axes: "Axes") -> None:
        for number, (layer, colour) in enumerate(zip(layers, sequence(len(layers)), strict=True)):
            final = number == len(layers) - 1
            label = f"layer {number}" if number == 0 else f"layer {number}, the last" if final else None
            axes.plot(
                range(10),
                numbers(null_bank(layer)),
                color=PALETTE[1] if final else colour,
                marker=MARKERS[1 if final else 0],
                linewidth=2.4 if final else 1.2,
                label=label if len(layers) > 1 else "layer 0",
            )
        decile_axis(axes, "mean weight of the null bank")
        legend(axes)

    told = ends(null_bank(last))
    return [
        Panel(
            f"Router weights, last layer: {short(run.name)}",
            f"Heatmap of deciles by slots in the last layer of {run.name}, on {text}; null bank {told}",
            draw_slots,
            height=3.9,
        ),
        Panel(
            f"The null bank in every layer: {short(run.name)}",
            f"Lines over ten deciles, one for each of {len(layers)} layers; the last: {told}",
            draw_null,
            height=3.9,
        ),
    ]


def _has_deciles(run: Run) -> None:
    if not any(run.result("routing")["by_layer"][-1][:10]):
        raise MissingError(f"the text of {run.path} has no token in a decile: {run.cure('routing')}")


def _compare_routing(runs: Runs) -> list[Comparison]:
    def last(run: Run) -> list[Any]:
        return run.result("routing")["by_layer"][-1]

    def largest(run: Run) -> str:
        row = last(run)[0]
        return f"{max(row[:-1]):.3f} (M{row.index(max(row[:-1])) + 1})" if row else NOT_MEASURED

    rarest, commonest = paper.NULL_BANK
    place = "section 4.2, Figure 10"
    return [
        Comparison(
            "null bank, last layer, rarest to commonest decile",
            f"{rarest:.3f} to {commonest:.3f}",
            place,
            [ends(null_bank(last(run))) for run in runs],
        ),
        Comparison(
            "its weight does not fall from decile to decile",
            "at all 9 steps",
            place,
            [steps(null_bank(last(run)), le) for run in runs],
        ),
        Comparison(
            "largest weight of a block on the rarest decile",
            f"about {paper.LARGEST_BLOCK} (M5 of 8)",
            place,
            [largest(run) for run in runs],
        ),
    ]


ROUTING = Figure(
    of_memory=True,
    name="routing",
    place="Figure 10",
    title="What the layers draw from memory",
    says="Mean router weights by the frequency of the input token; the null bank adds nothing, so its weight "
    "is the share that a layer declines to add to its state. An untrained router gives every slot that its "
    "layer has about as much, 1 / (K + 1).",
    needs=("routing",),
    check=_has_deciles,
    panels=lambda runs: [panel for run in runs for panel in _routing_panels(run)],
    compare=_compare_routing,
)


def _drop_panel(run: Run, name: str, text: dict[str, Any]) -> Panel:
    change = [value * 100 for value in text["change"]]

    def draw(axes: "Axes") -> None:
        axes.bar(range(len(change)), change, 0.7, color=PALETTE[run.place % len(PALETTE)])
        axes.axhline(0, color=INK, linewidth=0.8)
        if max(map(abs, change)) > 100:
            log_scale(axes, linthresh=10)
        axes.set_xlabel("layer whose memory is taken out")
        axes.set_ylabel("change of the perplexity, %")
        axes.locator_params(axis="x", integer=True)

    worst = max(range(len(change)), key=change.__getitem__)
    most = percent(text["change"][worst])
    alt = f"Bars over {len(change)} layers of {run.name}: most at layer {worst}, {most}"
    return Panel(f"Without one layer's memory: {short(name, 14)}, {short(run.name, 18)}", alt, draw)


def _drop_panels(runs: Runs) -> list[Panel]:
    return [_drop_panel(run, *item) for run in runs for item in run.result("layer-drop")["texts"].items()]


def _compare_drop(runs: Runs) -> list[Comparison]:
    def change(run: Run, layers: range) -> str:
        told = []
        for name, text in run.result("layer-drop")["texts"].items():
            found = [text["change"][layer] for layer in layers if layer < len(text["change"])]
            if found:
                extremes = dict.fromkeys(percent(value) for value in (min(found), max(found)))
                told.append(f"{name} {' to '.join(extremes)}")
        return "; ".join(told) or f"{NOT_MEASURED}: it has fewer layers"

    def any_layer(run: Run) -> str:
        texts = run.result("layer-drop")["texts"].items()
        return "; ".join(f"{name} {percent(text['without_any'] / text['full'] - 1)}" for name, text in texts)

    rows = [
        Comparison(
            f"perplexity without {layers}",
            stated,
            "appendix H, Figure 11",
            [change(r, span) for r in runs],
        )
        for (layers, stated), span in zip(
            paper.LAYER_DROP.items(), (range(1), range(1, 2), range(4, 13), range(13, 14)), strict=True
        )
    ]
    return [*rows, Comparison("perplexity without any", "not stated", "", [any_layer(run) for run in runs])]


LAYER_DROP = Figure(
    of_memory=True,
    name="layer-drop",
    place="Figure 11",
    title="One layer's memory taken out",
    says="How much the perplexity changes without retraining: what a layer needs in this model, not what a "
    "model trained without it would lose.",
    needs=("layer-drop",),
    panels=_drop_panels,
    compare=_compare_drop,
)
