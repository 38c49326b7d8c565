"""The page: four tabs over one model, served to this machine alone unless asked otherwise."""

import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from tide_lm.explore import marks
from tide_lm.explore.explorer import LONGEST, LONGEST_WORD, SAMPLE, Explorer, Turn
from tide_lm.run.optional import require

if TYPE_CHECKING:
    from gradio import Blocks, Request

PAIR = "their", "there", "On the blackboard the teacher wrote"


class Turns:
    """What each visitor asked last."""

    def __init__(self) -> None:
        self._last: dict[str | None, Turn] = {}
        self._lock = threading.Lock()

    def last(self, visitor: "Request") -> Turn:
        return self._last.get(visitor.session_hash) or Turn()

    def begin(self, visitor: "Request", turn: Turn) -> Turn:
        with self._lock:
            self.last(visitor).replaced = True
            self._last[visitor.session_hash] = turn
        return turn

    def stop(self, visitor: "Request") -> None:
        self.last(visitor).stopped = True

    def forget(self, visitor: "Request") -> None:
        self._last.pop(visitor.session_hash, Turn()).replaced = True


def build(explorer: Explorer) -> "Blocks":
    for name in [name for name in os.environ if name.startswith("GRADIO_")]:
        del os.environ[name]  # whatever it opens or keeps elsewhere
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    require("gradio", "the explorer", "explore")
    import gradio as gr

    def told(function: Callable) -> Callable:
        """Show on the page what is wrong."""

        @functools.wraps(function)
        def answer(*given: Any) -> Any:
            try:
                return function(*given)
            except (ValueError, OSError) as error:
                raise gr.Error(marks.escaped(str(error)), print_exception=False) from None

        @functools.wraps(function)
        def answers(*given: Any) -> Iterator[Any]:
            try:
                yield from function(*given)
            except (ValueError, OSError) as error:
                raise gr.Error(marks.escaped(str(error)), print_exception=False) from None

        return answers if inspect.isgeneratorfunction(function) else answer

    def show(**options: Any) -> Any:
        return gr.HTML(elem_classes=["tide"], **options)

    script = (files(__package__) / "page.js").read_text(encoding="utf-8")
    private: dict[str, Any] = {"api_visibility": "private"}
    at_once = private | {"trigger_mode": "multiple"}  # even if the visitor's last question is being answered
    with gr.Blocks(title=f"TIDE: {explorer.opened.name}", fill_width=True, analytics_enabled=False) as page:
        show(value=explorer.about)
        with gr.Tab("Text"):
            text = gr.Textbox(SAMPLE, label="Text", lines=4, max_length=LONGEST)
            colour = gr.Radio([str(one) for one in explorer.colours], value="loss", label="Shade by")
            with gr.Row():
                go, stop = gr.Button("Read", variant="primary"), gr.Button("Stop")
            summary, shown = show(), show(js_on_load=script)
            layer = gr.Dropdown(
                list(explorer.layers),
                value=0,
                label="Without memory in layer",
                info="For the last of the tables below, once a token is chosen.",
                visible=explorer.opened.has_memory,
            )
            about = show()
            read_text, chosen = gr.State(None), gr.State(None)
            texts, picks = Turns(), Turns()

            def read(text: str, colour: str, visitor: gr.Request) -> Iterator[tuple]:
                of_the_last_text: tuple = (None, "")  # goes when the first of this one is there
                for state in explorer.read(text, texts.begin(visitor, Turn(colour=colour))):
                    yield *state, *of_the_last_text
                    of_the_last_text = gr.skip(), gr.skip()

            def stop_reading(visitor: gr.Request) -> None:
                texts.stop(visitor)

            for begin in go.click, text.submit, page.load:
                begin(told(read), [text, colour], [read_text, summary, shown, chosen, about], **at_once)
            stop.click(stop_reading, None, None, queue=False, **private)

            def shade(
                text: str | None, colour: str, chosen: int | None, visitor: gr.Request
            ) -> tuple[str, str]:
                texts.last(visitor).colour = colour
                return explorer.shade(text, colour, chosen)

            colour.change(told(shade), [read_text, colour, chosen], [summary, shown], **private)

            def choose(text: str | None, layer: int, visitor: gr.Request, event: gr.EventData) -> Any:
                turn, reading = picks.begin(visitor, Turn()), texts.last(visitor)
                if reading.text == text:
                    reading.chosen = event.place
                told_of_it = explorer.detail(text, event.place, layer)
                is_late = turn.replaced or texts.last(visitor).text not in (None, text)
                return (gr.skip(), gr.skip()) if is_late else (event.place, told_of_it)

            shown.select(told(choose), [read_text, layer], [chosen, about], **at_once)
            layer.change(told(explorer.detail), [read_text, chosen, layer], about, **private)
        with gr.Tab("Tokens"):
            words = gr.Textbox(
                label="Search tokens",
                info="what they hold, or #7, the one with this id",
                max_length=LONGEST_WORD,
            )
            found = show(js_on_load=script)
            with gr.Row():
                halt = gr.Button("Stop", size="sm", scale=0, visible=explorer.opened.has_memory)
            card, looks = show(), Turns()
            words.change(told(explorer.search), words, found, trigger_mode="always_last", **private)

            def look_up(visitor: gr.Request, event: gr.EventData) -> Iterator[str]:
                yield from explorer.token(event.place, looks.begin(visitor, Turn()))

            def stop_looking(visitor: gr.Request) -> None:
                looks.stop(visitor)

            found.select(told(look_up), None, card, **at_once)
            halt.click(stop_looking, None, None, queue=False, **private)
        with gr.Tab("Pairs"):
            with gr.Row():
                hint = "a word, before which a space is set, or #7, the one with this id"
                first = gr.Textbox(PAIR[0], label="One token", info=hint, max_length=LONGEST_WORD)
                second = gr.Textbox(PAIR[1], label="Another", info=hint, max_length=LONGEST_WORD)
            template = gr.Textbox(PAIR[2], label="What stands before it", max_length=LONGEST)
            compare, apart = gr.Button("Compare", variant="primary"), show()
            for begin in compare.click, first.submit, second.submit, template.submit:
                begin(told(explorer.pair), [first, second, template], apart, **private)
        with gr.Tab("Model") as tab:
            figures = show()
            tab.select(told(explorer.model), None, figures, **private)

        def leave(visitor: gr.Request) -> None:
            for turns in texts, picks, looks:
                turns.forget(visitor)

        page.unload(leave)
    return page


