"""The page as it is wired, without a browser: which answer each control asks for, and with what."""

import importlib.util
import inspect
import os
from types import SimpleNamespace
from unittest import mock

import pytest

from tide_lm.explore.explorer import Explorer, Turn
from tide_lm.model.opened import open_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("gradio") is None, reason="gradio is missing: pip install -e '.[explore]'"
)
TEXT = "every layer knows the token"
VISITOR = SimpleNamespace(session_hash="one")


@pytest.fixture(scope="module")
def explorer(trained, base_run, tmp_path_factory):
    return Explorer(
        open_model(str(trained), writes=False),
        open_model(str(base_run), writes=False),
        tmp_path_factory.mktemp("results"),
    )


@pytest.fixture(scope="module")
def asked(explorer):
    """The functions of the page by their names."""
    from tide_lm.explore.page import build

    with mock.patch.dict(os.environ):  # which it changes
        page = build(explorer)
    found = {}
    for function in page.fns.values():
        sources = found.setdefault(function.name, function).fn, function.fn
        first, second = (getattr(inspect.unwrap(fn), "__code__", None) for fn in sources)
        assert first is second, f"two functions of the page have the name {function.name}"
    return found


def test_every_question_has_its_controls_and_none_is_open_to_programs(asked):
    labels = {
        name: [getattr(block, "label", None) for block in function.inputs] for name, function in asked.items()
    }
    state = None  # what a visitor has read and chosen has no label
    assert labels["write"] == ["Prompt", "Length, tokens", "Temperature", "Top-k, empty for all", "Seed"]
    assert labels["read"] == ["Text", "Shade by", state, state]
    assert labels["shade"] == [state, "Shade by"]
    assert labels["search"] == ["Search tokens"]
    assert labels["pair"] == ["One token", "Another", "Text before it"]
    assert {
        "look_up",
        "stop_writing",
        "stop_reading",
        "stop_looking",
        "open_text",
        "watch",
        "analyse",
    } <= labels.keys()
    assert {function.api_visibility for name, function in asked.items() if name != "leave"} == {"private"}
    modes = {function.trigger_mode for name, function in asked.items() if name not in (None, "leave")}
    assert modes == {"multiple"}  # or what is asked while an answer is made would be dropped


def test_answers_are_those_of_the_explorer(asked, explorer):
    import gradio

    *_, (text, summary, shown, *_), last = asked["read"].fn(TEXT, "loss", None, 0, VISITOR)
    assert set(map(str, last)) == {str(gradio.skip())}  # or a later question's answer would go
    assert (text, summary, shown) == list(explorer.read(TEXT, Turn(colour="loss")))[-1]
    assert asked["shade"].fn(TEXT, "frequency decile", VISITOR) == explorer.shade(
        TEXT, "frequency decile", None
    )
    *_, (_, shaded, *_), _ = asked["read"].fn(TEXT, "loss", None, 0, VISITOR)  # as it was asked before
    assert "the rarer the token" in shaded
    place, layer = SimpleNamespace(place=2), SimpleNamespace(layer=1)
    detail = explorer.detail(TEXT, 2, 1)
    assert asked["choose"].fn(TEXT, 1, VISITOR, place) == (2, detail)
    assert asked["leave_out"].fn(TEXT, 2, VISITOR, layer) == (1, detail) != (0, explorer.detail(TEXT, 2, 0))
    assert list(asked["read"].fn(TEXT, "loss", 2, 1, VISITOR))[-2][-1] == detail
    assert asked["pair"].fn("layer", "token", "every", VISITOR) == explorer.pair("layer", "token", "every")
    *_, card, _ = asked["look_up"].fn(7, VISITOR)
    assert card == list(explorer.token(7, Turn()))[-1]
    assert list(asked["choose_id"].fn(VISITOR, SimpleNamespace(place=7)))[-2] == (7, card)
    assert "tide-lm analyze routing" in list(asked["watch"].fn(VISITOR))[-2][-1]
    *_, words, _ = asked["search"].fn("layer", VISITOR)
    assert words == list(explorer.search("layer", Turn()))[-1]
    with pytest.raises(gradio.Error, match="there is no analysis -1"):
        list(asked["analyse"].fn(VISITOR, SimpleNamespace(what="routing")))


