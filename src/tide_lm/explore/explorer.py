"""What is asked of a model, answered with HTML."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tide_lm.explore import marks, pairs
from tide_lm.explore.marks import Colour
from tide_lm.explore.reading import Reader, Reading
from tide_lm.explore.vocabulary import Vocabulary
from tide_lm.model.opened import OpenedModel
from tide_lm.report.catalogue import FIGURES
from tide_lm.report.drawing import MARKERS, PALETTE, inline_svg, legend
from tide_lm.report.figure import Figure, Panel
from tide_lm.report.results import MissingError, Run, open_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = ("routing", "layer-drop", "distances", "footprint", "bits", "ranks")
SAMPLE = "The tide comes in twice a day, and the mutex is released before the kernel returns 42."
LONGEST, LONGEST_WORD = 100_000, 2_000  # characters
_BETWEEN = 0.5  # seconds from one state of the page to the next, which has all tokens again


@dataclass
class Turn:
    """A visitor's question, no longer of use once he stops it or asks another, and how he sees its text."""

    text: str | None = None  # once some of it is read
    colour: str = Colour.loss
    chosen: int | None = None
    stopped: bool = False
    replaced: bool = False


@dataclass(frozen=True)
class Explorer:
    """What is looked into, and where its results are; each method answers one question with HTML.

    Visitors ask at the same time: models, and matplotlib's style, are used by one at a time.
    """

    opened: OpenedModel
    base: OpenedModel | None
    results: Path
    _drawn: dict[Any, str] = field(default_factory=dict)

    @cached_property
    def reader(self) -> Reader:
        return Reader(self.opened, self.base)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.opened)

    @cached_property
    def names(self) -> tuple[str, str | None]:
        """The names of both models, or their paths where names are the same."""
        if self.base is None:
            return self.opened.name, None
        same = self.base.name == self.opened.name
        return (self.opened.path, self.base.path) if same else (self.opened.name, self.base.name)

    @property
    def layers(self) -> range:
        return range(self.opened.config.get_text_config().num_hidden_layers)

    @property
    def colours(self) -> list[Colour]:
        """The colours that tell something of this model."""
        absent = set() if self.base else {Colour.gain}
        absent |= set() if self.opened.frequencies else {Colour.decile}
        absent |= set() if self.opened.has_memory else {Colour.drawn}
        return [colour for colour in Colour if colour not in absent]

    def warm_up(self) -> None:
        """So that the first click is as fast as others."""
        for _ in self.read(SAMPLE, Turn()):
            self.detail(SAMPLE, 0, 0)
        self.search("a")
        self.model()

    def read(self, text: str, turn: Turn) -> Iterator[tuple[str, str, str]]:
        """The text that is shown, its summary and its tokens, as it is read."""
        text, shown = _cleaned(text, LONGEST), time.monotonic()
        for reading in self.reader.read(text):
            turn.text = text
            is_read = reading.done == len(reading.ids)
            stopped = turn.stopped and not is_read
            if is_read or stopped or time.monotonic() - shown >= _BETWEEN:
                shown = time.monotonic()
                state = text, *self._state(reading, turn.colour, turn.chosen, stopped)
                if not turn.replaced:
                    yield state
            if stopped or turn.replaced:
                return

    def shade(self, text: str | None, colour: str, chosen: int | None) -> tuple[str, str]:
        """The summary and the tokens of a text as far as it was read, in another colour."""
        if text is None:
            return "", ""
        return self._state(self.reader.known(text), colour, chosen)

    def _state(
        self, reading: Reading, colour: str, chosen: int | None, stopped: bool = False
    ) -> tuple[str, str]:
        summary = marks.summary(reading, Colour(colour), *self.names, stopped)
        return summary, marks.tokens(reading, Colour(colour), chosen)

    def detail(self, text: str | None, place: Any, layer: int) -> str:
        if text is None or type(place) is not int:
            return ""
        reading = self.reader.known(text)
        if not 0 <= place < len(reading.ids) or layer not in self.layers:
            return ""
        has_values = bool(getattr(self.opened.config, "memory_values", False))
        return marks.detail(reading, place, self.reader.detail(text, place, layer), has_values)

    def search(self, words: str) -> str:
        words = _cleaned(words, LONGEST_WORD)
        if not words:
            return ""
        ids, total = self.vocabulary.search(words)
        return marks.found_tokens({id: self.vocabulary.texts[id] for id in ids}, total)

    def token(self, id: Any, turn: Turn) -> Iterator[str]:
        """Yield a token's numbers at once, and its neighbours as they are found."""
        if type(id) is not int or not 0 <= id < self.opened.vocabulary:
            return
        with self.reader.lock:
            about = marks.entry(self.vocabulary.entry(id))
        if not turn.replaced:
            yield about
        search = self.vocabulary.neighbours(id) if self.opened.has_memory else iter(())
        shown = time.monotonic()
        while not turn.replaced:
            with self.reader.lock:
                found = next(search, None)
            if found is None:
                return
            is_whole = found.searched == found.candidates
            stopped = turn.stopped and not is_whole
            if is_whole or stopped or time.monotonic() - shown >= _BETWEEN:
                shown = time.monotonic()
                yield about + marks.neighbours(found, stopped)
            if stopped:
                return

    def pair(self, first: str, second: str, template: str) -> str:
        words = _cleaned(first, LONGEST_WORD).strip(), _cleaned(second, LONGEST_WORD).strip()
        with self.reader.lock:
            try:
                opened_models = [opened for opened in (self.opened, self.base) if opened]
                vocabulary = min(opened.vocabulary for opened in opened_models)
                endings = pairs.endings_of(self.opened.tokenizer, words, vocabulary)
                lines = self._distances(endings, _cleaned(template, LONGEST))
            except ValueError as error:
                return marks.status(marks.escaped(str(error)))
            drawn = inline_svg(_lines(lines), "pair")
        ids = [ending[-1] for ending in endings]
        said = marks.pair(ids, [self.vocabulary.texts[id] for id in ids])
        rows = [
            [str(layer), *("" if value is None else f"{value:.4f}" for value in values)]
            for layer, values in enumerate(zip_longest(*lines.values()))
        ]
        caption = "By layer: the distance of the two states over their mean norm"
        return said + drawn + marks.table(caption, ["layer", *map(marks.escaped, lines)], rows)

    def _distances(self, endings: list[list[int]], template: str) -> dict[str, list[float]]:
        lines: dict[str, list[float]] = {}
        for opened, name in zip((self.opened, self.base), self.names, strict=True):
            if opened is not None:
                found = pairs.distances(opened, endings, template)
                lines |= {_of(kind, name or "", opened is self.base): line for kind, line in found.items()}
        return lines

    @property
    def about(self) -> str:
        """What the page speaks of."""
        name, other = self.names
        blocks = getattr(self.opened.config, "num_memory_blocks", 0)
        said = f"{len(self.layers)} layers"
        if blocks:
            said += (
                f"; memory: {blocks} tables, M1 to M{blocks}, with a row for each token, beside the "
                "embedding E. In each layer a router weighs a token's rows, and a null bank that adds nothing"
            )
        said += f". Compared with {other}." if other else "."
        return f"<h1>{marks.escaped(name)}</h1><p>{marks.escaped(said)}</p>"

    def model(self) -> str:
        """The run's figures, and how to make those that are missing; drawn again when results change."""
        paths = sorted((self.results / "results").glob("*.json"))
        state = tuple((path.name, path.stat().st_mtime_ns) for path in paths if path.exists())
        with self.reader.lock:
            if state not in self._drawn:
                self._drawn.clear()
                self._drawn[state] = self._figures()
            return self._drawn[state]

    def _figures(self) -> str:
        run = open_run(self.results, self.opened.name)
        whose = f"From the results in {self.results}."
        if self.opened.step is not None:
            whose += f" They are of the run's last model, not of step {self.opened.step}."
        parts, absent = [marks.status(marks.escaped(whose))], []
        for name in SHOWN:
            figure = FIGURES[name]
            try:
                parts.append(_figure(figure, run))
            except MissingError as error:
                absent.append(f"<li>{marks.escaped(figure.title)}: {marks.told(str(error))}</li>")
        if absent:
            parts.append(f"<h2>Not there yet</h2><ul>{''.join(absent)}</ul>")
        return "".join(parts)


