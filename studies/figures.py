"""The study's own figures: how much models gain, their loss against tokens, and what a cache finds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from studies.results import Kept, Spread, Study
from tide_lm.report.drawing import INK, MARKERS, PALETTE, legend, token_axis
from tide_lm.report.figure import Axes, Panel
from tide_lm.report.formatting import count
from tide_lm.report.results import Run


def model_of(run: Kept) -> str:
    record = run.record
    return f"TIDE-{record['k']}E" if record["model"] == "tide" else record["model"]


def name_of(run: Kept) -> str:
    """Return the model and its recipe."""
    return model_of(run) if run.record["model"] == "base" else f"{model_of(run)} ({run.record['recipe']})"


def opened(kept: Sequence[Kept]) -> list[Run]:
    """Return runs as the paper's figures read them, named by model and recipe."""
    return [
        Run(Path(run.name), name_of(run), place, run.results, run.record["metrics"], run.config)
        for place, run in enumerate(kept)
    ]


def gains(study: Study, kinds: Sequence[Sequence[Kept]]) -> Panel:
    """Draw a bar for each kind, and a dot for each seed."""
    found = {}
    for runs in kinds:
        record = runs[0].record
        of_seeds = study.gains(record["model"], record["recipe"], record["size"], record["k"])
        if of_seeds and record["model"] != "base":
            found[name_of(runs[0])] = list(of_seeds.values())

    def draw(axes: Axes) -> None:
        places = range(len(found), 0, -1)
        spreads = [Spread.of(values) for values in found.values()]
        errors = [spread.deviation or float("nan") for spread in spreads]
        axes.barh(places, [s.mean for s in spreads], 0.6, xerr=errors, color=PALETTE[0], capsize=3)
        for place, values in zip(places, found.values(), strict=True):
            axes.plot(values, [place] * len(values), "o", color=PALETTE[1], markersize=3.5)
        axes.set_yticks(list(places), list(found))
        axes.set_xlabel("nats less than its base")

    said = ", ".join(f"{name} {mean(values):.3f}" for name, values in found.items())
    title = "Gain over the base, by seed"
    return Panel(title, draw, 1 + 0.3 * len(found), f"Nats less than the base: {said}.")


def loss_by_tokens(kinds: Sequence[Sequence[Kept]]) -> Panel:
    """Draw a line for each kind, in a band that is one deviation wide on each side."""

    def draw(axes: Axes) -> None:
        for number, runs in enumerate(kinds):
            curves = [run.curve for run in runs]
            tokens = [at for at, _ in curves[0]]
            spreads = [Spread.of([loss for _, loss in points]) for points in zip(*curves, strict=True)]
            low, high = ([s.mean + side * (s.deviation or 0) for s in spreads] for side in (-1, 1))
            colour, marker = PALETTE[number], MARKERS[number]
            axes.plot(tokens, [s.mean for s in spreads], color=colour, marker=marker, label=name_of(runs[0]))
            axes.fill_between(tokens, low, high, color=colour, alpha=0.25, linewidth=0)
        last = [run.curve[-1][1] for runs in kinds for run in runs]
        axes.set_ylim(min(last) - 0.1, min(max(last) + 1.2, axes.get_ylim()[1]))
        token_axis(axes, "validation loss, nats")

    ends = ", ".join(f"{name_of(runs[0])} {mean(run.curve[-1][1] for run in runs):.3f}" for runs in kinds)
    return Panel("Loss against tokens", draw, alt=f"Losses at the end: {ends}.")


def cache_hits(cache: Mapping[str, Any]) -> Panel:
    """Draw a line for each text, and a thin one for a cache that begins empty."""
    curve = [point for point in cache["curve"] if point["cache_bytes"]]
    found = {
        text: [100 * point["texts"][text]["decode"]["hit_rate"] for point in curve] for text in cache["texts"]
    }

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import FuncFormatter

        sizes = [point["cache_bytes"] / 2**20 for point in curve]
        for number, (text, rates) in enumerate(found.items()):
            by_use = [100 * point["texts"][text]["by_use"] for point in curve]
            axes.plot(sizes, rates, color=PALETTE[number], marker=MARKERS[number], label=text)
            axes.plot(sizes, by_use, color=PALETTE[number], linestyle="--", linewidth=0.9)
        axes.plot([], [], color=INK, linestyle="--", linewidth=0.9, label="begins empty")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count(value)))
        axes.set_ylim(0, 100)
        axes.set(xlabel="cache, MiB", ylabel="hits, % of tokens")
        legend(axes)

    said = ", ".join(f"{text} {rates[0]:.1f} to {rates[-1]:.1f} %" for text, rates in found.items())
    alt = f"Hits from the smallest cache to the whole table: {said}."
    return Panel("Rows found in memory", draw, alt=alt)
