"""What smaller tables cost: fewer bits, and lower ranks."""

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from tide_lm.report import paper
from tide_lm.report.drawing import INK, MARKERS, PALETTE, decile_axis, legend, log_scale, numbers
from tide_lm.report.figure import Comparison, Figure, Panel, Runs, Table
from tide_lm.report.formatting import NOT_MEASURED, difference, percent, short
from tide_lm.report.results import MissingError, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Result = Mapping[str, Any]  # results/compression.json
Form = Mapping[str, Any]  # as it has them


def _of(run: Run) -> Result:
    return run.result("compression")


def _of_bits(form: Form) -> bool:
    return form["rank"] == 1


def _as_in_the_paper(form: Form) -> bool:
    return form["rank"] < 1 and form["bits"] == 16 and form["blocks"] == "even" and not form["weighted"]


def _of_half(form: Form) -> bool:
    return form["rank"] == 0.5 and form["bits"] == 16 and (form["blocks"] == "joint" or not form["weighted"])


_FAMILIES: dict[str, Callable[[Form], bool]] = {
    "fewer bits": _of_bits,
    "rank of each block, as in the paper": _as_in_the_paper,
    "rank of all blocks together": lambda form: (
        form["rank"] < 1 and form["bits"] == 16 and form["blocks"] == "joint" and not form["weighted"]
    ),
    "rank, uneven or weighted": lambda form: (
        form["rank"] < 1 and form["bits"] == 16 and (form["blocks"] == "uneven" or form["weighted"] > 0)
    ),
    "rank and bits": lambda form: form["rank"] < 1 and form["bits"] < 16,
}


def _chosen(run: Run, wanted: Callable[[Form], bool]) -> list[Form]:
    return [form for form in _of(run)["forms"] if wanted(form)]


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
    """Nats that rare tokens lose in all texts together; None where frequencies were not known."""
    return _more(result, form, lambda text: (text["rare"]["loss"], text["rare"]["tokens"]))


def by_decile(result: Result, form: Form) -> list[float | None]:
    return [
        _more(
            result,
            form,
            lambda text: (text["loss_by_decile"][decile], text["tokens_by_decile"][decile]),  # noqa: B023
        )
        for decile in range(10)
    ]


def _more(result: Result, form: Form, part: Callable[[Form], tuple[float | None, int]]) -> float | None:
    texts = form["texts"]
    if any("rare" not in text for text in texts.values()):
        return None
    whole = result["as_trained"]
    found = [(*part(texts[name]), part(whole[name])[0]) for name in texts]
    lost = [(after - before) * tokens for after, tokens, before in found if after is not None and before]
    tokens = sum(tokens for _, tokens, _ in found)
    return sum(lost) / tokens if tokens else None


def _more_or_less(axes: "Axes", linear: float) -> None:
    """A log scale through zero, with no more room below it than is needed."""
    axes.axhline(0, color=INK, linewidth=0.8)
    low = min(axes.get_ylim()[0], -linear / 2) if axes.dataLim.y0 < 0 else -linear / 4
    log_scale(axes, linthresh=linear)
    axes.set_ylim(bottom=low)


def _by_bits(run: Run) -> Panel:
    forms = _chosen(run, _of_bits)
    names = [str(form["bits"]) for form in forms]
    found = [changes(_of(run), form) for form in forms]

    def draw(axes: "Axes") -> None:
        for text, colour, marker in zip(found[0], cycle(PALETTE), cycle(MARKERS), strict=False):
            more = [100 * value for value in numbers([change.get(text) for change in found])]
            axes.plot(names, more, color=colour, marker=marker, label=short(text))
        _more_or_less(axes, 0.01)
        axes.set_xlabel("bits of a number")
        axes.set_ylabel("change of perplexity, %")
        legend(axes)

    told = ", ".join(f"{form['form']} {percent(worst_change(_of(run), form), 2)}" for form in forms)
    alt = f"Lines of perplexity over bits, one for each text of {run.name}; of the worst text {told}"
    return Panel(f"Perplexity in fewer bits: {short(run.name)}", alt, draw, height=4.2)


