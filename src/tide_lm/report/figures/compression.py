"""What smaller tables cost: fewer bits, and lower ranks."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any

from tide_lm.report import paper
from tide_lm.report.drawing import MARKERS, PALETTE, decile_axis, legend, log_scale, numbers, plot, zero_line
from tide_lm.report.figure import Axes, Each, Figure, Runs, Table, beside, of_each
from tide_lm.report.formatting import NOT_MEASURED, difference, percent, percents
from tide_lm.report.results import BY_DECILE, Run

Result = Mapping[str, Any]  # results/compression.json
Form = Mapping[str, Any]  # of its `forms`
Wanted = Callable[[Form], bool]


def _has_full_rank(form: Form) -> bool:
    return form["rank"] == 1


def _has_lower_rank(form: Form) -> bool:
    return form["rank"] < 1


def _halves_rank(form: Form) -> bool:
    plain = form["blocks"] == "joint" or not form.get("weighted")
    return form["rank"] == 0.5 and form["bits"] == 16 and plain


def _way(form: Form) -> str:
    """Return which of _WAYS a form is made smaller in."""
    if form["rank"] == 1:
        return "bits"
    return "both" if form["bits"] < 16 else "uneven" if form.get("weighted") else form["blocks"]


_WAYS = {  # with their names, and the strokes between their points
    "bits": ("fewer bits", "-"),
    "even": ("rank of each block, as in the paper", "-"),
    "joint": ("rank of all blocks together", "-"),
    "uneven": ("rank, uneven or weighted", "none"),
    "both": ("rank and bits", "none"),
}


def _chosen(run: Run, wanted: Wanted) -> list[Form]:
    return [form for form in run.result("compression")["forms"] if wanted(form)]


def changes(result: Result, form: Form) -> dict[str, float | None]:
    """Return, by text, how much more perplexity it has than with the tables as trained."""
    found = {
        name: (text["perplexity"], form["texts"][name]["perplexity"])
        for name, text in result["as_trained"].items()
    }
    return {name: after / before - 1 if before and after else None for name, (before, after) in found.items()}


def worst_change(result: Result, form: Form) -> float | None:
    """Return the change of the text that loses most, as gains on another must not hide it."""
    found = list(changes(result, form).values())
    return max(value for value in found if value is not None) if None not in found else None


def rare_change(result: Result, form: Form) -> float | None:
    """Return the nats that rare tokens lose in all texts together; None where frequencies were not known."""
    return _lost(result, form, lambda text: (text["rare"]["loss"], text["rare"]["tokens"]))


def by_decile(result: Result, form: Form) -> list[float | None]:
    """Return the nats that the tokens of each decile lose in all texts together."""

    def lost(decile: int) -> float | None:
        return _lost(
            result, form, lambda text: (text["loss_by_decile"][decile], text["tokens_by_decile"][decile])
        )

    return [lost(decile) for decile in range(10)]


def _lost(result: Result, form: Form, part: Callable[[Form], tuple[float | None, int]]) -> float | None:
    pairs = [(text, result["as_trained"][name]) for name, text in form["texts"].items()]
    if not all(text.keys() >= BY_DECILE for pair in pairs for text in pair):
        return None
    found = [(*part(text), part(before)[0]) for text, before in pairs]
    lost = [(after - before) * tokens for after, tokens, before in found if after is not None and before]
    tokens = sum(tokens for _, tokens, _ in found)
    return sum(lost) / tokens if tokens else None


def _change_axis(axes: Axes, linear: float, what: str) -> None:
    """Make the vertical scale logarithmic through zero, with no more room below it than is needed."""
    zero_line(axes)
    low, high = axes.dataLim.y0, axes.dataLim.y1
    log_scale(axes, linthresh=linear)
    axes.set_ylim(min(2 * low, -linear / 4), max(2 * high, linear))
    axes.set_ylabel(what)
    legend(axes)


def _draw_bits(axes: Axes, run: Run) -> None:
    forms = _chosen(run, _has_full_rank)
    found = [changes(run.result("compression"), form) for form in forms]
    lines = {text: percents([change[text] for change in found]) for text in found[0]}
    plot(axes, lines, places=[str(form["bits"]) for form in forms])
    axes.set_xlabel("bits of a number")
    _change_axis(axes, 0.01, "change of perplexity, %")


def _draw_ranks(axes: Axes, run: Run) -> None:
    for (way, (name, stroke)), colour, marker in zip(_WAYS.items(), PALETTE, MARKERS, strict=False):
        forms = _chosen(run, lambda form: _way(form) == way)  # noqa: B023
        if not forms:
            continue
        forms.sort(key=lambda form: form["relative_bytes"])
        changed = percents([worst_change(run.result("compression"), form) for form in forms])
        style: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": stroke, "label": name}
        axes.plot([100 * form["relative_bytes"] for form in forms], numbers(changed), **style)
    axes.set_xlabel("bytes, % of the tables in 16 bits")
    _change_axis(axes, 0.1, "change of perplexity, worst text, %")


def _by_decile(title: str, wanted: Wanted) -> Each:
    def lines(run: Run) -> dict[str, list[float | None]]:
        return {form["form"]: by_decile(run.result("compression"), form) for form in _chosen(run, wanted)}

    def draw(axes: Axes, run: Run) -> None:
        plot(axes, lines(run))
        zero_line(axes)
        decile_axis(axes, "more loss, nats")

    return Each(title, draw, 4.6, lambda run: any(value is not None for value in chain(*lines(run).values())))


def _tables(runs: Runs, wanted: Wanted) -> list[Table]:
    found = []
    for run in runs:
        result = run.result("compression")
        rows = [
            (
                form["form"],
                f"{form['relative_bytes']:.1%}".replace("%", " %"),
                *(percent(change, 3) for change in changes(result, form).values()),
                difference(rare_change(result, form)),
            )
            for form in _chosen(run, wanted)
        ]
        caption = f"{run}: bytes of a store over those of the tables in 16 bits, the change of perplexity, "
        columns = ["form", "bytes", *result["as_trained"], "rare tokens"]
        found.append(Table(f"{caption}and the nats that rare tokens lose.", columns, rows))
    return found


def _change_of_form(run: Run, name: str) -> str:
    found = _chosen(run, lambda form: form["form"] == name)
    more = changes(run.result("compression"), found[0]) if found else {}
    return ", ".join(f"{text} {percent(change, 2)}" for text, change in more.items()) or NOT_MEASURED


def _lacks_forms(run: Run, wanted: Wanted) -> str | None:
    if _chosen(run, wanted):
        return None
    return f"{run.path} has no form that the figure shows: {run.cure('compression')}"


def _figure(wanted: Wanted, stated: Mapping[str, tuple[str, str, str]], **described: Any) -> Figure:
    """Return a figure of the forms that are wanted, beside what the paper states of some by name."""
    return Figure(
        of_memory=True,
        reads="compression",
        lacks=partial(_lacks_forms, wanted=wanted),
        tables=partial(_tables, wanted=wanted),
        compare=beside(stated.values(), *(partial(_change_of_form, name=name) for name in stated)),
        **described,
    )


BITS = _figure(
    _has_full_rank,
    paper.BITS,
    name="bits",
    place="Table 5",
    title="Tables in fewer bits",
    says="Norm and gain are folded into the rows, which are then rounded, each on its own; a group of 32 "
    "numbers has a scale. Router and transformer stay as they are.",
    panels=of_each(
        Each("Perplexity in fewer bits", _draw_bits, 4.2), _by_decile("Fewer bits", _has_full_rank)
    ),
)
RANKS = _figure(
    _has_lower_rank,
    paper.RANKS,
    name="ranks",
    place="Figure 12",
    title="Tables of lower rank",
    says="It is the folded rows that are approximated, after norm and gain; the paper may mean the tables "
    "before them. A weight is a power of how often a token occurs.",
    panels=of_each(
        Each("Bytes against perplexity", _draw_ranks, 4.2), _by_decile("Half the rank", _halves_rank)
    ),
)
