"""The look of figures: colours that colour-blind readers can tell apart, and SVG that is the same every time.

matplotlib is imported where it is used, so that names and titles are known without it.
"""

import html
import re
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO, StringIO
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tide_lm.report.figure import Axes, Figure, Panel, Runs
from tide_lm.report.formatting import count, quantity, short
from tide_lm.report.results import Run
from tide_lm.report.values import ChartValues, read
from tide_lm.run.files import make_folder, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

# Okabe and Ito's, without black and yellow: one is the ink, the other cannot be seen on white.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
GROUPS = {"rare": "#d55e00", "mid": "#009e73", "common": "#0072b2"}
MARKERS = "os^Dvp"
STROKES: tuple[Any, ...] = ("-", "--", ":", "-.")
INK, GRID = "#1f2329", "#d5d9e0"  # as in figures.mplstyle
HEATMAP = "cividis"
LONGEST_LABEL = 40  # letters of a line that is no run
WIDTH = 4.6  # inches of a panel: a phone's screen, at the size of its letters
Values = Sequence[float | None]
Lines = Mapping[Any, Values]  # by run, or by label
DECILES = "frequency decile (0 rarest, 9 commonest)"


def write(figure: Figure, runs: Runs, folder: Path, kinds: Sequence[str] = ("svg", "png")) -> list[Path]:
    """Write NAME.svg and NAME.png of a figure, with all its panels on one sheet."""
    figure.demand(runs)
    return write_panels(figure.panels(runs), figure.name, folder, kinds)


def write_panels(panels: Sequence[Panel], name: str, folder: Path, kinds: Sequence[str]) -> list[Path]:
    """Write NAME.KIND with these panels on one sheet, for each kind."""
    make_folder(folder)
    written = []
    for kind in kinds:
        path = folder / f"{name}.{kind}"
        with _styled(name):
            content = BytesIO()
            metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
            _sheet(panels).savefig(content, format=kind, dpi=160, metadata=metadata)
        write_atomically(path, content.getvalue())
        written.append(path)
    return written


class Chart(NamedTuple):
    """A panel for an HTML page, and its values."""

    svg: str
    values: ChartValues


def inline_svg(panel: Panel, name: str) -> str:
    return inline_chart(panel, name).svg


def inline_chart(panel: Panel, name: str) -> Chart:
    """Draw a panel for an HTML page: its ids are its own, and ink and grid have the page's colours."""
    with _styled(name):
        content = StringIO()
        sheet = _sheet([panel])
        sheet.patch.set_alpha(0)
        sheet.savefig(content, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    svg = content.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = svg.replace(INK, "currentColor").replace(GRID, "var(--grid)")
    label = html.escape(panel.alt or _in_words(panel.title, sheet.axes[0]))
    svg = re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>',
        lambda found: f'<svg class="panel" viewBox="{found[1]}" role="img" aria-label="{label}">',
        svg,
        count=1,
    )
    return Chart(svg.strip(), read(sheet.axes[0]))


def _in_words(title: str, axes: Axes) -> str:
    """Describe what is drawn: the ends of each line and of each row of bars, and the span of a heat map."""
    maps = [cells for image in axes.images if (cells := image.get_array()) is not None]
    said = [f"heat map from {cells.min():.3g} to {cells.max():.3g}" for cells in maps]
    for drawn, label in zip(*axes.get_legend_handles_labels(), strict=True):
        values = drawn.get_ydata() if hasattr(drawn, "get_ydata") else getattr(drawn, "datavalues", ())
        known = [value for value in values if value == value]
        said.append(f"{label} from {known[0]:.3g} to {known[-1]:.3g}" if known else label)
    names = " over ".join(filter(None, (axes.get_ylabel(), axes.get_xlabel())))
    return "; ".join(filter(None, (title, names, *said)))


