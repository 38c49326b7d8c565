"""One sentence under each question of the report, from the numbers of the runs."""

import math
from collections.abc import Callable, Sequence

from tide_lm.report.drawing import GROUPS
from tide_lm.report.figure import Runs
from tide_lm.report.figures.loss import change, sources
from tide_lm.report.formatting import difference, number, quantity
from tide_lm.report.meaning import sentence
from tide_lm.report.overview import parameters, size, speed
from tide_lm.report.results import Run

NOT_KNOWN = "Not known yet: "


def trained(runs: Runs) -> str:
    return _sentence([_trained(run) for run in runs])


def _trained(run: Run) -> str:
    if run.parameters is None:
        return f"{run} was not trained here"
    tables = f"{quantity(run.parameters.tables, '.3g')} of them in {run.blocks} tables"
    seen = f"{quantity(run.tokens, '.3g')} tokens" if run.tokens else "no tokens yet"
    return f"{run} has {size(run)}, {tables if run.blocks else 'none of them in tables'}, and saw {seen}"


def helped(runs: Runs) -> str:
    """Compare the losses of all tokens, with the parameters that each run has for its loss."""
    if not all(run.losses for run in runs) or not (shared := sources(runs)):
        measured = (
            "no loss on held-out text is measured" if len(runs) == 1 else "the runs share no measured text"
        )
        return f"{NOT_KNOWN}{measured}."
    text = "the held-out text" if shared[0] == "validation" else shared[0]
    first, *losses = (run.losses[shared[0]]["loss"] for run in runs)
    if not losses:
        alone = f"loss on {text} is {number(first)} nats, a perplexity of {_perplexity(first)}"
        return f"{runs[0]}: {alone}, with {size(runs[0])}; a second run would show whether that is good."
    said = []
    for run, loss in zip(runs[1:], losses, strict=True):
        more = f"{number(abs(loss - first))} nats {'less' if loss < first else 'more'} loss on {text} than"
        apart = more if abs(loss - first) >= 0.0005 else f"the same loss on {text} as"
        perplexities = f"perplexity {_perplexity(loss)} against {_perplexity(first)}"
        sizes = f"with {size(run)} against {parameters(runs[0])}"
        said.append(f"{run} has {apart} {runs[0]} ({perplexities}), {sizes}")
    return _sentence(said)


def _perplexity(loss: float) -> str:
    return number(math.exp(min(loss, 700)), ".4g")


def whom(runs: Runs) -> str:
    if not all(run.losses for run in runs) or not (shared := sources(runs)):
        return f"{NOT_KNOWN}no loss by decile is measured on a text that the runs share."
    first, *others = (run.losses[shared[0]] for run in runs)
    if not others:
        words = ", ".join(f"{number(first[group]['loss'])} on {group} tokens" for group in GROUPS)
        return f"{runs[0]} has a loss of {words}, in nats."
    said = []
    for run, losses in zip(runs[1:], others, strict=True):
        changes = {group: change(losses[group]["loss"], first[group]["loss"]) for group in GROUPS}
        words = ", ".join(f"{difference(apart)} on {group} tokens" for group, apart in changes.items())
        said.append(f"{run} against {runs[0]} {words}")
    return f"Change of the loss in nats: {_sentence(said)}"


def cost(runs: Runs) -> str:
    speeds = {run: rate for run in runs if (rate := speed(run))}
    return _meant(
        runs, "footprint", [f"{run} was trained at {rate:,.0f} tokens/s" for run, rate in speeds.items()]
    )


def memory(runs: Runs) -> str:
    return _meant(runs, "routing")


def _meant(runs: Runs, what: str, more: Sequence[str] = ()) -> str:
    """Say what a result means, of each run that has a memory."""
    found = {run: run.results[what] for run in runs if run.blocks and what in run.results}
    said = [f"{run}: {meant}" for run, result in found.items() if (meant := sentence(what, result))]
    if said or more:
        return _sentence([*said, *more])
    if all(run.blocks == 0 for run in runs):
        return "There is no memory in what was trained."
    return f"{NOT_KNOWN}{what} is not measured."


ANSWERS: dict[str, Callable[[Runs], str]] = {
    function.__name__: function for function in (trained, helped, whom, cost, memory)
}


def _sentence(parts: Sequence[str]) -> str:
    return "; ".join(parts) + "."
