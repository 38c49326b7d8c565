"""The page: four tabs over one model, served to this machine alone unless asked otherwise."""

import functools
import inspect
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tide_lm.data.optional import require
from tide_lm.evaluate.subject import Subject
from tide_lm.explore import marks, pairs
from tide_lm.explore.marks import Colour
from tide_lm.explore.reading import Reader
from tide_lm.explore.vocabulary import Vocabulary
from tide_lm.report.catalogue import FIGURES
from tide_lm.report.drawing import MARKERS, PALETTE, inline_svg, legend
from tide_lm.report.figure import Figure, Panel
from tide_lm.report.results import DamagedError, MissingError, Run

if TYPE_CHECKING:
    from gradio import Blocks
    from matplotlib.axes import Axes

SHOWN = ("routing", "layer-drop", "distances", "footprint", "bits", "ranks")
SAMPLE = "The tide comes in twice a day, and the mutex is released before the kernel returns 42."
PAIR = "their", "there", "On the blackboard the teacher wrote"
_LONGEST, _LONGEST_WORD = 100_000, 2_000  # characters
_BETWEEN = 0.5  # seconds from one state of the page to the next, which has all tokens again


@dataclass(frozen=True)
class Explorer:
    """What is looked into, and where its results are; each method answers one question with HTML.

    Visitors ask at the same time: models, and matplotlib's style, are used by one at a time.
    """

    subject: Subject
    base: Subject | None
    results: Path
    _drawn: dict[Any, str] = field(default_factory=dict)

    @cached_property
    def reader(self) -> Reader:
        return Reader(self.subject, self.base)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.subject)

    @cached_property
    def names(self) -> tuple[str, str | None]:
        """Of both models; by their paths where that tells them apart."""
        if self.base is None:
            return self.subject.name, None
        same = self.base.name == self.subject.name
        return (self.subject.path, self.base.path) if same else (self.subject.name, self.base.name)

    @property
    def layers(self) -> range:
        return range(self.subject.config.get_text_config().num_hidden_layers)

    @property
    def colours(self) -> list[Colour]:
        """Those that tell something of this model."""
        absent = set() if self.base else {Colour.gain}
        absent |= set() if self.subject.frequencies else {Colour.decile}
        absent |= set() if self.subject.has_memory else {Colour.drawn}
        return [colour for colour in Colour if colour not in absent]

    def warm_up(self) -> None:
        """So that the first click is as fast as others."""
        for _ in self.read(SAMPLE, Colour.loss):
            self.detail(SAMPLE, 0, 0)
        self.search("a")
        self.model()

    def read(
        self, text: str, colour: str, is_stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[str, str, str]]:
        """The text that is shown, its summary and its tokens, as it is read."""
        text, shown = _cleaned(text, _LONGEST), time.monotonic()
        for reading in self.reader.read(text):
            going_on = reading.done < len(reading.ids)
            stopped = going_on and is_stopped()
            if not going_on or stopped or time.monotonic() - shown >= _BETWEEN:
                shown = time.monotonic()
                summary = marks.summary(reading, Colour(colour), *self.names, stopped)
                yield text, summary, marks.tokens(reading, Colour(colour))
            if stopped:
                return

    def shade(self, text: str | None, colour: str, chosen: int | None) -> tuple[str, str]:
        """The summary and the tokens of a text as far as it was read, in another colour."""
        if text is None:
            return "", ""
        reading = self.reader.begin(text)
        summary = marks.summary(reading, Colour(colour), *self.names)
        return summary, marks.tokens(reading, Colour(colour), chosen)

    def detail(self, text: str | None, place: Any, layer: int) -> str:
        if text is None or type(place) is not int:
            return ""
        reading = self.reader.begin(text)
        if not 0 <= place < len(reading.ids) or layer not in self.layers:
            return ""
        has_values = bool(getattr(self.subject.config, "memory_values", False))
        return marks.detail(reading, place, self.reader.detail(text, place, layer), has_values)

    def search(self, words: str) -> str:
        words = _cleaned(words, _LONGEST_WORD)
        if not words:
            return ""
        ids, total = self.vocabulary.search(words)
        return marks.found_tokens({id: self.vocabulary.texts[id] for id in ids}, total)

    def token(self, id: Any) -> Iterator[str]:
        """Its numbers at once, and its neighbours when they are found."""
        if type(id) is not int or not 0 <= id < self.subject.vocabulary:
            return
        with self.reader.lock:
            about = marks.entry(self.vocabulary.entry(id))
        yield about
        if self.subject.has_memory:
            with self.reader.lock:
                found = self.vocabulary.neighbours(id)
            yield about + marks.neighbours(found)

    def pair(self, first: str, second: str, template: str) -> str:
        words = _cleaned(first, _LONGEST_WORD).strip(), _cleaned(second, _LONGEST_WORD).strip()
        with self.reader.lock:
            try:
                lines = self._distances(words, _cleaned(template, _LONGEST))
            except ValueError as error:
                return marks.status(marks.escaped(str(error)))
            drawn = inline_svg(_lines(lines), "pair")
        rows = [
            [str(layer), *("" if value is None else f"{value:.4f}" for value in values)]
            for layer, values in enumerate(zip_longest(*lines.values()))
        ]
        caption = "By layer: the distance of the two states over their mean norm"
        return drawn + marks.table(caption, ["layer", *lines], rows)

    def _distances(self, words: tuple[str, str], template: str) -> dict[str, list[float]]:
        lines: dict[str, list[float]] = {}
        for subject, name in zip((self.subject, self.base), self.names, strict=True):
            if subject is not None:
                found = pairs.distances(subject, words, template)
                lines |= {_of(kind, name or "", subject is self.base): line for kind, line in found.items()}
        return lines

    @property
    def about(self) -> str:
        """What the page speaks of."""
        name, other = self.names
        blocks = getattr(self.subject.config, "num_memory_blocks", 0)
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
        state = tuple((path.name, path.stat().st_mtime_ns) for path in paths)
        with self.reader.lock:
            if state not in self._drawn:
                self._drawn.clear()
                self._drawn[state] = self._figures()
            return self._drawn[state]

    def _figures(self) -> str:
        run = Run(self.results, self.subject.name, 0)
        whose = f"From the results in {self.results}."
        if self.subject.step is not None:
            whose += f" They are of the run's last model, not of step {self.subject.step}."
        parts, absent = [marks.status(marks.escaped(whose))], []
        for name in SHOWN:
            figure = FIGURES[name]
            try:
                parts.append(_figure(figure, run))
            except (MissingError, DamagedError) as error:
                absent.append(f"<li>{marks.escaped(figure.title)}: {marks.escaped(str(error))}</li>")
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
    with figure.naming([run]):
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


