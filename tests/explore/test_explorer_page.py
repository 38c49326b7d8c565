"""The page as it is wired, without a browser: which answer each control asks for, and with what."""

import importlib.util
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
    return {function.name: function for function in page.fns.values()}


def test_every_question_has_its_controls_and_none_is_open_to_programs(asked):
    labels = {
        name: [getattr(block, "label", None) for block in function.inputs] for name, function in asked.items()
    }
    state = None  # what a visitor has read and chosen has no label
    assert labels["read"] == ["Text", "Shade by"]
    assert labels["shade"] == [state, "Shade by", state]
    assert labels["choose"] == [state, "Without memory in layer"]
    assert labels["detail"] == [state, state, "Without memory in layer"]
    assert labels["search"] == ["Search tokens"]
    assert labels["pair"] == ["One token", "Another", "Text before it"]
    assert {"look_up", "stop_reading", "stop_looking", "model"} <= labels.keys()
    assert {function.api_visibility for name, function in asked.items() if name != "leave"} == {"private"}


def test_answers_are_those_of_the_explorer(asked, explorer):
    *_, (text, summary, shown, *_) = asked["read"].fn(TEXT, "loss", VISITOR)
    assert (text, summary, shown) == list(explorer.read(TEXT, Turn(colour="loss")))[-1]
    assert asked["shade"].fn(TEXT, "frequency decile", 2, VISITOR) == explorer.shade(
        TEXT, "frequency decile", 2
    )
    place = SimpleNamespace(place=2)
    assert asked["choose"].fn(TEXT, 1, VISITOR, place) == (2, explorer.detail(TEXT, 2, 1))
    assert asked["detail"].fn(TEXT, 2, 1) == explorer.detail(TEXT, 2, 1) != explorer.detail(TEXT, 2, 0)
    assert asked["pair"].fn("layer", "token", "every") == explorer.pair("layer", "token", "every")
    *_, card = asked["look_up"].fn(VISITOR, SimpleNamespace(place=7))
    assert card == list(explorer.token(7, Turn()))[-1]
    assert "tide-lm analyze routing" in asked["model"].fn()


def test_a_token_of_a_text_that_is_gone_changes_nothing(asked):
    import gradio

    list(asked["read"].fn("the context", "loss", VISITOR))
    assert asked["choose"].fn(TEXT, 0, VISITOR, SimpleNamespace(place=1)) == (gradio.skip(), gradio.skip())


def test_what_the_explorer_refuses_is_shown_as_text(asked, monkeypatch):
    import gradio

    def refuse(*_):
        raise ValueError("<b>no</b>")

    monkeypatch.setattr(Explorer, "read", refuse)
    with pytest.raises(gradio.Error) as shown:
        list(asked["read"].fn(TEXT, "loss", VISITOR))
    assert "<b>" not in shown.value.message
    assert "no" in shown.value.message
