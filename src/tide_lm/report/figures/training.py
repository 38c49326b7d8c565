"""Loss and perplexity over training."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from tide_lm.report import paper
from tide_lm.report.drawing import log_scale, look, numbers, token_axis
from tide_lm.report.figure import Axes, Comparison, Figure, Panel, Runs, beside
from tide_lm.report.formatting import NOT_MEASURED, number, short
from tide_lm.report.results import Run, same_text, shared

CURVE_POINTS = 100  # of a training curve, at least, if it has as many steps: the means of equal parts


def stated_perplexity(text: str) -> str | None:
    """Return the paper's number, if a text has the name of one of its texts."""
    names = {_plain(name): f"{value:.3f} (TIDE-8E-1B, 16 bits)" for name, value in paper.PERPLEXITIES.items()}
    return next((stated for name, stated in names.items() if _plain(text).startswith(name)), None)


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


def perplexities(values: Sequence[float | None], texts: Sequence[Mapping[str, Any] | None]) -> list[str]:
    """Return one text's perplexity in each run, and what it was measured on where runs differ in that."""
    alike = same_text([text for text in texts if text is not None])

    def shown(value: float | None, text: Mapping[str, Any] | None) -> str:
        if text is None:
            return NOT_MEASURED
        span = f" (of {text['bytes']:,} bytes, window {text['window']:,}, stride {text['stride']:,})"
        return _perplexity(value) + ("" if alike else span)

    return [shown(*pair) for pair in zip(values, texts, strict=True)]


def _perplexity(value: float | None) -> str:
    return "too large" if value is None else number(value)


def _checkpoint_panels(runs: Runs) -> list[Panel]:
    found = [run.result("checkpoints")["texts"] for run in runs]
    return [
        Panel(f"Perplexity over training: {short(text)}", partial(_draw_perplexity, runs=runs, text=text))
        for text in shared(found)
        if same_text([texts[text] for texts in found])
    ]


def _draw_perplexity(axes: Axes, runs: Runs, text: str) -> None:
    known = []
    for run in runs:
        points = run.result("checkpoints")["points"]
        curve = [point["perplexity"][text] for point in points]
        axes.plot([point["tokens"] for point in points], numbers(curve), **look(run))
        known += [value for value in curve if value is not None]
    if known and max(known) > 10 * min(known):
        log_scale(axes)
    token_axis(axes, "perplexity by token")


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
    reads="checkpoints",
    panels=_checkpoint_panels,
    compare=_compare_checkpoints,
)


def _logged(run: Run) -> list[tuple[float, float]]:
    """Return tokens and loss of the steps that have one."""
    run.refuse_damage("metrics")
    found = []
    for line in run.metrics:
        losses, step = line.get("losses") or [line.get("loss")], line["step"]
        for done, loss in enumerate(losses, start=step - len(losses) + 1):
            if loss is not None:
                found.append((line["tokens"] * done / max(step, 1), loss))
    return found


def _lacks_losses(run: Run) -> str | None:
    return None if _logged(run) else f"{run.path} has no metrics.jsonl with a loss: {run.cure('metrics')}"


def training_curve(run: Run) -> tuple[list[float], list[float]]:
    """Return tokens and training loss, averaged over equal parts of a long run."""
    found = _logged(run)
    size = len(found) // CURVE_POINTS or 1
    parts = [found[start : start + size] for start in range(0, len(found), size)]
    return [part[-1][0] for part in parts], [fmean(loss for _, loss in part) for part in parts]


def _draw_training(axes: Axes, runs: Runs) -> None:
    for run in runs:
        tokens, losses = training_curve(run)
        marker = look(run)["marker"] if len(tokens) < 30 else None
        axes.plot(tokens, losses, **(look(run) | {"marker": marker}), linewidth=1.4)
    token_axis(axes, "loss, nats")


TRAINING_LOSS = Figure(
    name="training-loss",
    place="Figure 14",
    title="Training loss",
    says="The loss of the batches of each step; in a longer run, means over equal numbers of steps.",
    reads="metrics",
    lacks=_lacks_losses,
    panels=lambda runs: [Panel("Training loss", partial(_draw_training, runs=runs))],
    compare=beside([paper.TRAINING_LOSS], lambda run: number(training_curve(run)[1][-1])),
)
