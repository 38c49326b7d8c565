"""The page: five tabs over one model, whose state is in its address."""

import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from tide_lm.explore.explorer import (
    EXAMPLES,
    HOTTEST,
    LONGEST,
    LONGEST_PROMPT,
    LONGEST_WORD,
    LONGEST_WRITING,
    PROMPTS,
    Explorer,
    Turn,
)
from tide_lm.explore.markup import escaped, part
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
        return self._last.get(visitor.session_hash, Turn())

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


def _buttons(**options: Any) -> Any:
    """Return a place for tokens, whose buttons can be chosen with a mouse or with arrow keys."""
    return _show(**options, js_on_load=(files(__package__) / "page.js").read_text(encoding="utf-8"))


def _on(event: Any, answer: Callable, given: Any, shown: Any, **options: Any) -> Any:
    """Answer an event, also while the visitor's last one is answered: show what a function returns."""
    options |= {"api_visibility": "private", "trigger_mode": "multiple"}
    return event(_answering(answer, shown), given, shown, **options)


def _remember(event: Any, given: Any, js: str) -> None:
    """Put what is shown into the page's address."""
    event(None, given, None, js=js, api_visibility="private")


def _hidden(value: int | None = None) -> Any:
    """Return the place of a number that the address has as well."""
    import gradio as gr

    return gr.Number(value, visible=False, precision=0)


def _chosen(texts: list[str], typed: Any) -> Any:
    """Return buttons that put a text into a field; the event goes on once it is there."""
    import gradio as gr

    def type_in(event: gr.EventData) -> str:
        return texts[_picked(event, "example") % len(texts)]

    return _on(_buttons(value=part("examples", texts=texts)).select, type_in, None, typed, queue=False)


def _picked(event: Any, name: str) -> int:
    """Return a number of the button that was chosen, or -1 if it has none."""
    number = getattr(event, name, None)
    return number if type(number) is int else -1


def _answering(function: Callable, places: Any) -> Callable:
    """Return a function that shows on the page what is wrong with a question.

    Gradio shows the last of several answers once more at their end, which may come after those to a later
    question. So the last of them changes nothing.
    """
    import gradio as gr

    nothing: Any = (gr.skip(),) * len(places) if isinstance(places, list) else gr.skip()

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
        yield nothing

    return answers if inspect.isgeneratorfunction(function) else shown()(function)


def build(explorer: Explorer) -> "Blocks":
    """Return the page. It sends nothing elsewhere, and keeps only the results of analyses."""
    for name in [name for name in os.environ if name.startswith("GRADIO_")]:
        del os.environ[name]
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    require("gradio", "the explorer", "explore")
    import gradio as gr

    turns = {name: Turns() for name in ("writes", "texts", "picks", "searches", "looks", "pairs", "works")}
    with gr.Blocks(title=f"TIDE: {explorer.opened.name}", fill_width=True, analytics_enabled=False) as page:
        _show(value=explorer.about)
        with gr.Tabs(overflow_behavior="wrap") as tabs:
            if explorer.columns:
                with _tab("write"):
                    write_fields, open_token, written = _write_tab(explorer, turns["writes"])
            with _tab("text"):
                text_fields, read = _text_tab(explorer, turns["texts"], turns["picks"])
            with _tab("tokens") as tab:
                token_fields, look_up = _tokens_tab(explorer, tab, turns["searches"], turns["looks"])
            with _tab("pairs"):
                pair_fields = _pairs_tab(explorer, turns["pairs"])
            with _tab("model") as tab:
                _model_tab(explorer, tab, turns["works"])
        fields = text_fields | token_fields | pair_fields
        if explorer.columns:
            fields |= write_fields

            def open_text(written: list[str] | None, event: gr.EventData) -> tuple:
                column, place = _picked(event, "column"), _picked(event, "place")
                if not 0 <= column < len(written or ()):
                    return gr.skip(), gr.skip(), gr.skip()
                return gr.Tabs(selected="text"), (written or ())[column], place

            given = [text_fields["text"], text_fields["token"]]
            opened = _on(open_token, open_text, written, [tabs, *given])
            read(opened.then)
            _remember(
                opened.then, given, "(text, token) => (remember('text', { text, token }), show('text'))"
            )
        names, values = list(fields), list(fields.values())
        js = f"(...now) => recall({names}, now, {list(map(str, explorer.colours))})"
        loaded = page.load(None, values, values, js=js, api_visibility="private")
        read(loaded.then)
        look_up(loaded.then)
        _remember(loaded.then, None, "() => reopen()")

        def leave(visitor: gr.Request) -> None:
            for of_one in turns.values():
                of_one.forget(visitor)

        page.unload(leave)
    return page


