"""The values of a chart, read from what was drawn: a table whose rows know their place in the drawing."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from tide_lm.report.formatting import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HIDDEN = "_"  # begins the label of a series that the legend leaves out and the table names
UNNAMED = ("_child", "_nolegend_")  # matplotlib's own: zero lines and the like
Points = dict[float, float]


class Part(NamedTuple):
    """The name of a row or column, and its place as a share of the drawing's width or height."""

    name: str
    at: float | None = None
    colour: str = ""


class ChartValues(NamedTuple):
    """The table of a chart. `by` says what finds a row under the pointer: x, y, or xy for cells.

    `frame` has the left, top, right and bottom edges of the axes, as shares of the drawing.
    """

    what: str
    by: str
    frame: tuple[float, ...]
    columns: list[Part]
    rows: list[tuple[Part, list[str]]]


def read(axes: "Axes") -> ChartValues:
    """Return the values of the lines, bars, steps or cells of some axes."""
    box = axes.get_window_extent()
    sheet: Any = axes.get_figure(root=True)
    right, top = sheet.bbox.size
    frame = tuple(map(_share, (box.x0 / right, 1 - box.y1 / top, box.x1 / right, 1 - box.y0 / top)))

    def part(place: float, axis: str, colour: str = "") -> Part:
        x, y = axes.transData.transform((place, place))
        return Part(_named(axes, axis, place), _share(x / right if axis == "x" else 1 - y / top), colour)

    if axes.images:
        cells: Any = axes.images[0].get_array()
        columns = [part(place, "x") for place in range(cells.shape[1])]
        rows = [
            (part(place, "y"), list(map(_shown, row))) for place, row in enumerate(cells.filled(float("nan")))
        ]
        return ChartValues(axes.get_ylabel(), "xy", frame, columns, rows)
    series = list(_series(axes))
    by = "y" if any(sideways for *_, sideways in series) else "x"
    places = sorted({place for _, _, points, _ in series for place in points})
    return ChartValues(
        axes.get_xlabel() if by == "x" else "",
        by,
        frame,
        [Part(name.removeprefix(HIDDEN), None, colour) for name, colour, _, _ in series],
        [(part(place, by), [_shown(points.get(place)) for _, _, points, _ in series]) for place in places],
    )


def _series(axes: "Axes") -> Iterator[tuple[str, str, Points, bool]]:
    """Give the name, the colour and the points of each series, and whether its values lie along x."""
    from matplotlib.colors import to_hex
    from matplotlib.container import BarContainer, ErrorbarContainer
    from matplotlib.lines import Line2D
    from matplotlib.patches import StepPatch

    places: Any
    values: Any
    drawn: Any
    for drawn in (*axes.lines, *axes.patches, *axes.containers):
        name, sideways = str(drawn.get_label()), isinstance(drawn, ErrorbarContainer)
        if not name or name.startswith(UNNAMED):
            continue
        if isinstance(drawn, BarContainer):
            places = [round(bar.get_x() + bar.get_width() / 2) for bar in drawn.patches]
            values, colour = drawn.datavalues, drawn.patches[0].get_facecolor()
        elif isinstance(drawn, ErrorbarContainer):
            line: Any = drawn.lines[0]
            places, values, colour = map(round, line.get_ydata()), line.get_xdata(), line.get_color()
        elif isinstance(drawn, StepPatch):
            values, edges, _ = drawn.get_data()
            places, colour = (edges[1:] + edges[:-1]) / 2, drawn.get_edgecolor()
        elif isinstance(drawn, Line2D):
            places, values, colour = drawn.get_xdata(False), drawn.get_ydata(False), drawn.get_color()
        else:
            continue
        if points := dict(zip(map(float, places), map(float, values), strict=True)):
            yield name, to_hex(colour), points, sideways


def _named(axes: "Axes", axis: str, place: float) -> str:
    """Return what a reader calls a place: the label of its tick, or its number as the axis writes it."""
    from matplotlib.ticker import FixedFormatter, FuncFormatter

    drawn = getattr(axes, f"{axis}axis")
    formatter = drawn.get_major_formatter()
    if isinstance(formatter, FuncFormatter):
        return formatter(place)
    for tick, label in zip(drawn.get_ticklocs(), drawn.get_ticklabels(), strict=False):
        if abs(tick - place) < 1e-6 and (isinstance(formatter, FixedFormatter) or label.get_text()):
            return label.get_text()
    return _shown(place)


def _share(value: float) -> float:
    return round(float(value), 4)


def _shown(value: float | None) -> str:
    return "" if value is None or value != value else count(value, 4)