def build(explorer: Explorer) -> "Blocks":
    for name in [name for name in os.environ if name.startswith("GRADIO_")]:
        del os.environ[name]  # whatever it opens or keeps elsewhere
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    require("gradio", "the explorer", "explore")
    import gradio as gr

    def told(function: Callable) -> Callable:
        """Has the page show what is wrong."""

        @functools.wraps(function)
        def answer(*given: Any) -> Any:
            try:
                return function(*given)
            except ValueError as error:
                raise gr.Error(marks.escaped(str(error)), print_exception=False) from None

        @functools.wraps(function)
        def answers(*given: Any) -> Iterator[Any]:
            try:
                yield from function(*given)
            except ValueError as error:
                raise gr.Error(marks.escaped(str(error)), print_exception=False) from None

        return answers if inspect.isgeneratorfunction(function) else answer

    def show(**options: Any) -> Any:
        return gr.HTML(elem_classes=["tide"], **options)

    script = (files(__package__) / "page.js").read_text(encoding="utf-8")
    private: dict[str, Any] = {"api_visibility": "private"}
    with gr.Blocks(title=f"TIDE: {explorer.subject.name}", analytics_enabled=False) as page:
        show(value=explorer.about)
        with gr.Tab("Text"):
            text = gr.Textbox(SAMPLE, label="Text", lines=4, max_length=_LONGEST)
            colour = gr.Radio([str(one) for one in explorer.colours], value="loss", label="Shade by")
            with gr.Row():
                go, stop = gr.Button("Read", variant="primary"), gr.Button("Stop")
            summary, shown = show(), show(js_on_load=script)
            layer = gr.Dropdown(
                list(explorer.layers),
                value=0,
                label="Without memory in layer",
                info="For the last of the tables below, once a token is chosen.",
                visible=explorer.subject.has_memory,
            )
            about = show()
            read_text, chosen = gr.State(None), gr.State(None)
            go.click(lambda: (None, ""), None, [chosen, about], **private)
            stopped: set[str | None] = set()  # visitors who want no more

            def read(text: str, colour: str, visitor: gr.Request) -> Iterator[tuple[str, str, str]]:
                stopped.discard(visitor.session_hash)
                yield from explorer.read(text, colour, lambda: visitor.session_hash in stopped)

            def end(visitor: gr.Request) -> None:
                stopped.add(visitor.session_hash)

            for begin in go.click, page.load:
                begin(told(read), [text, colour], [read_text, summary, shown], **private)
            stop.click(end, None, None, queue=False, **private)
            colour.change(told(explorer.shade), [read_text, colour, chosen], [summary, shown], **private)

            def choose(text: str | None, layer: int, event: gr.EventData) -> tuple[int, str]:
                return event.place, explorer.detail(text, event.place, layer)

            shown.select(told(choose), [read_text, layer], [chosen, about], **private)
            layer.change(told(explorer.detail), [read_text, chosen, layer], about, **private)
        with gr.Tab("Tokens"):
            words = gr.Textbox(
                label="Search tokens",
                info="what they hold, or #7, the one with this id",
                max_length=_LONGEST_WORD,
            )
            found, card = show(js_on_load=script), show()
            words.change(told(explorer.search), words, found, trigger_mode="always_last", **private)

            def look_up(event: gr.EventData) -> Iterator[str]:
                yield from explorer.token(event.place)

            found.select(told(look_up), None, card, **private)
        with gr.Tab("Pairs"):
            with gr.Row():
                first = gr.Textbox(PAIR[0], label="One token", max_length=_LONGEST_WORD)
                second = gr.Textbox(PAIR[1], label="Another", max_length=_LONGEST_WORD)
            template = gr.Textbox(PAIR[2], label="What stands before it", max_length=_LONGEST)
            compare, apart = gr.Button("Compare", variant="primary"), show()
            compare.click(told(explorer.pair), [first, second, template], apart, **private)
        with gr.Tab("Model") as tab:
            figures = show()
            tab.select(told(explorer.model), None, figures, **private)
    return page


def serve(page: "Blocks", host: str, port: int, tell: Callable[[str], None]) -> None:
    """Until it is stopped; `tell` is told when it has begun."""
    import gradio as gr

    page.queue(default_concurrency_limit=4)
    page.launch(
        prevent_thread_lock=True,
        server_name=host,
        server_port=port,
        share=False,
        quiet=True,
        css=(files(__package__) / "page.css").read_text(encoding="utf-8"),
        theme=gr.themes.Base(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
        footer_links=[],
        allowed_paths=[],
        max_file_size=1,  # byte: nothing is to be uploaded
        enable_monitoring=False,
        run_history=False,
        mcp_server=False,
        ssr_mode=False,
    )
    tell(f"http://{f'[{host}]' if ':' in host else host}:{port}")
    try:
        threading.Event().wait()
    finally:
        page.close(verbose=False)
