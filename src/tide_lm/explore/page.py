"""The page: four tabs over one model, served to this machine alone unless asked otherwise."""

import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from tide_lm.explore.explorer import LONGEST, LONGEST_WORD, SAMPLE, Explorer, Turn
from tide_lm.explore.markup import escaped
from tide_lm.run.optional import require

if TYPE_CHECKING:
    from gradio import Blocks, Request

PAIR = "their", "there", "On the blackboard the teacher wrote"


class Turns:
    """The last question of each visitor."""

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


def _show(**options: Any) -> Any:
    import gradio as gr

    return gr.HTML(elem_classes=["tide"], **options)


def _buttons() -> Any:
    """Return a place for tokens, whose buttons can be chosen with a mouse or with arrow keys."""
    return _show(js_on_load=(files(__package__) / "page.js").read_text(encoding="utf-8"))


def _on(event: Any, answer: Callable, given: Any, shown: Any, **options: Any) -> None:
    """Answer an event: call a function with what is given, and show what it returns."""
    event(_showing_errors(answer), given, shown, api_visibility="private", **options)


def _showing_errors(function: Callable) -> Callable:
    """Return a function that shows on the page what is wrong with a question."""
    import gradio as gr

    @contextmanager
    def shown() -> Iterator[None]:
        try:
            yield
        except (ValueError, OSError) as error:
            raise gr.Error(escaped(error), print_exception=False) from None

    @functools.wraps(function)
    def answers(*given: Any) -> Iterator[Any]:
        with shown():
            yield from function(*given)

    return answers if inspect.isgeneratorfunction(function) else shown()(function)


# Answer a question even if the visitor's last one is being answered.
_AT_ONCE: dict[str, Any] = {"trigger_mode": "multiple"}


def build(explorer: Explorer) -> "Blocks":
    """Return the page. It sends nothing elsewhere, and keeps nothing."""
    for name in [name for name in os.environ if name.startswith("GRADIO_")]:
        del os.environ[name]
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    require("gradio", "the explorer", "explore")
    import gradio as gr

    texts, picks, looks = Turns(), Turns(), Turns()
    with gr.Blocks(title=f"TIDE: {explorer.opened.name}", fill_width=True, analytics_enabled=False) as page:
        _show(value=explorer.about)
        with gr.Tab("Text"):
            _text_tab(explorer, page, texts, picks)
        with gr.Tab("Tokens"):
            _tokens_tab(explorer, looks)
        with gr.Tab("Pairs"):
            _pairs_tab(explorer)
        with gr.Tab("Model") as tab:
            _on(tab.select, explorer.model, None, _show())

        def leave(visitor: gr.Request) -> None:
            for turns in texts, picks, looks:
                turns.forget(visitor)

        page.unload(leave)
    return page


def _text_tab(explorer: Explorer, page: "Blocks", texts: Turns, picks: Turns) -> None:
    import gradio as gr

    typed = gr.Textbox(SAMPLE, label="Text", lines=4, max_length=LONGEST)
    colour = gr.Radio([str(one) for one in explorer.colours], value="loss", label="Shade by")
    with gr.Row():
        go, stop = gr.Button("Read", variant="primary"), gr.Button("Stop")
    summary, shown = _show(), _buttons()
    layer = gr.Dropdown(
        list(explorer.layers),
        value=0,
        label="Without memory in layer",
        info="For the last of the tables below, once a token is chosen.",
        visible=explorer.opened.has_memory,
    )
    about = _show()
    read_text, chosen = gr.State(None), gr.State(None)

    def read(typed: str, colour: str, visitor: gr.Request) -> Iterator[tuple]:
        of_the_last_text: tuple = (None, "")  # goes when the first of this one is there
        for state in explorer.read(typed, texts.begin(visitor, Turn(colour=colour))):
            yield *state, *of_the_last_text
            of_the_last_text = gr.skip(), gr.skip()

    def stop_reading(visitor: gr.Request) -> None:
        texts.stop(visitor)

    def shade(typed: str | None, colour: str, chosen: int | None, visitor: gr.Request) -> tuple[str, str]:
        texts.last(visitor).colour = colour
        return explorer.shade(typed, colour, chosen)

    def choose(typed: str | None, layer: int, visitor: gr.Request, event: gr.EventData) -> Any:
        turn, last = picks.begin(visitor, Turn()), texts.last(visitor)
        if last.text == typed:
            last.chosen = event.place
        detail = explorer.detail(typed, event.place, layer)
        is_late = turn.replaced or texts.last(visitor).text not in (None, typed)
        return (gr.skip(), gr.skip()) if is_late else (event.place, detail)

    for begin in go.click, typed.submit, page.load:
        _on(begin, read, [typed, colour], [read_text, summary, shown, chosen, about], **_AT_ONCE)
    _on(stop.click, stop_reading, None, None, queue=False)
    _on(colour.change, shade, [read_text, colour, chosen], [summary, shown])
    _on(shown.select, choose, [read_text, layer], [chosen, about], **_AT_ONCE)
    _on(layer.change, explorer.detail, [read_text, chosen, layer], about)


def _tokens_tab(explorer: Explorer, looks: Turns) -> None:
    import gradio as gr

    info = "part of a token, or #7 for the token with this id"
    words = gr.Textbox(label="Search tokens", info=info, max_length=LONGEST_WORD)
    found = _buttons()
    with gr.Row():
        stop = gr.Button("Stop", size="sm", scale=0, visible=explorer.opened.has_memory)
    card = _show()

    def look_up(visitor: gr.Request, event: gr.EventData) -> Iterator[str]:
        yield from explorer.token(event.place, looks.begin(visitor, Turn()))

    def stop_looking(visitor: gr.Request) -> None:
        looks.stop(visitor)

    _on(words.change, explorer.search, words, found, trigger_mode="always_last")
    _on(found.select, look_up, None, card, **_AT_ONCE)
    _on(stop.click, stop_looking, None, None, queue=False)


def _pairs_tab(explorer: Explorer) -> None:
    import gradio as gr

    with gr.Row():
        hint = "a word, which a space is put before, or #7 for the token with this id"
        first = gr.Textbox(PAIR[0], label="One token", info=hint, max_length=LONGEST_WORD)
        second = gr.Textbox(PAIR[1], label="Another", info=hint, max_length=LONGEST_WORD)
    template = gr.Textbox(PAIR[2], label="Text before it", max_length=LONGEST)
    compare, apart = gr.Button("Compare", variant="primary"), _show()
    for begin in compare.click, first.submit, second.submit, template.submit:
        _on(begin, explorer.pair, [first, second, template], apart)


def serve(page: "Blocks", host: str, port: int, names: Sequence[str], log: Callable[[str], None]) -> None:
    """Serve the page until it is stopped, under these names or, if there are none, under any.

    `log` gets the address once the page is served.
    """
    import gradio as gr
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    # Another page's name may lead to this machine, which makes a browser take it for this page.
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
    log(f"http://{at}:{port}")
    try:
        threading.Event().wait()
    finally:
        page.close(verbose=False)
