"""The answers to what visitors ask of a model, as HTML."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress, cycle, zip_longest
from pathlib import Path
from typing import Any, TypeVar

from markupsafe import Markup

from tide_lm.analysis import tables
from tide_lm.analysis.analyze import Analysis
from tide_lm.explore import gains, markup, pairs
from tide_lm.explore.markup import Colour, part
from tide_lm.explore.reader import LIMIT, Reader, ReadText
from tide_lm.explore.vocabulary import FOUND, Vocabulary
from tide_lm.explore.work import Work, analysis
from tide_lm.explore.writer import Column, columns, write
from tide_lm.model.opened import OpenedModel
from tide_lm.report.catalogue import FIGURES
from tide_lm.report.drawing import PALETTE, inline_svg, legend, plot
from tide_lm.report.figure import Axes, Figure, Panel
from tide_lm.report.page import drawings
from tide_lm.report.results import open_run
from tide_lm.serve.sampling import Sampling

_NAMES = "routing layer-drop distances neighbours collapse norms gradients updates footprint bits ranks"
SHOWN = [FIGURES[name] for name in _NAMES.split()]
PROMPTS = [
    "Once upon a time there was",
    "The old man looked at the sea and",
    "The function returns a list of",
    "In the morning the children went to",
]
EXAMPLES = [
    "The tide comes in twice a day, and the mutex is released before the kernel returns 42.",
    "The doctor told the patient that the fever would pass in a few days.",
    "def add(first, second):\n    return first + second",
    "Call me Ishmael. Some years ago, never mind how long precisely, I thought I would sail about a little.",
]
ANALYSES = [what.value for what in Analysis]
LONGEST, LONGEST_PROMPT, LONGEST_WORD = 100_000, 5_000, 2_000  # characters
LONGEST_WRITING, HOTTEST = 256, 2.0  # tokens; temperature
_BETWEEN = 0.5  # seconds from one state of the page to the next, which has all tokens again
_STREAMED = 0.15  # seconds between states of a text that is being written

T = TypeVar("T")


@dataclass
class Turn:
    """A visitor's question, until it is stopped or another replaces it, and how its text is shown."""

    text: str | None = None  # once some of it is read
    colour: str | None = None  # that of the loss until another is chosen
    chosen: int | None = None
    reading: bool = False
    stopped: bool = False
    replaced: bool = False