def _sheet(panels: Sequence[Panel]) -> "Canvas":
    from matplotlib.figure import Figure as Canvas

    columns = min(len(panels), 2 if len(panels) in (2, 4) else 3)
    rows = [panels[start : start + columns] for start in range(0, len(panels), columns)]
    heights = [max(panel.height for panel in row) for row in rows]
    sheet = Canvas(figsize=(WIDTH * columns, sum(heights)), layout="constrained")
    grid = sheet.add_gridspec(len(rows), columns, height_ratios=heights)
    for number, panel in enumerate(panels):
        part = sheet.add_subfigure(grid[number // columns, number % columns])
        part.suptitle(textwrap.fill(panel.title, 42), x=0.01, ha="left")
        panel.draw(part.add_subplot())
    sheet.draw_without_rendering()  # the layout settles once the labels are known
    return sheet


@contextmanager
def _styled(salt: str) -> Iterator[None]:
    import matplotlib

    style = Path(__file__).with_name("figures.mplstyle")
    with matplotlib.rc_context({"svg.hashsalt": salt}, fname=style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # tokens of scripts that the font lacks
        yield


def look(run: Run) -> dict[str, Any]:
    """Return a run's colour, marker and stroke, the same in all figures."""
    place = run.place
    return {
        "color": PALETTE[place % len(PALETTE)],
        "marker": MARKERS[place % len(MARKERS)],
        "linestyle": STROKES[place // len(PALETTE) % len(STROKES)],
        "label": short(run.name),
    }


def sequence(length: int) -> list[Any]:
    """Return colours from blue to vermilion, for lines in an order; both can be seen on light and on dark."""
    from matplotlib.colors import LinearSegmentedColormap

    return list(LinearSegmentedColormap.from_list("", PALETTE[:2], length)(range(length)))


def numbers(values: Values) -> list[float]:
    """Turn values into numbers for matplotlib, which leaves gaps at NaN."""
    return [float("nan") if value is None else value for value in values]


def plot(
    axes: Axes, lines: Lines, places: Sequence[Any] | None = None, colours: Iterable[Any] = PALETTE
) -> None:
    """Draw lines over their places, a run's in its own look and others by their names."""
    for (name, values), colour, marker in zip(lines.items(), cycle(colours), cycle(MARKERS), strict=False):
        style = _look_of(name, colour, marker)
        axes.plot(range(len(values)) if places is None else places, numbers(values), **style)


def _look_of(name: Any, colour: Any, marker: str | None = None) -> dict[str, Any]:
    named = {"color": colour, "marker": marker, "label": short(str(name), LONGEST_LABEL)}
    return look(name) if isinstance(name, Run) else named


def by_decile(
    axes: Axes, what: str, lines: Lines, colours: Iterable[Any] = PALETTE, log: bool = False
) -> None:
    """Draw lines over the ten deciles."""
    plot(axes, lines, colours=colours)
    if log:
        log_scale(axes)
    decile_axis(axes, what)


def zero_line(axes: Axes) -> None:
    axes.axhline(0, color=INK, linewidth=0.8)


def layer_axis(axes: Axes, what: str = "layer") -> None:
    axes.set_xlabel(what)
    axes.locator_params(axis="x", integer=True)


def decile_axis(axes: Axes, what: str) -> None:
    axes.set(xticks=range(10), xlabel=DECILES, ylabel=what)
    legend(axes)


def token_axis(axes: Axes, what: str, title: str | None = None) -> None:
    from matplotlib.ticker import FuncFormatter

    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: quantity(value)))
    axes.set(xlabel="training tokens", ylabel=what)
    legend(axes, title)


def legend(axes: Axes, title: str | None = None) -> None:
    """Draw the legend below the axes, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, min(len(labels), 46 // (max(map(len, labels)) + 6)))
    axes.legend(
        handles,
        labels,
        title=title,
        ncols=columns,
        loc="upper left",
        bbox_to_anchor=(-0.02, -0.2),
        borderaxespad=0,
        columnspacing=1.2,
        alignment="left",
    )


def log_scale(axes: Axes, **options: Any) -> None:
    """Make the vertical scale logarithmic, with plain numbers; `linthresh` makes it one through zero."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set_yscale("symlog" if options else "log", **options)
    plain = FuncFormatter(lambda value, _: count(value))
    low, high = axes.get_ylim()
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_formatter(NullFormatter() if options or high > 10 * low else plain)


def bars(axes: Axes, groups: Lines, share: float = 0.8) -> None:
    """Draw bars side by side at each place, one of each group; together they fill so much of it."""
    width = share / len(groups)
    for number, ((name, values), colour) in enumerate(zip(groups.items(), PALETTE, strict=False)):
        places = [place - share / 2 + width * (number + 0.5) for place in range(len(values))]
        style = _look_of(name, colour)
        axes.bar(places, numbers(values), width, color=style["color"], label=style["label"])


def heatmap(
    axes: Axes,
    rows: Sequence[Values],
    what: str,
    limits: tuple[float, float] | None = None,
    written: str | None = None,
) -> None:
    """Draw cells with a colour bar, and their values in them if `written` is a format."""
    import numpy as np

    cells = np.ma.masked_invalid(np.array([numbers(row) for row in rows], dtype=float))
    low, high = limits or (float(cells.min()), float(cells.max()))
    image = axes.imshow(cells, cmap=HEATMAP, aspect="auto", interpolation="none", vmin=low, vmax=high)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    bar = axes.figure.colorbar(image, ax=axes, label=what, fraction=0.05, pad=0.02)
    bar.outline.set_visible(False)
    if written is None:
        return
    for (row, column), value in np.ndenumerate(cells):
        if not np.ma.is_masked(value):
            shade = "#000000" if value > (low + high) / 2 else "#ffffff"
            text = format(float(value), written)
            axes.text(column, row, text, ha="center", va="center", color=shade, fontsize=8)