def _tab(name: str) -> Any:
    import gradio as gr

    tab = gr.Tab(name.capitalize(), id=name)
    _remember(tab.select, None, f"() => show('{name}')")
    return tab


def _write_tab(explorer: Explorer, writes: Turns) -> tuple[dict[str, Any], Any, Any]:
    """Return the fields, the event of a token that is chosen, and the texts that were written."""
    import gradio as gr

    prompt = gr.Textbox(PROMPTS[0], label="Prompt", lines=2, max_length=LONGEST_PROMPT)
    example = _chosen(PROMPTS, prompt)
    with gr.Row():
        length = gr.Slider(1, LONGEST_WRITING, 60, step=1, label="Length, tokens", min_width=140)
        temperature = gr.Slider(0, HOTTEST, 0.8, step=0.05, label="Temperature", min_width=140)
        top_k = gr.Number(40, label="Top-k, empty for all", precision=0, min_width=140)
        seed = gr.Number(1, label="Seed", precision=0, min_width=140)
    go = gr.Button("Write", variant="primary", elem_id="write-asked")
    shown, texts = _buttons(), gr.State(None)
    fields = {"prompt": prompt, "length": length, "temperature": temperature, "top_k": top_k, "seed": seed}
    given = list(fields.values())

    def write(
        prompt: str, length: Any, temperature: Any, top_k: Any, seed: Any, visitor: gr.Request
    ) -> Iterator[tuple[list[str], str]]:
        turn = writes.begin(visitor, Turn())
        yield from explorer.write(prompt, length, temperature, top_k, seed, turn)

    def stop_writing(visitor: gr.Request) -> None:
        writes.stop(visitor)

    for begin in go.click, prompt.submit, example.then:
        _on(begin, write, given, [texts, shown])
        _remember(begin, given, f"({', '.join(fields)}) => remember('write', {{ {', '.join(fields)} }})")
    _on(shown.stop, stop_writing, None, None, queue=False)
    return fields, shown.select, texts


def _text_tab(explorer: Explorer, texts: Turns, picks: Turns) -> tuple[dict[str, Any], Callable]:
    """Return the fields, and a function that has the text read at an event, and its token looked into."""
    import gradio as gr

    typed = gr.Textbox(EXAMPLES[0], label="Text", lines=3, max_lines=8, max_length=LONGEST)
    example = _chosen(EXAMPLES, typed)
    colours = [str(one) for one in explorer.colours]
    colour = gr.Radio(colours, value=colours[0], label="Shade by")
    go = gr.Button("Read", variant="primary")
    summary, shown, about = _buttons(), _buttons(), _buttons()
    read_text, chosen, layer = gr.State(None), _hidden(), _hidden(0)

    def read(typed: str, colour: str, place: int | None, layer: int, visitor: gr.Request) -> Iterator[tuple]:
        turn = texts.begin(visitor, Turn(colour=texts.last(visitor).colour or colour, chosen=place))
        pick = picks.begin(visitor, Turn())
        of_the_last_text: tuple = (place, "")  # goes when the first of this one is there
        for state in explorer.read(typed, turn):
            yield *state, *of_the_last_text
            of_the_last_text = gr.skip(), gr.skip()
        if place is not None and not pick.replaced:
            yield *[gr.skip()] * 3, *look_into(pick, turn.text, place, layer, visitor, place)

    def read_anew(typed: str, colour: str, layer: int, visitor: gr.Request) -> Iterator[tuple]:
        yield from read(typed, colour, None, layer, visitor)

    def stop_reading(visitor: gr.Request) -> None:
        texts.stop(visitor)

    def shade(typed: str | None, colour: str, visitor: gr.Request) -> tuple[str, str]:
        turn = texts.last(visitor)
        turn.colour = colour  # a reading that goes on shows it, and those to come
        shown = None if turn.reading else explorer.shade(typed, colour, turn.chosen)
        is_late = turn.replaced or turn.colour != colour
        return shown if shown and not is_late else (gr.skip(), gr.skip())

    def look_into(
        pick: Turn, typed: str | None, place: int | None, layer: int, visitor: gr.Request, chosen: int
    ) -> tuple:
        """Return what was chosen and all about the token, if no other is to be shown by then."""
        detail = explorer.detail(typed, place, layer)
        is_late = pick.replaced or texts.last(visitor).text not in (None, typed)
        return (gr.skip(), gr.skip()) if is_late else (chosen, detail)

    def choose(typed: str | None, layer: int, visitor: gr.Request, event: gr.EventData) -> tuple:
        pick, last, place = picks.begin(visitor, Turn()), texts.last(visitor), _picked(event, "place")
        if last.text == typed:
            last.chosen = place
        return look_into(pick, typed, place, layer, visitor, place)

    def leave_out(typed: str | None, chosen: int | None, visitor: gr.Request, event: gr.EventData) -> tuple:
        layer = _picked(event, "layer")
        return look_into(picks.begin(visitor, Turn()), typed, chosen, layer, visitor, layer)

    everything = [read_text, summary, shown, chosen, about]
    for begin in go.click, typed.submit, example.then:
        _on(begin, read_anew, [typed, colour, layer], everything)
        _remember(begin, [typed], "(text) => remember('text', { text, token: null })")
    _on(summary.stop, stop_reading, None, None, queue=False)
    _on(colour.input, shade, [read_text, colour], [summary, shown])
    _remember(colour.input, colour, "(shade) => remember('text', { shade })")
    choice = _on(shown.select, choose, [read_text, layer], [chosen, about])
    _remember(choice.then, chosen, "(token) => remember('text', { token })")
    left_out = _on(about.select, leave_out, [read_text, chosen], [layer, about])
    _remember(left_out.then, layer, "(layer) => remember('text', { layer })")

    def read_at(event: Any) -> None:
        _on(event, read, [typed, colour, chosen, layer], everything)

    return {"text": typed, "shade": colour, "token": chosen, "layer": layer}, read_at