@dataclass(frozen=True)
class Explorer:
    """A model, another to compare it with, and the results of its run; each method answers one question.

    Visitors ask at the same time, but models and matplotlib's style serve one at a time.
    """

    opened: OpenedModel
    base: OpenedModel | None
    results: Path
    counts: Path | None = None  # which `opened` was given
    work: Work = field(default_factory=Work)
    _drawn: dict[Any, str] = field(default_factory=dict)
    _gains: list[gains.Gains] = field(default_factory=list)  # once they are found

    @cached_property
    def reader(self) -> Reader:
        return Reader(self.opened, self.base)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.opened)

    @cached_property
    def columns(self) -> list[Column]:
        """Return the texts that are written from one prompt, side by side."""
        name, other = self.names
        return columns(self.opened, name, self.base, other)

    @cached_property
    def names(self) -> tuple[str, str | None]:
        """Return the names of both models, or their paths where names are the same."""
        if self.base is None:
            return self.opened.name, None
        same = self.base.name == self.opened.name
        return (self.opened.path, self.base.path) if same else (self.opened.name, self.base.name)

    @property
    def layers(self) -> range:
        return range(self.opened.config.get_text_config().num_hidden_layers)

    @property
    def colours(self) -> list[Colour]:
        """Return the colours that have a meaning for this model, the one to begin with first."""
        known = [self.base is not None, True, self.opened.frequencies is not None, self.opened.has_memory]
        return list(compress(Colour, known))

    def warm_up(self) -> None:
        """Ask every question once, so that the first click is as fast as others."""
        for _ in self.read(EXAMPLES[0], Turn()):
            self.detail(EXAMPLES[0], 0, 0)
        for _ in self.write(PROMPTS[0], 2, 0.8, 40, 1, Turn()) if self.columns else ():
            pass
        for _ in self.search("a", Turn()):
            self.model()

    def write(
        self, prompt: str, most: Any, temperature: Any, top_k: Any, seed: Any, turn: Turn
    ) -> Iterator[tuple[list[str], str]]:
        """Yield the texts that go on from a prompt, and the columns that show them, as they are written."""
        prompt = _cleaned(prompt, LONGEST_PROMPT)
        most = _number("the length", most, 1, LONGEST_WRITING)
        sampling = Sampling(
            temperature=_number("the temperature", temperature, 0, HOTTEST),
            top_k=None if top_k is None else int(_number("top-k", top_k, 1, 2**31)),
            seed=int(_number("the seed", seed, 0, 2**53)),
        )
        steps = write(self.columns, prompt, int(most), sampling, self.reader.lock)
        given = len(self.reader.encoded(prompt).ids)
        for (texts, ended), stopped in _paced(steps, turn, lambda step: step[1], _STREAMED):
            whole = [prompt + str(text) for text in texts]
            shown = [
                (column.name, self.reader.encoded(text))
                for column, text in zip(self.columns, whole, strict=False)
            ]
            state = {"done": max(len(text.ids) for text in texts), "most": int(most), "given": given}
            yield whole, part("writing", columns=shown, **state, ended=ended, stopped=stopped)

    def read(self, typed: str, turn: Turn) -> Iterator[tuple[str, str, str]]:
        """Yield the text that is shown, its summary and its tokens, as it is read."""
        typed = _cleaned(typed, LONGEST)
        steps = self.reader.read(typed)
        turn.reading = True
        try:
            for text, stopped in _paced(steps, turn, lambda text: text.done == len(text.ids)):
                turn.text, colour = typed, turn.colour
                state = self._state(text, colour, turn.chosen, stopped)
                if not turn.replaced:
                    yield typed, *state
        finally:
            turn.reading = False
        if not turn.replaced and turn.colour != colour:  # it was changed after the last state
            yield typed, *self._state(text, turn.colour, turn.chosen, stopped)

    def shade(self, typed: str | None, colour: str, chosen: int | None) -> tuple[str, str]:
        """Return the summary and the tokens of a text as far as it was read, in another colour."""
        if typed is None:
            return "", ""
        text = self.reader.known(typed)
        return self._state(text, colour, chosen, stopped=text.done < len(text.ids))

    def _state(
        self, text: ReadText, colour: str | None, chosen: int | None, stopped: bool
    ) -> tuple[str, str]:
        shade = Colour(colour or Colour.loss)
        summary = part(
            "summary", text=text, names=self.names, stopped=stopped, limit=LIMIT, legend=markup.LEGENDS[shade]
        )
        return summary, markup.tokens(text, shade, chosen)

    def detail(self, typed: str | None, place: Any, layer: int) -> str:
        """Return all about one token of a text: its layers, and what is predicted to follow it."""
        if typed is None or type(place) is not int:
            return ""
        text = self.reader.known(typed)
        if not 0 <= place < len(text.ids) or layer not in self.layers:
            return ""
        found = self.reader.detail(typed, place, layer)
        names = [*tables.numbered(len(found.weights[0]) - 1), "null"] if found.weights else []
        return part(
            "detail",
            layer=layer,
            word=text.texts[place],
            facts=markup.facts(text, place),
            found=found,
            slots=list(zip(names, cycle(PALETTE), strict=False)),
            has_values=bool(getattr(self.opened.config, "memory_values", False)),
        )

    def search(self, words: str, turn: Turn) -> Iterator[str]:
        """Yield the tokens that hold some words, as buttons; for none, those that memory helps most."""
        if words := _cleaned(words, LONGEST_WORD):
            ids, total = self.vocabulary.search(words)
            texts = {id: self.vocabulary.texts[id] for id in ids}
            yield part("found_tokens", texts=texts, total=total, most=FOUND)
            return
        steps = iter(self._gains or gains.gains(self.reader, self.vocabulary.texts, EXAMPLES))
        for found, stopped in _paced(steps, turn, lambda found: found.whole):
            if found.whole:
                self._gains[:] = [found]
            yield part(
                "gains",
                found=found,
                texts=self.vocabulary.texts,
                source=gains.source(self.reader),
                against=gains.against(self.reader),
                has_memory=self.opened.has_memory,
                stopped=stopped,
            )

    def token(self, id: Any, turn: Turn) -> Iterator[str]:
        """Yield a token's numbers at once, and its neighbours as they are found."""
        if type(id) is not int or not 0 <= id < self.opened.vocabulary:
            return
        with self.reader.lock:
            about = part("entry", one=self.vocabulary.entry(id))
        if not turn.replaced:
            yield about
        if not self.opened.has_memory:
            return
        steps = self._one_at_a_time(self.vocabulary.neighbours(id))
        for found, stopped in _paced(steps, turn, lambda found: found.searched == found.candidates):
            names = tables.names(self.opened.config)
            yield about + part("neighbours", found=found, tables=names, stopped=stopped)

    def _one_at_a_time(self, steps: Iterator[T]) -> Iterator[T]:
        """Take steps while no other visitor uses the model."""
        while True:
            with self.reader.lock:
                if (step := next(steps, None)) is None:
                    return
            yield step

    def pair(self, first: str, second: str, template: str) -> str:
        """Return how far apart two tokens stay after the same words, or why they cannot be compared."""
        words = _cleaned(first, LONGEST_WORD).strip(), _cleaned(second, LONGEST_WORD).strip()
        with self.reader.lock:
            try:
                opened_models = [opened for opened in (self.opened, self.base) if opened]
                vocabulary = min(opened.vocabulary for opened in opened_models)
                endings = pairs.endings_of(self.opened.tokenizer, words, vocabulary)
                lines = self._distances(endings, _cleaned(template, LONGEST))
            except ValueError as error:
                return part("status", said=str(error))
            drawing = Markup(inline_svg(_lines(lines), "pair"))
        tokens = [(ending[-1], self.vocabulary.texts[ending[-1]]) for ending in endings]
        rows = [
            [layer, *("" if value is None else f"{value:.4f}" for value in values)]
            for layer, values in enumerate(zip_longest(*lines.values()))
        ]
        return part("pair", tokens=tokens, drawing=drawing, names=list(lines), rows=rows)

    def _distances(self, endings: list[list[int]], template: str) -> dict[str, list[float]]:
        name, other = self.names
        own = pairs.distances(self.opened, endings, template)
        lines = {kind or name: line for kind, line in own.items()}
        if self.base is not None:
            found = pairs.distances(self.base, endings, template)
            lines |= {f"{other}, {kind}" if kind else f"{other}": line for kind, line in found.items()}
        return lines

    @property
    def about(self) -> str:
        """Return a heading with what the model is."""
        name, other = self.names
        blocks = getattr(self.opened.config, "num_memory_blocks", 0)
        return part("about", name=name, other=other, layers=len(self.layers), blocks=blocks)

    def model(self) -> str:
        """Return the run's figures, and how to make those that are missing; they follow the results."""
        paths = sorted((self.results / "results").glob("*.json"))
        state: tuple = tuple((path.name, path.stat().st_mtime_ns) for path in paths if path.exists())
        state += tuple(self.work.faults.items())
        with self.reader.lock:
            if state not in self._drawn:
                self._drawn.clear()
                self._drawn[state] = self._figures()
            return self._drawn[state]

    def _figures(self) -> str:
        run = open_run(self.results, self.opened.name)
        source = f"From the results in {self.results}."
        if self.opened.step is not None:
            source += f" They are of the run's last model, not of step {self.opened.step}."
        reasons = [(figure, figure.missing(run)) for figure in SHOWN]
        missing = [
            (figure, self.work.faults.get(figure.reads), reason, self._number(figure))
            for figure, reason in reasons
            if reason
        ]
        drawn = [
            (figure, drawings(figure, [run]), figure.tables([run]))
            for figure, reason in reasons
            if not reason
        ]
        return part("figures", source=source, drawn=drawn, missing=missing)

    def _number(self, figure: Figure) -> int | None:
        """Return the number of the analysis that makes a figure, if it can be started here."""
        is_own = self.results == self.opened.run and self.opened.step is None
        can = figure.reads in ANALYSES and is_own and (self.opened.has_memory or not figure.of_memory)
        return ANALYSES.index(figure.reads) if can else None

    def analyse(self, number: int) -> str:
        """Start an analysis, by its number, and return its name."""
        if not 0 <= number < len(ANALYSES):
            raise ValueError(f"there is no analysis {number}: choose one on the page")
        what = ANALYSES[number]
        self.work.start(what, analysis(self.opened, what, self.counts))
        return what

    def stop(self, number: int) -> None:
        """Stop the analysis of this number, if it runs."""
        if 0 <= number < len(ANALYSES):
            self.work.stop(ANALYSES[number])

    def watch(self, turn: Turn, ran: str | None = None) -> Iterator[tuple[str, str]]:
        """Yield how far an analysis is, and the run's figures, until none runs; `ran` was just started."""
        figures = self.model()
        while (running := self.work.running) and not turn.replaced:
            ran = running
            number = ANALYSES.index(running)
            yield part("working", what=running, number=number, said=self.work.said), figures
            time.sleep(_BETWEEN)
        if not turn.replaced:
            ended = f"{ran} has ended: it is shown below."
            yield part("status", said=ended) if ran and ran not in self.work.faults else "", self.model()