def serve(page: "Blocks", host: str, port: int, names: Sequence[str], tell: Callable[[str], None]) -> None:
    """Until it is stopped, to whoever calls it by one of these names, or by any where none is given.

    `tell` is told when it has begun.
    """
    import gradio as gr
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    # A page elsewhere may have its own name lead to this machine, and so pass for this one.
    guard = Middleware(TrustedHostMiddleware, allowed_hosts=names or ["*"], www_redirect=False)
    at = f"[{host}]" if ":" in host else host
    theme = gr.themes.Base(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    ink = {"block_info_text_color": "*body_text_color", "block_info_text_color_dark": "*body_text_color"}
    page.queue(default_concurrency_limit=32)  # most of them wait for the model
    page.launch(
        app_kwargs={"middleware": [guard]},
        prevent_thread_lock=True,
        server_name=at,
        server_port=port,
        share=False,
        quiet=True,
        css=(files(__package__) / "page.css").read_text(encoding="utf-8"),
        theme=theme.set(**ink),
        footer_links=[],
        allowed_paths=[],
        max_file_size=1,  # byte: nothing is to be uploaded
        enable_monitoring=False,
        run_history=False,
        mcp_server=False,
        ssr_mode=False,
    )
    tell(f"http://{at}:{port}")
    try:
        threading.Event().wait()
    finally:
        page.close(verbose=False)