def _curves(run: Run) -> Panel:
    families = {name: _chosen(run, wanted) for name, wanted in _FAMILIES.items()}

    def draw(axes: "Axes") -> None:
        for (name, forms), colour, marker in zip(families.items(), PALETTE, MARKERS, strict=False):
            forms = sorted(forms, key=lambda form: form["relative_bytes"])
            found = [worst_change(_of(run), form) for form in forms]
            axes.plot(
                [100 * form["relative_bytes"] for form in forms],
                [100 * value for value in numbers(found)],
                color=colour,
                marker=marker,
                linestyle="none" if "weighted" in name or "and" in name else "-",
                label=name,
            )
        _more_or_less(axes, 0.1)
        axes.set_xlabel("bytes, % of the tables in 16 bits")
        axes.set_ylabel("change of perplexity, worst text, %")
        legend(axes)

    told = [
        f"{form['form']} {percent(worst_change(_of(run), form), 2)}"
        for forms in families.values()
        for form in forms
    ]
    alt = f"Lines of bytes against the perplexity of the worst text of {run.name}: {', '.join(told)}"
    return Panel(f"Bytes against perplexity: {short(run.name)}", alt, draw, height=4.2)


def _deciles(run: Run, title: str, forms: Sequence[Form]) -> list[Panel]:
    lines = {form["form"]: by_decile(_of(run), form) for form in forms}

    def draw(axes: "Axes") -> None:
        for (name, values), colour, marker in zip(
            lines.items(), cycle(PALETTE), cycle(MARKERS), strict=False
        ):
            axes.plot(range(10), numbers(values), color=colour, marker=marker, label=name)
        axes.axhline(0, color=INK, linewidth=0.8)
        decile_axis(axes, "more loss, nats")
        legend(axes)

    if not any(value is not None for values in lines.values() for value in values):
        return []
    told = "; ".join(f"{name} {difference(values[0])} on the rarest" for name, values in lines.items())
    return [Panel(f"{title}: {short(run.name)}", f"Lines over ten deciles: {told}", draw, height=4.6)]


def _has(wanted: Callable[[Form], bool]) -> Callable[[Run], None]:
    def check(run: Run) -> None:
        if not _chosen(run, wanted):
            raise MissingError(f"{run.path} has none of the forms that it shows: {run.cure('compression')}")

    return check


def _table(runs: Runs, wanted: Callable[[Form], bool]) -> list[Table]:
    found = []
    for run in runs:
        texts = list(_of(run)["as_trained"])
        rows = [
            (
                form["form"],
                f"{form['relative_bytes']:.1%}".replace("%", " %"),
                *(percent(changes(_of(run), form).get(text), 3) for text in texts),
                difference(rare_change(_of(run), form)),
            )
            for form in _chosen(run, wanted)
        ]
        caption = f"{run.name}: bytes of a store over those of the tables in 16 bits, the change of "
        caption += "perplexity, and the nats that rare tokens lose."
        found.append(Table(caption, ["form", "bytes", *texts, "rare tokens"], rows))
    return found


def _compare(runs: Runs, stated: Mapping[str, tuple[str, str]], place: str) -> list[Comparison]:
    def told(run: Run, name: str) -> str:
        found = [form for form in _of(run)["forms"] if form["form"] == name]
        more = changes(_of(run), found[0]) if found else {}
        return ", ".join(f"{text} {percent(change, 2)}" for text, change in more.items()) or NOT_MEASURED

    return [
        Comparison(what, theirs, place, [told(run, name) for run in runs])
        for name, (what, theirs) in stated.items()
    ]


BITS = Figure(
    of_memory=True,
    name="bits",
    place="Table 5",
    title="Tables in fewer bits",
    says="Norm and gain are folded into the rows, which are then rounded, each on its own; a group of 32 "
    "numbers has a scale. Router and transformer stay as they are.",
    needs=("compression",),
    check=_has(_of_bits),
    panels=lambda runs: [
        panel
        for run in runs
        for panel in (_by_bits(run), *_deciles(run, "Fewer bits", _chosen(run, _of_bits)))
    ],
    tables=lambda runs: _table(runs, _of_bits),
    compare=lambda runs: _compare(runs, paper.BITS, "appendix J, Table 5"),
)
RANKS = Figure(
    of_memory=True,
    name="ranks",
    place="Figure 12",
    title="Tables of lower rank",
    says="It is the folded rows that are approximated, after norm and gain; the paper may mean the tables "
    "before them. A weight is a power of how often a token occurs.",
    needs=("compression",),
    check=_has(lambda form: not _of_bits(form)),
    panels=lambda runs: [
        panel
        for run in runs
        for panel in (_curves(run), *_deciles(run, "Half the rank", _chosen(run, _of_half)))
    ],
    tables=lambda runs: _table(runs, lambda form: not _of_bits(form)),
    compare=lambda runs: _compare(runs, paper.RANKS, "appendix J, Figure 12"),
)