def _cleaned(text: Any, longest: int) -> str:
    """What a browser sent, as text that a tokenizer bears."""
    return str(text or "")[:longest].encode("utf-8", "replace").decode("utf-8")


def _of(kind: str, name: str, of_base: bool) -> str:
    """A line's name: with or without memory, or the model's."""
    return f"{name}, {kind}" if kind and of_base else kind or name


def _figure(figure: Figure, run: Run) -> str:
    if missing := figure.missing(run):
        raise MissingError(missing)
    panels = [inline_svg(panel, f"{figure.name}-{at}") for at, panel in enumerate(figure.panels([run]))]
    says = f"<h2>{marks.escaped(figure.title)}</h2><p>{marks.escaped(figure.says)}</p>"
    return f'{says}<div class="panels">{"".join(panels)}</div>'


def _lines(lines: dict[str, list[float]]) -> Panel:
    def draw(axes: "Axes") -> None:
        for number, (name, values) in enumerate(lines.items()):
            axes.plot(values, color=PALETTE[number], marker=MARKERS[number], label=name)
        axes.locator_params(axis="x", integer=True)
        axes.set_xlabel("layer")
        axes.set_ylabel("distance / norm")
        axes.set_ylim(bottom=0)
        legend(axes)

    ends = ", ".join(f"{name} {values[-1]:.3f}" for name, values in lines.items())
    return Panel("Distance by layer", f"After the last layer: {ends}.", draw)
