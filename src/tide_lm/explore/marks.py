"""What the page shows, as HTML: nothing of a text or a token can be read as anything but itself.

All shades are of one colour that everybody can tell from the page, or of two that differ by a line as well.
"""

import html
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum

from tide_lm.analysis.tables import names
from tide_lm.explore.reading import LIMIT, Detail, Prediction, Reading
from tide_lm.explore.vocabulary import FOUND, Entry, Neighbours
from tide_lm.report.drawing import PALETTE

WORST = 12.0  # nats, from which on the shade is the darkest
_TEMPLATE = str.maketrans(
    {sign: f"&#{ord(sign)};" for sign in "{}$@`\\"}
)  # which templates of the page may read


class Colour(StrEnum):
    """What a token's shade tells."""

    loss = "loss"
    decile = "frequency decile"
    drawn = "weight on memory"
    gain = "gain over the other model"


def escaped(text: str) -> str:
    """Characters that cannot be seen have a picture or a number."""
    return html.escape("".join(map(_seen, text))).translate(_TEMPLATE)


def told(message: str) -> str:
    """A message, in which `this` is code."""
    return re.sub("&#96;(.*?)&#96;", r"<code>\1</code>", escaped(message))


def _word(text: str) -> str:
    """A token by itself, on one line, its spaces to be seen and counted."""
    spaced = re.sub(" {4,}", lambda found: f"␣x{len(found[0])}", text).replace(" ", "␣")
    return escaped(spaced).replace("\n", "").replace("\t", "") or "(nothing)"


def _seen(character: str) -> str:
    if character == "\n":
        return "↵\n"
    if character == "\t":
        return "⇥\t"
    if ord(character) < 32:
        return chr(0x2400 + ord(character))
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return f"⟨U+{ord(character):04X}⟩"
    return character


def tokens(reading: Reading, colour: Colour, chosen: int | None = None) -> str:
    """A button for each token that has been read; arrow keys go from one to the next."""
    shade, reached = _SHADES[colour], chosen if chosen is not None and chosen < reading.done else 0
    buttons = []
    for place in range(reading.done):
        share = shade(reading, place)
        look = f' class="{"less" if share < 0 else "more"}" style="--share:{abs(share):.2f}"' if share else ""
        look += ' aria-pressed="true"' if place == chosen else ""
        said, word = escaped(_said(reading, place)), reading.texts[place]
        buttons.append(
            f'<button type="button" data-place="{place}" tabindex="{0 if place == reached else -1}" '
            f'title="{said}" aria-label="{_word(word)}: {said}"{look}>{escaped(word) or "&nbsp;"}</button>'
        )
    return f'<div class="tokens" role="group" aria-label="tokens">{"".join(buttons)}</div>'


def _loss(reading: Reading, place: int) -> float:
    loss = reading.losses[place]
    return 0.0 if loss is None else min(loss / WORST, 1.0)


def _decile(reading: Reading, place: int) -> float:
    decile = reading.deciles[place]
    return 0.0 if decile is None else (10 - decile) / 10


def _drawn(reading: Reading, place: int) -> float:
    return reading.drawn[place] or 0.0


def _gain(reading: Reading, place: int) -> float:
    loss, other = reading.losses[place], reading.compared[place] if reading.compared else None
    return 0.0 if loss is None or other is None else max(-1.0, min((other - loss) / 4, 1.0))


_SHADES: dict[Colour, Callable[[Reading, int], float]] = {
    Colour.loss: _loss,
    Colour.decile: _decile,
    Colour.drawn: _drawn,
    Colour.gain: _gain,
}
LEGENDS = {
    Colour.loss: f"The darker, the higher the loss of the token, up to {WORST:g} nats.",
    Colour.decile: "The darker, the rarer the token: deciles 9, the commonest, to 0. Those without a letter "
    "or a digit have none.",
    Colour.drawn: "The darker, the more of the routers' weight is on blocks and not on the null bank.",
    Colour.gain: "Blue: less loss than the other model; orange and underlined: more; up to 4 nats.",
}


def _said(reading: Reading, place: int) -> str:
    """The numbers of a token."""
    words = [f"id {reading.ids[place]}"]
    if (loss := reading.losses[place]) is not None:
        words.append(f"loss {loss:.3f}")
    if reading.compared and (other := reading.compared[place]) is not None:
        words.append(f"compared {other:.3f}")
    if (decile := reading.deciles[place]) is not None:
        words.append(f"decile {decile}")
    if (drawn := reading.drawn[place]) is not None:
        words.append(f"on memory {drawn:.2f}")
    return ", ".join(words)


def summary(reading: Reading, colour: Colour, name: str, other: str | None, stopped: bool = False) -> str:
    """How far it has been read, the mean losses, and what shades tell."""
    if reading.loss is None and reading.done == len(reading.ids):
        return status("There is nothing to read: type some text.")
    done = reading.done - len(reading.ids) + reading.of_text
    said = f"{'Stopped: ' if stopped else ''}{done:,} of {reading.of_text:,} tokens read."
    if reading.loss is not None:
        said += f" Mean loss of {escaped(name)}: <strong>{reading.loss:.4f}</strong> nats"
        if other is not None and reading.compared_loss is not None:
            said += f"; of {escaped(other)}: <strong>{reading.compared_loss:.4f}</strong>"
        said += "."
    if reading.left_out:
        said += f" {reading.left_out:,} more are left out: at most {LIMIT:,} are read."
    return status(said) + f"<p>{LEGENDS[colour]}</p>"


