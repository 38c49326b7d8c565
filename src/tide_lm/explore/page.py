"""The page: four tabs over one model, served to this machine alone unless asked otherwise."""

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
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
from tide_lm.report.figure import Panel
from tide_lm.report.results import Run

if TYPE_CHECKING:
    from gradio import Blocks
    from matplotlib.axes import Axes

SHOWN = ("routing", "layer-drop", "distances", "footprint", "bits", "ranks")
SAMPLE = "The tide comes in twice a day, and the mutex is released before the kernel returns 42."
_LONGEST = 100_000  # characters of a text
_BETWEEN = 0.5  # seconds from one state of the page to the next, which has all tokens again


@dataclass(frozen=True)
class Explorer:
    """What is looked into, and where its results are."""

    subject: Subject
    base: Subject | None
    results: Path

    @cached_property
    def reader(self) -> Reader:
        return Reader(self.subject, self.base)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.subject)

    def warm_up(self) -> None:
        """So that the first click is as fast as others."""
        for _ in self.read(SAMPLE, Colour.loss):
            self.detail(SAMPLE, 0, 0)
        self.search("a")
        self.token(0)
        self.model  # noqa: B018

    @property
    def layers(self) -> range:
        return range(self.subject.config.get_text_config().num_hidden_layers)

    @property
    def colours(self) -> list[Colour]:
        """Those that tell something of this model."""
        absent = set() if self.base else {Colour.gain}
        absent |= set() if self.subject.frequencies else {Colour.decile}
        absent |= set() if self.reader.has_memory else {Colour.drawn}
        return [colour for colour in Colour if colour not in absent]

    def read(self, text: str, colour: str) -> Iterator[tuple[str, str, str]]:
        """The text that is shown, its summary and its tokens, as it is read."""
        text, shown = text[:_LONGEST], time.monotonic()
        for reading in self.reader.read(text):
            if reading.done < len(reading.ids) and time.monotonic() - shown < _BETWEEN:
                continue
            shown = time.monotonic()
            yield text, self._summary(reading, colour), marks.tokens(reading, Colour(colour))

    def _summary(self, reading: Any, colour: str) -> str:
        other = self.base.name if self.base else None
        return marks.summary(reading, self.subject.name, other) + f"<p>{marks.LEGENDS[Colour(colour)]}</p>"

    def detail(self, text: str, place: int | None, layer: int) -> str:
        if place is None:
            return ""
        reading = self.reader.known(text)
        if not 0 <= place < len(reading.ids):
            return ""
        return marks.detail(reading, place, self.reader.detail(reading, place, layer))

    def search(self, words: str) -> str:
        ids, total = self.vocabulary.search(words)
        return marks.found_tokens([self.vocabulary.entry(id) for id in ids], total)

    def token(self, id: int) -> str:
        if not 0 <= id < self.subject.vocabulary:
            return ""
        neighbours = self.vocabulary.neighbours(id) if self.reader.has_memory else None
        return marks.entry(self.vocabulary.entry(id), neighbours)

    def pair(self, first: str, second: str, template: str) -> str:
        try:
            lines = pairs.distances(self.subject, self.base, (first.strip(), second.strip()), template)
        except ValueError as error:
            return f"<p>{marks.escaped(str(error))}</p>"
        rows = [[str(layer), *(f"{line[layer]:.4f}" for line in lines.values())] for layer in self.layers]
        caption = "By layer: the distance of the two states over their mean norm"
        drawn = inline_svg(_lines(lines), "pair")
        return drawn + marks.table(caption, ["layer", *lines], rows)

    @cached_property
    def model(self) -> str:
        """The run's figures, and how to make those that are missing."""
        run = Run(self.results, self.subject.name, 0)
        parts, absent = [], []
        for name in SHOWN:
            figure = FIGURES[name]
            if missing := figure.missing(run):
                absent.append(f"<li>{marks.escaped(figure.title)}: {marks.escaped(missing)}</li>")
                continue
            panels = [inline_svg(panel, f"{name}-{at}") for at, panel in enumerate(figure.panels([run]))]
            parts.append(f"<h3>{figure.title}</h3><p>{marks.escaped(figure.says)}</p>")
            parts.append(f'<div class="panels">{"".join(panels)}</div>')
        if absent:
            parts.append(f"<h3>Not there yet</h3><ul>{''.join(absent)}</ul>")
        return "".join(parts)


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
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    require("gradio", "the explorer", "explore")
    import gradio as gr

    script = (files(__package__) / "page.js").read_text(encoding="utf-8")
    subject = explorer.subject

    def show(**options: Any) -> Any:
        return gr.HTML(elem_classes=["tide"], **options)

    with gr.Blocks(title=f"TIDE: {subject.name}", analytics_enabled=False) as page:
        gr.Markdown(f"# {marks.escaped(subject.name)}")
        with gr.Tab("Text"):
            text = gr.Textbox(SAMPLE, label="Text", lines=4, max_length=_LONGEST)
            with gr.Row():
                colour = gr.Radio([str(one) for one in explorer.colours], value="loss", label="Shade by")
                layer = gr.Dropdown(list(explorer.layers), value=0, label="Without memory in layer")
            with gr.Row():
                go, stop = gr.Button("Read", variant="primary"), gr.Button("Stop")
            summary, shown, about = show(), show(js_on_load=script), show()
            read_text, chosen = gr.State(""), gr.State(None)
            outputs = [read_text, summary, shown]
            reading = gr.on([go.click, colour.change], explorer.read, [text, colour], outputs)
            stop.click(None, cancels=[reading])

            def choose(text: str, layer: int, event: gr.EventData) -> tuple[int, str]:
                return event.place, explorer.detail(text, event.place, layer)

            shown.select(choose, [read_text, layer], [chosen, about])
            layer.change(explorer.detail, [read_text, chosen, layer], about)
        with gr.Tab("Tokens"):
            words = gr.Textbox(label="Tokens that hold", info="or #7, the one with this id")
            found, card = show(js_on_load=script), show()
            words.submit(explorer.search, words, found)
            words.change(explorer.search, words, found, trigger_mode="always_last")

            def look_up(event: gr.EventData) -> str:
                return explorer.token(event.place)

            found.select(look_up, None, card)
        with gr.Tab("Pairs"):
            with gr.Row():
                first, second = gr.Textbox("their", label="One token"), gr.Textbox("there", label="Another")
            template = gr.Textbox("On the blackboard the teacher wrote", label="What stands before it")
            compare, apart = gr.Button("Compare", variant="primary"), show()
            compare.click(explorer.pair, [first, second, template], apart)
        with gr.Tab("Model") as tab:
            figures = show()
            tab.select(lambda: explorer.model, None, figures)
    return page


def serve(page: "Blocks", host: str, port: int) -> None:
    """Until it is stopped."""
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
        show_error=False,
        allowed_paths=[],
        max_file_size=1,  # byte: nothing is to be uploaded
        enable_monitoring=False,
    )
    try:
        threading.Event().wait()
    finally:
        page.close(verbose=False)
