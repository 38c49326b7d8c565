"""A text on the page is that text, and never markup."""

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from tide_lm.explore import markup
from tide_lm.explore.markup import Colour
from tide_lm.explore.reader import ReadText


class Seen(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags, self.words = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "span":
            self.words.append("")

    def handle_data(self, data):
        if self.words:
            self.words[-1] += data


def a_text(words):
    count = len(words)
    return ReadText(
        [3] * count, words, [9] * count, 0, [1.5] * count, [0.5] * count, [2.0] * count, count, count
    )


@given(st.lists(st.text(), min_size=1, max_size=4), st.sampled_from(list(Colour)))
def test_no_token_is_markup_or_a_template(words, colour):
    words = [*words, "<img src=x onerror=alert(1)>", "{{this}}", "${1}", "@children", '"onclick="', "&amp;"]
    shown = markup.tokens(a_text(words), colour)
    assert not set("{}$@`") & set(shown)
    seen = Seen()
    seen.feed(shown)
    assert seen.tags == ["div"] + ["span"] * len(words)
    for word, found in zip(words, seen.words, strict=True):
        assert found == ("".join(map(markup._visible, word)) or "\xa0")


def test_what_cannot_be_seen_is_shown():
    assert markup.escaped("a\n\t\x07\u202e\u200b") == "a↵\n⇥\t␇⟨U+202E⟩⟨U+200B⟩"


def test_shades_tell_what_they_say():
    found = a_text(["a", "b"])
    found.losses, found.base_losses = [None, 6.0], [None, 8.0]
    assert 'class="more" style="--share:0.50"' in markup.tokens(found, Colour.loss)
    assert 'class="more" style="--share:0.50"' in markup.tokens(found, Colour.gain)
    found.base_losses = [None, 5.0]
    assert 'class="less" style="--share:0.25"' in markup.tokens(found, Colour.gain)
    assert markup.tokens(found, Colour.decile).count("--share:0.10") == 2
    assert "other model 5.000" in markup.tokens(found, Colour.decile)


def test_what_stands_between_backticks_is_code():
    assert markup.with_code("run `tide-lm <b>`") == "run <code>tide-lm &lt;b&gt;</code>"