def _tokens_tab(
    explorer: Explorer, tab: Any, searches: Turns, looks: Turns
) -> tuple[dict[str, Any], Callable]:
    """Return the fields, and a function that has the token looked up at an event."""
    import gradio as gr

    info = "part of a token, or #7 for the token with this id"
    words = gr.Textbox("", label="Search tokens", info=info, max_length=LONGEST_WORD)
    found, card, id = _buttons(), _buttons(), _hidden()

    def search(words: str, visitor: gr.Request) -> Iterator[str]:
        yield from explorer.search(words, searches.begin(visitor, Turn()))

    def stop_searching(visitor: gr.Request) -> None:
        searches.stop(visitor)

    def choose_id(visitor: gr.Request, event: gr.EventData) -> Iterator[tuple[int, str]]:
        id = _picked(event, "place")
        for about in explorer.token(id, looks.begin(visitor, Turn())):
            yield id, about

    def look_up(id: int | None, visitor: gr.Request) -> Iterator[str]:
        yield from explorer.token(id, looks.begin(visitor, Turn()))

    def stop_looking(visitor: gr.Request) -> None:
        looks.stop(visitor)

    for begin in tab.select, words.change:
        _on(begin, search, words, found)
    _on(found.stop, stop_searching, None, None, queue=False)
    _remember(words.change, words, "(words) => remember('tokens', { words })")
    _on(found.select, choose_id, None, [id, card])
    _remember(id.change, id, "(id) => remember('tokens', { id })")
    _on(card.stop, stop_looking, None, None, queue=False)

    def look_up_at(event: Any) -> None:
        _on(event, look_up, id, card)

    return {"words": words, "id": id}, look_up_at


def _model_tab(explorer: Explorer, tab: Any, works: Turns) -> None:
    import gradio as gr

    progress, figures = _buttons(), _buttons()

    def watch(visitor: gr.Request) -> Iterator[tuple[str, str]]:
        yield from explorer.watch(works.begin(visitor, Turn()))

    def analyse(visitor: gr.Request, event: gr.EventData) -> Iterator[tuple[str, str]]:
        what = explorer.analyse(_picked(event, "what"))
        yield from explorer.watch(works.begin(visitor, Turn()), what)

    def stop_analysing(event: gr.EventData) -> None:
        explorer.stop(_picked(event, "stop"))

    shown = [progress, figures]
    _on(tab.select, watch, None, shown)
    _on(figures.select, analyse, None, shown)
    _on(progress.stop, stop_analysing, None, None, queue=False)


def _pairs_tab(explorer: Explorer, pairs: Turns) -> dict[str, Any]:
    """Return the fields."""
    import gradio as gr

    with gr.Row():
        hint = "a word, which a space is put before, or #7 for the token with this id"
        first = gr.Textbox(PAIR[0], label="One token", info=hint, max_length=LONGEST_WORD)
        second = gr.Textbox(PAIR[1], label="Another", info=hint, max_length=LONGEST_WORD)
    template = gr.Textbox(PAIR[2], label="Text before it", max_length=LONGEST)
    compare, apart = gr.Button("Compare", variant="primary", elem_id="pairs-asked"), _show()
    given = [first, second, template]

    def pair(first: str, second: str, template: str, visitor: gr.Request) -> Any:
        turn = pairs.begin(visitor, Turn())
        shown = explorer.pair(first, second, template)
        return gr.skip() if turn.replaced else shown

    for begin in compare.click, first.submit, second.submit, template.submit:
        _on(begin, pair, given, apart)
        _remember(begin, given, "(one, another, before) => remember('pairs', { one, another, before })")
    return {"one": first, "another": second, "before": template}