def test_a_token_of_a_text_that_is_gone_changes_nothing(asked):
    import gradio

    list(asked["read"].fn("the context", "loss", None, 0, VISITOR))
    nothing = gradio.skip(), gradio.skip()
    assert asked["choose"].fn(TEXT, 0, VISITOR, SimpleNamespace(place=1)) == nothing
    assert asked["leave_out"].fn(TEXT, 1, VISITOR, SimpleNamespace(layer=1)) == nothing


@pytest.mark.parametrize(
    ("question", "given", "newer", "answer"),
    [
        ("choose", (TEXT, 0, VISITOR, SimpleNamespace(place=1)), {3: SimpleNamespace(place=2)}, "detail"),
        ("leave_out", (TEXT, 1, VISITOR, SimpleNamespace(layer=0)), {3: SimpleNamespace(layer=1)}, "detail"),
        ("shade", (TEXT, "loss", VISITOR), {1: "frequency decile"}, "shade"),
        ("pair", ("layer", "token", "every", VISITOR), {1: "knows"}, "pair"),
    ],
)
def test_an_answer_that_comes_after_a_newer_question_changes_nothing(
    asked, monkeypatch, question, given, newer, answer
):
    import gradio

    list(asked["read"].fn(TEXT, "loss", None, 0, VISITOR))
    at_last = getattr(Explorer, answer)

    def slow(*given_to_it):
        monkeypatch.undo()
        shown.append(asked[question].fn(*[newer.get(at, one) for at, one in enumerate(given)]))
        return at_last(*given_to_it)

    shown = []
    monkeypatch.setattr(Explorer, answer, slow)
    shown.append(asked[question].fn(*given))
    nothing = str(gradio.skip())
    assert [nothing in str(one) for one in shown] == [False, True]


def test_a_token_of_a_link_does_not_replace_one_that_was_chosen_since(asked, explorer, monkeypatch):
    shown, detail = [], Explorer.detail

    def slow(*given):
        monkeypatch.undo()
        shown.append(asked["choose"].fn(TEXT, 0, VISITOR, SimpleNamespace(place=1)))
        return detail(*given)

    monkeypatch.setattr(Explorer, "detail", slow)
    *_, last, _ = asked["read"].fn(TEXT, "loss", 2, 0, VISITOR)
    assert shown == [(1, explorer.detail(TEXT, 1, 0))]
    assert explorer.detail(TEXT, 2, 0) not in last


def test_what_the_explorer_refuses_is_shown_as_text(asked, monkeypatch):
    import gradio

    def refuse(*_):
        raise ValueError("<b>no</b>")

    monkeypatch.setattr(Explorer, "read", refuse)
    with pytest.raises(gradio.Error) as shown:
        list(asked["read"].fn(TEXT, "loss", None, 0, VISITOR))
    assert "<b>" not in shown.value.message
    assert "no" in shown.value.message


def test_what_a_browser_makes_up_is_answered_in_a_sentence(asked):
    import gradio

    written = ["every layer knows the token", "every layer"]
    for event in (
        SimpleNamespace(),
        SimpleNamespace(column=9, place=1),
        SimpleNamespace(column="0", place=1),
        SimpleNamespace(column=-1, place=1),
    ):
        assert asked["open_text"].fn(written, event) == (gradio.skip(),) * 3
    assert asked["choose"].fn(TEXT, 0, VISITOR, SimpleNamespace(place={}))[1] == ""
    for settings, fault in {
        (10**9, 0.8, 40, 1): "the length is 1000000000: give a number from 1 to 256",
        (5, float("nan"), 40, 1): "the temperature is nan: give a number from 0 to 2",
        (5, "hot", 40, 1): "the temperature is .*hot",
        (5, 0.8, -1, 1): "top-k is -1: give a number from 1",
        (5, 0.8, 40, None): "the seed is empty: give a number from 0",
    }.items():
        with pytest.raises(gradio.Error, match=fault):
            list(asked["write"].fn("every", *settings, VISITOR))
    with pytest.raises(gradio.Error, match="together more than 512: give a shorter prompt"):
        list(asked["write"].fn("every layer " * 2000, 5, 0.8, 40, 1, VISITOR))
