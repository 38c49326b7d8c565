"""The memory from the inside: what it takes, how far apart its tables are, who draws on it, and where."""

from functools import partial
from operator import le
from typing import Any

from tide_lm.report import drawing, paper
from tide_lm.report.figure import Axes, Each, Figure, Panel, Runs, beside, of_alike, of_each
from tide_lm.report.formatting import NOT_MEASURED, ends, gigabytes, percent, short, steps
from tide_lm.report.results import Run
from tide_lm.report.values import HIDDEN


def footprint_bytes(run: Run, blocks: int, bits: int, where: str) -> int | None:
    rows = run.result("footprint")["rows"]
    return next((row[where] for row in rows if (row["blocks"], row["bits"]) == (blocks, bits)), None)


def _draw_footprint(axes: Axes, run: Run) -> None:
    """Draw, as the paper does, weights in VRAM in 8 bits and tables on SSD in 4."""
    blocks = sorted({row["blocks"] for row in run.result("footprint")["rows"]})
    found = {
        "VRAM, 8 bits": [footprint_bytes(run, k, 8, "vram_bytes") or 0 for k in blocks],
        "tables on SSD, 4 bits": [footprint_bytes(run, k, 4, "ssd_bytes") or 0 for k in blocks],
    }
    size, unit = (1e9, "GB") if max(found["VRAM, 8 bits"]) >= 1e8 else (1e6, "MB")
    drawing.bars(axes, {label: [each / size for each in values] for label, values in found.items()})
    axes.set_xticks(range(len(blocks)), [str(k) for k in blocks])
    axes.set(xlabel="memory blocks K", ylabel=unit)
    drawing.legend(axes)


FOOTPRINT = Figure(
    name="footprint",
    place="Figure 4",
    title="VRAM and SSD by number of blocks",
    says="Computed from the shape of the model, for its own K and the paper's. As in the paper, 4 bits count "
    "the codes alone, without a codec's scales.",
    reads="footprint",
    panels=of_alike("footprint", "VRAM and SSD", _draw_footprint),
    compare=beside(
        paper.FOOTPRINT,
        lambda run: gigabytes(footprint_bytes(run, 0, 8, "vram_bytes")),
        lambda run: gigabytes(footprint_bytes(run, 24, 4, "ssd_bytes")),
    ),
)


def _draw_distances(axes: Axes, run: Run) -> None:
    result = run.result("distances")
    names = result["tables"]
    written = "z.2f" if len(names) < 12 else None
    drawing.heatmap(axes, result["distance"], "mean cosine distance", written=written)
    for set_ticks in axes.set_xticks, axes.set_yticks:
        set_ticks(range(len(names)), names, fontsize=9)


def _distances_to_e(run: Run) -> str:
    row = run.result("distances")["distance"][0][1:]
    return f"{min(row):.3f} to {max(row):.3f}"


def _distances_between_tables(run: Run) -> str:
    rows = run.result("distances")["distance"][1:]
    found = [value for place, row in enumerate(rows) for value in row[1 : place + 1]]
    return f"{min(found):.3f} to {max(found):.3f}" if found else NOT_MEASURED


DISTANCES = Figure(
    of_memory=True,
    name="distances",
    place="Figure 9",
    title="Distance between E and the tables",
    says="0 is the same direction, 1 is at right angles. Random directions are near 1, so tables that have "
    "hardly been trained are far apart too.",
    reads="distances",
    panels=of_each(Each("Distance between tables", _draw_distances, 3.8)),
    compare=beside(paper.DISTANCES, _distances_to_e, _distances_between_tables),
)


def null_bank(layer: list[list[float] | None]) -> list[float | None]:
    """Return the weight of the null bank in each decile."""
    return [row[-1] if row else None for row in layer[:10]]


def _last_layer(run: Run) -> list[Any]:
    return run.result("routing")["by_layer"][-1]


def _draw_slots(axes: Axes, run: Run) -> None:
    result, last = run.result("routing"), _last_layer(run)[:10]
    slots = max(len(row) for row in last if row)
    highest = max(max(row) for row in last if row)
    rows, written = [row or [None] * slots for row in last], "z.2f" if slots < 10 else None
    drawing.heatmap(axes, rows, "mean weight", limits=(0, highest), written=written)
    axes.set_xticks(range(slots), [*(f"M{slot + 1}" for slot in range(slots - 1)), "null"], fontsize=9)
    what = f"slots, on {sum(result['tokens']):,} tokens of {short(result['text'])}"
    axes.set(xlabel=what, ylabel=drawing.DECILES, yticks=range(10))


