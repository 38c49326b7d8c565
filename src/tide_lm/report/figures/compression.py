"""What smaller tables cost: fewer bits, and lower ranks."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tide_lm.report import paper
from tide_lm.report.drawing import MARKERS, PALETTE, decile_axis, legend, log_scale, numbers, plot, zero_line
from tide_lm.report.figure import Axes, Figure, Panel, Runs, Table, beside
from tide_lm.report.formatting import NOT_MEASURED, difference, percent, percents, short
from tide_lm.report.results import MissingError, Run

Result = Mapping[str, Any]  # results/compression.json
Form = Mapping[str, Any]  # of its `forms`
Wanted = Callable[[Form], bool]


def _has_full_rank(form: Form) -> bool:
    return form["rank"] == 1


def _has_lower_rank(form: Form) -> bool:
    return form["rank"] < 1


def _halves_rank(form: Form) -> bool:
    return form["rank"] == 0.5 and form["bits"] == 16 and (form["blocks"] == "joint" or not form["weighted"])


def _family(form: Form) -> str:
    if form["rank"] == 1:
        return "fewer bits"
    if form["bits"] < 16:
        return "rank and bits"
    if form["blocks"] == "uneven" or form["weighted"]:
        return "rank, uneven or weighted"
    return (
        "rank of all blocks together" if form["blocks"] == "joint" else "rank of each block, as in the paper"
    )


_FAMILIES = {  # with the strokes between their points
    "fewer bits": "-",
    "rank of each block, as in the paper": "-",
    "rank of all blocks together": "-",
    "rank, uneven or weighted": "none",
    "rank and bits": "none",
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


def _worst_of_each(run: Run, forms: Sequence[Form]) -> str:
    result = run.result("compression")
    return ", ".join(f"{form['form']} {percent(worst_change(result, form), 2)}" for form in forms)


def rare_change(result: Result, form: Form) -> float | None:
    """Return the nats that rare tokens lose in all texts together; None where frequencies were not known."""
    return _lost(result, form, lambda text: (text["rare"]["loss"], text["rare"]["tokens"]))


def by_decile(result: Result, form: Form) -> list[float | None]:
    def part(text: Form, decile: int) -> tuple[float | None, int]:
        return text["loss_by_decile"][decile], text["tokens_by_decile"][decile]

    return [_lost(result, form, partial(part, decile=decile)) for decile in range(10)]


def _lost(result: Result, form: Form, part: Callable[[Form], tuple[float | None, int]]) -> float | None:
    texts = form["texts"]
    if any("rare" not in text for text in texts.values()):
        return None
    found = [(*part(texts[name]), part(result["as_trained"][name])[0]) for name in texts]
    lost = [(after - before) * tokens for after, tokens, before in found if after is not None and before]
    tokens = sum(tokens for _, tokens, _ in found)
    return sum(lost) / tokens if tokens else None


def _change_axis(axes: Axes, linear: float, what: str) -> None:
    """Make the vertical scale logarithmic through zero, with no more room below it than is needed."""
    zero_line(axes)
    low = min(axes.get_ylim()[0], -linear / 2) if axes.dataLim.y0 < 0 else -linear / 4
    log_scale(axes, linthresh=linear)
    axes.set_ylim(bottom=low)
    axes.set_ylabel(what)
    legend(axes)


def _bits_panel(run: Run) -> Panel:
    forms = _chosen(run, _has_full_rank)
    found = [changes(run.result("compression"), form) for form in forms]

    def draw(axes: Axes) -> None:
        lines = {short(text): percents([change.get(text) for change in found]) for text in found[0]}
        plot(axes, lines, places=[str(form["bits"]) for form in forms])
        axes.set_xlabel("bits of a number")
        _change_axis(axes, 0.01, "change of perplexity, %")

    worst = _worst_of_each(run, forms)
    alt = f"Lines of perplexity over bits, one for each text of {run}; of the worst text {worst}"
    return Panel(f"Perplexity in fewer bits: {short(run.name)}", alt, draw, height=4.2)


def _ranks_panel(run: Run) -> Panel:
    result = run.result("compression")
    families = {name: _chosen(run, lambda form: _family(form) == name) for name in _FAMILIES}  # noqa: B023

    def draw(axes: Axes) -> None:
        for (name, forms), colour, marker in zip(families.items(), PALETTE, MARKERS, strict=False):
            forms = sorted(forms, key=lambda form: form["relative_bytes"])
            axes.plot(
                [100 * form["relative_bytes"] for form in forms],
                numbers(percents([worst_change(result, form) for form in forms])),
                color=colour,
                marker=marker,
                linestyle=_FAMILIES[name],
                label=name,
            )
        axes.set_xlabel("bytes, % of the tables in 16 bits")
        _change_axis(axes, 0.1, "change of perplexity, worst text, %")

    worst = _worst_of_each(run, [form for forms in families.values() for form in forms])
    alt = f"Lines of bytes against the perplexity of the worst text of {run}: {worst}"
    return Panel(f"Bytes against perplexity: {short(run.name)}", alt, draw, height=4.2)


def _deciles_panel(run: Run, title: str, wanted: Wanted) -> list[Panel]:
    result = run.result("compression")
    lines = {form["form"]: by_decile(result, form) for form in _chosen(run, wanted)}

    def draw(axes: Axes) -> None:
        plot(axes, lines)
        zero_line(axes)
        decile_axis(axes, "more loss, nats")

    if not any(value is not None for values in lines.values() for value in values):
        return []
    lost = "; ".join(f"{name} {difference(values[0])} on the rarest" for name, values in lines.items())
    return [Panel(f"{title}: {short(run.name)}", f"Lines over ten deciles: {lost}", draw, height=4.6)]


def _check_forms(run: Run, wanted: Wanted) -> None:
    run.result("compression")
    if not _chosen(run, wanted):
        raise MissingError(f"{run.path} has none of the forms that it shows: {run.cure('compression')}")


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


BITS = Figure(
    of_memory=True,
    name="bits",
    place="Table 5",
    title="Tables in fewer bits",
    says="Norm and gain are folded into the rows, which are then rounded, each on its own; a group of 32 "
    "numbers has a scale. Router and transformer stay as they are.",
    needs=("compression",),
    check=partial(_check_forms, wanted=_has_full_rank),
    panels=lambda runs: [
        panel
        for run in runs
        for panel in (_bits_panel(run), *_deciles_panel(run, "Fewer bits", _has_full_rank))
    ],
    tables=partial(_tables, wanted=_has_full_rank),
    compare=beside(paper.BITS.values(), *(partial(_change_of_form, name=name) for name in paper.BITS)),
)
RANKS = Figure(
    of_memory=True,
    name="ranks",
    place="Figure 12",
    title="Tables of lower rank",
    says="It is the folded rows that are approximated, after norm and gain; the paper may mean the tables "
    "before them. A weight is a power of how often a token occurs.",
    needs=("compression",),
    check=partial(_check_forms, wanted=_has_lower_rank),
    panels=lambda runs: [
        panel
        for run in runs
        for panel in (_ranks_panel(run), *_deciles_panel(run, "Half the rank", _halves_rank))
    ],
    tables=partial(_tables, wanted=_has_lower_rank),
    compare=beside(paper.RANKS.values(), *(partial(_change_of_form, name=name) for name in paper.RANKS)),
)
