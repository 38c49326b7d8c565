"""Loss and perplexity: by decile, by number of blocks, over training."""

import re
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from tide_lm.report import paper
from tide_lm.report.drawing import (
    GROUPS,
    bars_by_decile,
    by_decile,
    legend,
    log_scale,
    look,
    numbers,
    token_axis,
)
from tide_lm.report.figure import Comparison, Figure, Panel, Runs
from tide_lm.report.formatting import NOT_MEASURED, TOO_LARGE, difference, ends, nats, percent, short
from tide_lm.report.results import MissingError, Run, same_text, shared

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVE_POINTS = 400  # of a training curve: the means of as many equal parts
FIRST = "the first run"


def _has_losses(run: Run) -> None:
    run.refuse_damage("validation", "perplexity")
    if not run.losses:
        raise MissingError(f"{run.path} has no loss by decile: run `{run.maker('perplexity')} --counts DATA`")


def sources(runs: Runs) -> list[str]:
    """The texts on which all of the runs were measured, in the same windows and with the same deciles."""
    found = []
    for name in shared(run.losses for run in runs):
        losses = [run.losses[name] for run in runs]
        deciles = [text["tokens_by_decile"] for text in losses]
        if same_text(losses) and all(tokens == deciles[0] for tokens in deciles):
            found.append(name)
    return found


def change(value: float | None, reference: float | None) -> float | None:
    return None if value is None or reference is None else value - reference


def _named(source: str) -> str:
    return "held-out text" if source == "validation" else short(source)


def _decile_panels(runs: Runs) -> list[Panel]:
    panels = []
    for source in sources(runs):
        lines = {run: run.losses[source]["loss_by_decile"] for run in runs}
        panels.append(_lines_panel(source, lines))
        if len(runs) > 1:
            panels.append(_changes_panel(source, lines))
    return panels


def _lines_panel(source: str, lines: dict[Run, list[float | None]]) -> Panel:
    told = "; ".join(f"{run.name} {ends(values)}" for run, values in lines.items())
    return Panel(
        f"Loss by decile: {_named(source)}",
        f"Lines over ten deciles: {told}",
        lambda axes: by_decile(axes, "loss, nats", lines),
    )


def _changes_panel(source: str, lines: dict[Run, list[float | None]]) -> Panel:
    (first, reference), *others = lines.items()
    changes = {run: [change(*pair) for pair in zip(values, reference, strict=True)] for run, values in others}
    told = "; ".join(f"{run.name} {ends(values, difference)}" for run, values in changes.items())
    return Panel(
        f"Difference to {short(first.name, 20)}: {_named(source)}",
        f"Bars over ten deciles, below zero is better: {told}",
        lambda axes: bars_by_decile(axes, "difference of the loss, nats", changes),
    )


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

    return [
        *(
            Comparison(
                f"loss on the {name} against the first run, nats",
                f"{difference(-gain)} ({percent(-share)})",
                "section 3.3.2, Figure 5",
                [FIRST, *(at(losses, decile) for losses in others)],
            )
            for name, (gain, share), decile in (
                ("rarest decile", paper.GAIN_RAREST, 0),
                ("commonest decile", paper.GAIN_COMMONEST, 9),
            )
        ),
        Comparison(
            "gain on rare tokens over that on common ones",
            f"{paper.GAIN_RATIO}",
            "section 3.3.2",
            [FIRST, *(ratio(losses) for losses in others)],
        ),
    ]