def _draw_null_bank(axes: Axes, run: Run) -> None:
    layers = run.result("routing")["by_layer"]
    for number, (layer, colour) in enumerate(zip(layers, drawing.sequence(len(layers)), strict=True)):
        final = number == len(layers) - 1
        label = f"layer {number}, the last" if final else f"{HIDDEN if number else ''}layer {number}"
        axes.plot(
            range(10),
            drawing.numbers(null_bank(layer)),
            color=drawing.PALETTE[1] if final else colour,
            marker=drawing.MARKERS[1 if final else 0],
            linewidth=2.4 if final else 1.2,
            label=label,
        )
    drawing.decile_axis(axes, "mean weight of the null bank")


def _largest_block(run: Run) -> str:
    row = _last_layer(run)[0]
    return f"{max(row[:-1]):.3f} (M{row.index(max(row[:-1])) + 1})" if row else NOT_MEASURED


def _lacks_deciles(run: Run) -> str | None:
    if any(_last_layer(run)[:10]):
        return None
    return f"{run.path} has no token in a decile in the text that was read: {run.cure('routing')}"


ROUTING = Figure(
    of_memory=True,
    name="routing",
    place="Figure 10",
    title="What the layers draw from memory",
    says="Mean router weights by the frequency of the input token; the null bank adds nothing, so its weight "
    "is the share that a layer declines to add to its state. An untrained router gives every slot that its "
    "layer has about as much, 1 / (K + 1).",
    reads="routing",
    lacks=_lacks_deciles,
    panels=of_each(
        Each("Router weights, last layer", _draw_slots, 3.9),
        Each("The null bank in every layer", _draw_null_bank, 3.9),
    ),
    compare=beside(
        paper.ROUTING,
        lambda run: ends(null_bank(_last_layer(run))),
        lambda run: steps(null_bank(_last_layer(run)), le),
        _largest_block,
    ),
)


def _texts(run: Run) -> dict[str, dict[str, Any]]:
    return run.result("layer-drop")["texts"]


def _draw_drop(axes: Axes, run: Run, text: str) -> None:
    change = [value * 100 for value in _texts(run)[text]["change"]]
    colour = drawing.PALETTE[run.place % len(drawing.PALETTE)]
    axes.bar(range(len(change)), change, 0.7, color=colour, label=text)
    drawing.zero_line(axes)
    if max(map(abs, change)) > 100:
        drawing.log_scale(axes, linthresh=10)
    axes.set_ylabel("change of the perplexity, %")
    drawing.layer_axis(axes, "layer whose memory is taken out")


def _drop_panels(runs: Runs) -> list[Panel]:
    panels = []
    for run in runs:
        for text in _texts(run):
            title = f"Without one layer's memory: {short(text, 14)}, {short(run.name, 18)}"
            panels.append(Panel(title, partial(_draw_drop, run=run, text=text)))
    return panels


def _change_without_one(run: Run, layers: range) -> str:
    said = []
    for name, text in _texts(run).items():
        if found := [text["change"][layer] for layer in layers if layer < len(text["change"])]:
            extremes = dict.fromkeys(percent(value) for value in (min(found), max(found)))
            said.append(f"{name} {' to '.join(extremes)}")
    return "; ".join(said) or f"{NOT_MEASURED}: it has fewer layers"


def _change_without_any(run: Run) -> str:
    changes = {
        name: text["without_any"] / text["full"] - 1 if text["full"] else None
        for name, text in _texts(run).items()
    }
    return "; ".join(f"{name} {percent(change)}" for name, change in changes.items())


LAYER_DROP = Figure(
    of_memory=True,
    name="layer-drop",
    place="Figure 11",
    title="One layer's memory taken out",
    says="How much the perplexity changes without retraining: what a layer needs in this model, not what a "
    "model trained without it would lose.",
    reads="layer-drop",
    panels=_drop_panels,
    compare=beside(
        [*paper.LAYER_DROP.values(), ("perplexity without any", "not stated", "")],
        *(partial(_change_without_one, layers=layers) for layers in paper.LAYER_DROP),
        _change_without_any,
    ),
)
