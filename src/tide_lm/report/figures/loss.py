"""Loss and perplexity: by decile, by number of blocks, over training."""

from statistics import fmean
from typing import TYPE_CHECKING

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
from tide_lm.report.results import MissingError, Run, same_text, shared
from tide_lm.report.wording import NOT_MEASURED, difference, nats, percent, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVE_POINTS = 400  # of a training curve: the means of as many equal parts
FIRST = "the first run"


def _has_losses(run: Run) -> None:
    if not run.losses:
        raise MissingError(
            f"{run.path} has no loss by decile: run `{run.maker('validation')}`, "
            f"or `{run.maker('perplexity')} --counts DATA`"
        )


def sources(runs: Runs) -> list[str]:
    """The texts on which all of the runs were measured by decile, in the same way."""
    names = shared(run.losses for run in runs)
    return [name for name in names if same_text([run.losses[name] for run in runs])]


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
    told = "; ".join(f"{run.name} {nats(values[0])} to {nats(values[-1])}" for run, values in lines.items())
    return Panel(
        f"Loss by decile: {_named(source)}",
        f"Lines over ten deciles: {told}",
        lambda axes: by_decile(axes, "loss, nats", lines),
    )


def _changes_panel(source: str, lines: dict[Run, list[float | None]]) -> Panel:
    (first, reference), *others = lines.items()
    changes = {run: [change(*pair) for pair in zip(values, reference, strict=True)] for run, values in others}
    told = "; ".join(
        f"{run.name} {difference(values[0])} to {difference(values[-1])}" for run, values in changes.items()
    )
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
        return NOT_MEASURED if rare is None or not common else f"{rare / common:.2f}"

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
            "difference on rare tokens over that on common ones",
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
    "tokens is noisy: the table above has their numbers.",
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

    told = "; ".join(f"{group} {nats(values[0])} to {nats(values[-1])}" for group, values in lines.items())
    return Panel(title, f"Lines over K from {blocks[0]} to {blocks[-1]}: {told}", draw)


def _has_blocks(run: Run) -> None:
    _has_losses(run)
    if run.blocks is None:
        raise MissingError(f"the number of blocks of {run.path} is not known: run `{run.maker('footprint')}`")


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


def _checkpoint_panels(runs: Runs) -> list[Panel]:
    points = {run: run.result("checkpoints")["points"] for run in runs}
    return [
        _text_panel(
            text,
            {run: [(p["tokens"], p["perplexity"][text]) for p in found] for run, found in points.items()},
        )
        for text in shared(found[-1]["perplexity"] for found in points.values())
    ]


def _text_panel(text: str, points: dict[Run, list[tuple[int, float]]]) -> Panel:
    values = [perplexity for found in points.values() for _, perplexity in found]

    def draw(axes: "Axes") -> None:
        for run, found in points.items():
            axes.plot(*zip(*found, strict=True), **look(run))
        if max(values) > 10 * min(values):
            log_scale(axes)
        token_axis(axes)
        axes.set_ylabel("perplexity by token")
        legend(axes)

    told = "; ".join(
        f"{run.name} from {found[0][1]:.3f} to {found[-1][1]:.3f}" for run, found in points.items()
    )
    return Panel(f"Perplexity over training: {short(text)}", f"Lines: {told}", draw)


def _has_points(run: Run) -> None:
    if not run.result("checkpoints", "points")["points"]:
        raise MissingError(
            f"results/checkpoints.json of {run.path} is empty: run `{run.maker('checkpoints')}`"
        )


def _compare_checkpoints(runs: Runs) -> list[Comparison]:
    last = {run: run.result("checkpoints")["points"][-1]["perplexity"] for run in runs}
    stated = ", ".join(f"{name} {value:.3f}" for name, value in paper.PERPLEXITIES.items())
    return [
        Comparison(
            f"perplexity on {text} at the last checkpoint",
            f"{stated} (TIDE-8E-1B, 16 bits)",
            "Table 5",
            [nats(found.get(text)) for found in last.values()],
        )
        for text in dict.fromkeys(text for found in last.values() for text in found)
    ]


PERPLEXITY = Figure(
    name="perplexity",
    place="Figure 8",
    title="Perplexity over training",
    says="Perplexity depends on the tokenizer and on the windows a text is cut into: compare runs that share "
    "both. The paper does not say how it cut its texts.",
    needs={"checkpoints": ("points",)},
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
    if not any(line.get("loss") is not None for line in run.metrics):
        raise MissingError(f"{run.path} has no metrics.jsonl with a loss: run `{run.maker('validation')}`")


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