LOSS_BY_DECILE = Figure(
    name="loss-by-decile",
    place="Figure 5",
    title="Loss by frequency of the predicted token",
    says="Differences are below zero where a run predicts better than the first one. A decile with few "
    "tokens is noisy.",
    check=_has_losses,
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
        title = f"Change from K = {blocks[0]}: {_named(source)}"
        panels += [
            _groups_panel(f"Loss against K: {_named(source)}", "loss, nats", blocks, lines),
            _groups_panel(title, "change of the loss, nats", blocks, changes),
        ]
    return panels


def _groups_panel(title: str, what: str, blocks: list[int], lines: dict[str, list[float | None]]) -> Panel:
    def draw(axes: "Axes") -> None:
        for (group, values), marker in zip(lines.items(), "os^", strict=True):
            axes.plot(blocks, numbers(values), color=GROUPS[group], marker=marker, label=group)
        axes.set_xticks(sorted(set(blocks)))
        axes.set_xlabel("memory blocks K")
        axes.set_ylabel(what)
        legend(axes)

    told = "; ".join(f"{group} {ends(values)}" for group, values in lines.items())
    return Panel(title, f"Lines over K from {blocks[0]} to {blocks[-1]}: {told}", draw)


def _has_blocks(run: Run) -> None:
    _has_losses(run)
    if run.blocks is None:
        raise MissingError(f"the number of blocks of {run.path} is not known: {run.cure('footprint')}")


def _compare_blocks(runs: Runs) -> list[Comparison]:
    if not (found := sources(runs)):
        return []
    ordered = _by_blocks(runs)
    least = ordered[0].losses[found[0]]

    def ours(group: str) -> list[str]:
        values = [run.losses[found[0]][group]["loss"] for run in runs]
        apart = [difference(change(value, least[group]["loss"])) for value in values]
        return [f"{nats(value)} ({change})" for value, change in zip(values, apart, strict=True)]

    before, after = paper.RARE_LOSS
    span = f"and its difference to K = {ordered[0].blocks}"
    place = "section 4.1, Figure 7"
    return [
        Comparison(
            f"loss on rare tokens, nats, {span}",
            f"{before:.3f} at K = 0, {after:.3f} ({difference(after - before)}) at K = 24",
            place,
            ours("rare"),
        ),
        Comparison(
            f"loss on common tokens, nats, {span}",
            f"{difference(paper.COMMON_CHANGE)} at K = 24",
            place,
            ours("common"),
        ),
    ]


LOSS_BY_BLOCKS = Figure(
    name="loss-by-blocks",
    place="Figure 7",
    title="Rare, mid and common tokens against K",
    says="One point a run, so a difference between two points holds for one seed only.",
    check=_has_blocks,
    at_least=2,
    panels=_block_panels,
    compare=_compare_blocks,
)


def stated_perplexity(text: str) -> str | None:
    """The paper's number, if a text has the name of one of its texts."""
    names = {_plain(name): f"{value:.3f} (TIDE-8E-1B, 16 bits)" for name, value in paper.PERPLEXITIES.items()}
    return next((stated for name, stated in names.items() if _plain(text).startswith(name)), None)


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


def perplexities(values: Sequence[float | None], texts: Sequence[Mapping[str, Any] | None]) -> list[str]:
    """Return one text's perplexity in each run, and what it was measured on where runs differ in that."""
    told = [
        NOT_MEASURED if text is None else _perplexity(value)
        for value, text in zip(values, texts, strict=True)
    ]
    if same_text([text for text in texts if text is not None]):
        return told
    return [
        value
        if text is None
        else f"{value} (of {text['bytes']:,} bytes, window {text['window']:,}, stride {text['stride']:,})"
        for value, text in zip(told, texts, strict=True)
    ]


def _checkpoint_panels(runs: Runs) -> list[Panel]:
    found = {run: run.result("checkpoints") for run in runs}
    return [
        _text_panel(
            text,
            {
                run: [(point["tokens"], point["perplexity"][text]) for point in result["points"]]
                for run, result in found.items()
            },
        )
        for text in shared(result["texts"] for result in found.values())
        if same_text([result["texts"][text] for result in found.values()])
    ]


def _text_panel(text: str, points: dict[Run, list[tuple[int, float | None]]]) -> Panel:
    curves = {run: [perplexity for _, perplexity in found] for run, found in points.items()}
    values = [value for curve in curves.values() for value in curve if value is not None]

    def draw(axes: "Axes") -> None:
        for run, found in points.items():
            axes.plot([tokens for tokens, _ in found], numbers(curves[run]), **look(run))
        if values and max(values) > 10 * min(values):
            log_scale(axes)
        token_axis(axes)
        axes.set_ylabel("perplexity by token")
        legend(axes)

    told = "; ".join(f"{run.name} {ends(curve, _perplexity)}" for run, curve in curves.items())
    return Panel(f"Perplexity over training: {short(text)}", f"Lines: {told}", draw)


def _perplexity(value: float | None) -> str:
    return TOO_LARGE if value is None else nats(value)


def _has_points(run: Run) -> None:
    if not run.result("checkpoints")["points"]:
        raise MissingError(f"results/checkpoints.json of {run.path} is empty: {run.cure('checkpoints')}")


def _compare_checkpoints(runs: Runs) -> list[Comparison]:
    found = [run.result("checkpoints") for run in runs]
    return [
        Comparison(
            f"perplexity on {text} at the last checkpoint",
            stated_perplexity(text) or "not stated",
            "Table 5" if stated_perplexity(text) else "",
            perplexities(
                [result["points"][-1]["perplexity"].get(text) for result in found],
                [result["texts"].get(text) for result in found],
            ),
        )
        for text in dict.fromkeys(text for result in found for text in result["texts"])
    ]


PERPLEXITY = Figure(
    name="perplexity",
    place="Figure 8",
    title="Perplexity over training",
    says="Perplexity depends on the tokenizer and on the windows a text is cut into: compare runs that share "
    "both. The paper does not say how it cut its texts.",
    needs=("checkpoints",),
    check=_has_points,
    panels=_checkpoint_panels,
    compare=_compare_checkpoints,
)


def training_curve(run: Run) -> tuple[list[float], list[float]]:
    """Tokens and training loss, averaged over equal parts of a long run."""
    found = [(line["tokens"], line["loss"]) for line in run.metrics if line.get("loss") is not None]
    size = -(-len(found) // CURVE_POINTS) or 1
    parts = [found[start : start + size] for start in range(0, len(found), size)]
    return [part[-1][0] for part in parts], [fmean(loss for _, loss in part) for part in parts]


def _training_panels(runs: Runs) -> list[Panel]:
    curves = {run: training_curve(run) for run in runs}

    def draw(axes: "Axes") -> None:
        for run, (tokens, losses) in curves.items():
            marker = look(run)["marker"] if len(tokens) < 30 else None
            axes.plot(tokens, losses, **(look(run) | {"marker": marker}), linewidth=1.4)
        token_axis(axes)
        axes.set_ylabel("loss, nats")
        legend(axes)

    told = "; ".join(f"{run.name} ends at {losses[-1]:.3f}" for run, (_, losses) in curves.items())
    return [Panel("Training loss", f"Lines over training tokens: {told}", draw)]


def _has_metrics(run: Run) -> None:
    run.refuse_damage("metrics")
    if not any(line.get("loss") is not None for line in run.metrics):
        raise MissingError(f"{run.path} has no metrics.jsonl with a loss: {run.cure('validation')}")


def _compare_training(runs: Runs) -> list[Comparison]:
    last = [nats(training_curve(run)[1][-1]) for run in runs]
    return [Comparison("last training loss, nats", "drawn; no number", "Figure 14", last)]


TRAINING_LOSS = Figure(
    name="training-loss",
    place="Figure 14",
    title="Training loss",
    says="The loss of single batches as they were logged; in a long run, means of many.",
    check=_has_metrics,
    panels=_training_panels,
    compare=_compare_training,
)