def _paced(
    steps: Iterator[T], turn: Turn, is_whole: Callable[[T], bool], between: float | None = None
) -> Iterator[tuple[T, bool]]:
    """Yield a step now and then, and the last one, with whether the visitor has stopped it."""
    between = _BETWEEN if between is None else between
    shown = time.monotonic()
    for step in steps:
        stopped = turn.stopped and not is_whole(step)
        if turn.replaced:
            return
        if stopped or is_whole(step) or time.monotonic() - shown >= between:
            shown = time.monotonic()
            yield step, stopped
        if stopped:
            return


def _cleaned(text: Any, longest: int) -> str:
    """Return what a browser sent as text that a tokenizer can encode."""
    return str(text or "")[:longest].encode("utf-8", "replace").decode("utf-8")


def _number(name: str, value: Any, least: float, most: float) -> float:
    """Return a number that a browser sent, if it is one within bounds."""
    if type(value) not in (int, float) or not least <= value <= most:
        shown = "empty" if value is None else repr(value)[:20]
        raise ValueError(f"{name} is {shown}: give a number from {least:,.0f} to {most:,.0f}")
    return value


def _lines(lines: dict[str, list[float]]) -> Panel:
    def draw(axes: Axes) -> None:
        plot(axes, lines)
        axes.locator_params(axis="x", integer=True)
        axes.set(xlabel="layer", ylabel="distance / norm")
        axes.set_ylim(bottom=0)
        legend(axes)

    return Panel("Distance by layer", draw)
