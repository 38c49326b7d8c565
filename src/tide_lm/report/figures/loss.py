"""Loss by the frequency of the predicted token, and by the number of blocks."""

from functools import partial

from tide_lm.report import paper
from tide_lm.report.drawing import GROUPS, Lines, bars, by_decile, decile_axis, legend, plot, zero_line
from tide_lm.report.figure import Axes, Comparison, Figure, Panel, Runs
from tide_lm.report.formatting import NOT_MEASURED, difference, number, percent, short
from tide_lm.report.results import Run, same_text, shared


def _lacks_losses(run: Run) -> str | None:
    run.refuse_damage("validation", "perplexity")
    if run.losses:
        return None
    return f"{run.path} has no loss by decile: run `{run.maker('perplexity', by_frequency=True)}`"


def _lacks_losses_or_blocks(run: Run) -> str | None:
    reason = _lacks_losses(run)
    if reason is None and run.blocks is None:
        run.result("footprint")
    return reason


def sources(runs: Runs) -> list[str]:
    """Return the texts on which all runs were measured, in the same windows and with the same deciles."""

    def is_alike(name: str) -> bool:
        losses = [run.losses[name] for run in runs]
        return same_text(losses) and len({tuple(text["tokens_by_decile"]) for text in losses}) == 1

    return [name for name in shared(run.losses for run in runs) if is_alike(name)]


def change(value: float | None, reference: float | None) -> float | None:
    return None if value is None or reference is None else value - reference


def _named(source: str) -> str:
    return "held-out text" if source == "validation" else short(source)


def _decile_panels(runs: Runs) -> list[Panel]:
    panels = []
    for source in sources(runs):
        lines = {run: run.losses[source]["loss_by_decile"] for run in runs}
        draw = partial(by_decile, what="loss, nats", lines=lines)
        panels.append(Panel(f"Loss by decile: {_named(source)}", draw))
        if len(runs) > 1:
            title = f"Difference to {short(runs[0].name, 20)}: {_named(source)}"
            panels.append(Panel(title, partial(_draw_changes, lines=lines)))
    return panels


def _draw_changes(axes: Axes, lines: Lines) -> None:
    (_, reference), *others = lines.items()
    bars(axes, {run: list(map(change, values, reference)) for run, values in others})
    zero_line(axes)
    decile_axis(axes, "difference of the loss, nats")


def _compare_deciles(runs: Runs) -> list[Comparison]:
    if len(runs) < 2 or not (found := sources(runs)):
        return []
    first, *others = (run.losses[found[0]] for run in runs)

    def at(losses: dict, decile: int) -> str:
        before = first["loss_by_decile"][decile]
        apart = change(losses["loss_by_decile"][decile], before)
        return NOT_MEASURED if apart is None else f"{difference(apart)} ({percent(apart / before)})"

    def ratio(losses: dict) -> str:
        rare, common = (change(losses[group]["loss"], first[group]["loss"]) for group in ("rare", "common"))
        if rare is None or common is None:
            return NOT_MEASURED
        if rare < 0 and common < 0:
            return f"{rare / common:.2f}"
        return f"not both gain: rare {difference(rare)}, common {difference(common)}"

    rows = []
    for decile, (name, gain, share) in paper.GAINS.items():
        what = f"loss on the {name} decile against the first run, nats"
        ours = ["the first run", *(at(losses, decile) for losses in others)]
        stated = f"{difference(-gain)} ({percent(-share)})"
        rows.append(Comparison(what, stated, "section 3.3.2, Figure 5", ours))
    what, ours = "gain on rare tokens over that on common ones", ["the first run", *map(ratio, others)]
    return [*rows, Comparison(what, f"{paper.GAIN_RATIO}", "section 3.3.2", ours)]


LOSS_BY_DECILE = Figure(
    name="loss-by-decile",
    place="Figure 5",
    title="Loss by frequency of the predicted token",
    says="Differences are below zero where a run predicts better than the first one. A decile with few "
    "tokens is noisy.",
    reads="perplexity",
    lacks=_lacks_losses,
    panels=_decile_panels,
    compare=_compare_deciles,
)


def _by_blocks(runs: Runs) -> list[Run]:
    return sorted(runs, key=lambda run: run.blocks or 0)


def _block_panels(runs: Runs) -> list[Panel]:
    ordered = _by_blocks(runs)
    blocks = [run.blocks or 0 for run in ordered]
    panels = []
    for source in sources(runs):
        lines = {group: [run.losses[source][group]["loss"] for run in ordered] for group in GROUPS}
        changes = {group: [change(value, values[0]) for value in values] for group, values in lines.items()}
        for title, what, found in (
            ("Loss against K", "loss, nats", lines),
            (f"Change from K = {blocks[0]}", "change of the loss, nats", changes),
        ):
            draw = partial(_draw_groups, blocks=blocks, lines=found, what=what)
            panels.append(Panel(f"{title}: {_named(source)}", draw))
    return panels


def _draw_groups(axes: Axes, blocks: list[int], lines: Lines, what: str) -> None:
    plot(axes, lines, blocks, GROUPS.values())
    axes.set(xticks=sorted(set(blocks)), xlabel="memory blocks K", ylabel=what)
    legend(axes)


def _compare_blocks(runs: Runs) -> list[Comparison]:
    if not (found := sources(runs)):
        return []
    least = _by_blocks(runs)[0]

    def ours(group: str) -> list[str]:
        values = [run.losses[found[0]][group]["loss"] for run in runs]
        start = least.losses[found[0]][group]["loss"]
        return [f"{number(value)} ({difference(change(value, start))})" for value in values]

    before, after = paper.RARE_LOSS
    stated = {
        "rare": f"{before:.3f} at K = 0, {after:.3f} ({difference(after - before)}) at K = 24",
        "common": f"{difference(paper.COMMON_CHANGE)} at K = 24",
    }
    what, place = f"nats, and its difference to K = {least.blocks}", "section 4.1, Figure 7"
    return [
        Comparison(f"loss on {group} tokens, {what}", theirs, place, ours(group))
        for group, theirs in stated.items()
    ]


LOSS_BY_BLOCKS = Figure(
    name="loss-by-blocks",
    place="Figure 7",
    title="Rare, mid and common tokens against K",
    says="One point per run, so a difference between two points holds for one seed only.",
    reads="perplexity",
    lacks=_lacks_losses_or_blocks,
    at_least=2,
    panels=_block_panels,
    compare=_compare_blocks,
)
