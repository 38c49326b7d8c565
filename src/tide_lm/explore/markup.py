"""The page's HTML: a text or a token is shown as itself, and nothing in it is read as markup.

All shades have one colour that everybody can tell from the page, or two that differ by a line as well.
"""

import html
import re
import unicodedata
from collections.abc import Callable
from enum import StrEnum
from functools import cache
from typing import Any

from markupsafe import Markup

from tide_lm.explore.reader import ReadText
from tide_lm.report.page import templates

DARKEST_LOSS, DARKEST_GAIN = 12.0, 4.0  # nats
_READ_BY_GRADIO = str.maketrans({sign: f"&#{ord(sign)};" for sign in "{}$@`\\"})  # in its own templates


class Colour(StrEnum):
    """What a token's shade shows."""

    gain = "gain over the other model"
    loss = "loss"
    decile = "frequency decile"
    on_memory = "weight on memory"


def part(name: str, /, **values: Any) -> str:
    """Return a part of the page, a macro of parts.html.jinja."""
    return str(getattr(_parts(), name)(**values)).strip()


@cache
def _parts() -> Any:
    environment = templates("explore", finalize=escaped)
    environment.filters |= {"word": word, "code": with_code, "number": format}
    return environment.get_template("parts.html.jinja").module


def escaped(value: Any) -> Markup:
    """Return a value as text; characters that cannot be seen have a picture or a number."""
    if isinstance(value, Markup):
        return value
    text = str(value)
    seen = text if text.isprintable() else "".join(map(_visible, text))
    return Markup(html.escape(seen).translate(_READ_BY_GRADIO))


def with_code(message: str) -> Markup:
    """Return a message in which `this` is code."""
    return Markup(re.sub("&#96;(.*?)&#96;", r"<code>\1</code>", str(escaped(message))))


def word(text: str) -> Markup:
    """Return a token on one line, with spaces that can be seen and counted."""
    spaced = re.sub(" {4,}", lambda found: f"␣x{len(found[0])}", text).replace(" ", "␣")
    return Markup(escaped(spaced).replace("\n", "").replace("\t", "") or "(nothing)")


def _visible(character: str) -> str:
    if character == "\n":
        return "↵\n"
    if character == "\t":
        return "⇥\t"
    if ord(character) < 32:
        return chr(0x2400 + ord(character))
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return f"⟨U+{ord(character):04X}⟩"
    return character


def tokens(text: ReadText, colour: Colour, chosen: int | None = None) -> str:
    """Return a button for each token that has been read."""
    return part("tokens", text=text, shade=_SHADES[colour], facts=facts, chosen=chosen)


def _loss(text: ReadText, place: int) -> float:
    loss = text.losses[place]
    return 0.0 if loss is None else min(loss / DARKEST_LOSS, 1.0)


def _decile(text: ReadText, place: int) -> float:
    decile = text.deciles[place]
    return 0.0 if decile is None else (10 - decile) / 10


def _on_memory(text: ReadText, place: int) -> float:
    return text.on_memory[place] or 0.0


def _gain(text: ReadText, place: int) -> float:
    loss, other = text.losses[place], text.base_losses[place] if text.base_losses else None
    return 0.0 if loss is None or other is None else max(-1.0, min((other - loss) / DARKEST_GAIN, 1.0))


# How dark a token is, at most 1; below 0 it has the other of two colours.
_SHADES: dict[Colour, Callable[[ReadText, int], float]] = {
    Colour.loss: _loss,
    Colour.decile: _decile,
    Colour.on_memory: _on_memory,
    Colour.gain: _gain,
}
LEGENDS = {
    Colour.loss: f"The darker, the higher the loss of the token, up to {DARKEST_LOSS:g} nats.",
    Colour.decile: "The darker, the rarer the token: deciles 9, the commonest, to 0. Those without a letter "
    "or a digit have none.",
    Colour.on_memory: "The darker, the more of the routers' weight is on blocks and not on the null bank.",
    Colour.gain: "Blue: less loss than the other model; orange and underlined: more; up to "
    f"{DARKEST_GAIN:g} nats.",
}


def facts(text: ReadText, place: int) -> Markup:
    """Return the numbers of a token in words."""
    found = {
        "id": (text.ids[place], ""),
        "loss": (text.losses[place], ".3f"),
        "other model": (text.base_losses[place] if text.base_losses else None, ".3f"),
        "decile": (text.deciles[place], ""),
        "on memory": (text.on_memory[place], ".2f"),
    }
    known = (f"{name} {value:{form}}" for name, (value, form) in found.items() if value is not None)
    return escaped(", ".join(known))