def status(said: str) -> str:
    """A line that a screen reader tells as it changes."""
    return f'<p role="status">{said}</p>'


def detail(reading: Reading, place: int, found: Detail, has_values: bool) -> str:
    """All about one token: its layers, and what is expected to follow it."""
    parts = [_heading(reading.texts[place], _said(reading, place))]
    if found.weights:
        slots = [*names(len(found.weights[0]) - 1)[1:], "null"]
        rows = []
        for layer, weights in enumerate(found.weights):
            bars = "".join(map(_slot, slots, range(len(slots)), weights))
            share = found.added[layer] / found.state[layer] if found.state[layer] else 0.0
            numbers = [*weights, found.added[layer], found.state[layer], share]
            bar = f'<span class="bar" aria-hidden="true">{bars}</span>'
            rows.append([str(layer), bar, *(f"{number:.3f}" for number in numbers)])
        caption = (
            "By layer: the router's weight of each block and of the null bank; the norm of what memory adds "
            "to the state, that of the state without it, and their quotient."
        )
        if has_values:
            caption += " What it adds to attention's values is not counted."
        keys = [_slot(name, slot) + name for slot, name in enumerate(slots)]
        heads = ["layer", '<span class="bars">weights</span>', *keys, "memory", "state", "memory / state"]
        parts.append(table(caption, heads, rows))
    columns = "".join(_predictions(title, words) for title, words in found.predictions.items())
    parts.append(f'<h3>What is predicted to follow</h3><div class="columns">{columns}</div>')
    return "".join(parts)


def _heading(text: str, said: str) -> str:
    return f'<h2 class="token">{_word(text)}</h2>{status(escaped(said))}'


def _slot(name: str, slot: int, weight: float | None = None) -> str:
    """A part of a bar, or the key to it."""
    kind = "slot null" if name == "null" else "slot"
    colour = f"--colour:{PALETTE[slot % len(PALETTE)]}"
    if weight is None:
        return f'<i class="{kind}" style="{colour}"></i>'
    return f'<i class="{kind}" style="{colour};--share:{weight:.4f}" title="{name} {weight:.3f}"></i>'


def _predictions(title: str, words: Iterable[Prediction]) -> str:
    rows = [[f"<code>{_word(one.text)}</code>", f"{one.probability:.4f}"] for one in words]
    return table(title, ["token", "probability"], rows)


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Heads and cells are HTML already."""
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        for first, *cells in rows
    )
    name, content = escaped(caption), f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return (
        f'<div><p class="caption">{name}</p><div class="scroll" tabindex="0" role="region" '
        f'aria-label="{name}"><table aria-label="{name}">{content}</table></div></div>'
    )


def found_tokens(texts: dict[int, str], total: int) -> str:
    """A search's tokens by id, as buttons."""
    if not texts:
        return status("No token has this.")
    buttons = "".join(
        f'<button type="button" data-place="{id}" tabindex="{-1 if number else 0}">'
        f"{_word(text)}<small>#{id}</small></button>"
        for number, (id, text) in enumerate(texts.items())
    )
    shown = (
        f"{total:,} token{'s' * (total > 1)}"
        if total <= FOUND
        else f"{total:,} tokens, of which {FOUND} are shown"
    )
    return f'{status(f"{shown}.")}<div class="tokens found" role="group" aria-label="tokens">{buttons}</div>'


def entry(one: Entry) -> str:
    """A token's numbers."""
    facts = [f"id {one.id}"]
    facts += [] if one.count is None else [f"{one.count:,} occurrences in the training text"]
    facts += [f"decile {one.decile} (0 rarest, 9 commonest)"] if one.decile is not None else ["no decile"]
    norms = [[name, f"{norm:.4f}"] for name, norm in one.norms.items()]
    return _heading(one.text, ", ".join(facts)) + table(
        "Norm of its row, as trained", ["table", "norm"], norms
    )


def neighbours(found: Neighbours, stopped: bool) -> str:
    """The nearest in E and in each block side by side."""
    rows = [
        [str(rank + 1), *(f"<code>{_word(words[rank])}</code>" for words in found.texts)]
        for rank in range(len(found.texts[0]))
    ]
    rows.append(["overlap with E", "", *(f"{overlap:.3f}" for overlap in found.jaccard)])
    caption = "Nearest tokens by cosine, and Jaccard's index of each block's with those of E"
    so_far = f"{'Stopped: ' if stopped else ''}{found.searched:,} of {found.candidates:,} tokens searched."
    return status(so_far) + table(caption, ["nearest", *names(len(found.texts) - 1)], rows)


def pair(ids: Sequence[int], texts: Sequence[str]) -> str:
    """Which tokens are compared."""
    words = [f"<code>{_word(text)}</code> (#{id})" for id, text in zip(ids, texts, strict=True)]
    return status(" and ".join(words))
