"""What the page shows, as HTML: nothing of a text or a token can be read as anything but itself.

Numbers stand beside every colour, and all colours are shades of one that everybody can tell from the page.
"""

import html
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum

from tide_lm.explore.reading import LIMIT, Detail, Prediction, Reading
from tide_lm.explore.vocabulary import FOUND, Entry
from tide_lm.report.drawing import PALETTE

WORST = 12.0  # nats, from which on the shade is the darkest
_TEMPLATE = str.maketrans({sign: f"&#{ord(sign)};" for sign in "{}$@`\\"})  # which the page's templates read


class Colour(StrEnum):
    """What a token's shade tells."""

    loss = "loss"
    decile = "frequency decile"
    drawn = "weight on memory"
    gain = "gain over the other model"


def escaped(text: str) -> str:
    """Characters that cannot be seen have a picture or a number."""
    return html.escape("".join(map(_seen, text))).translate(_TEMPLATE)


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


def tokens(reading: Reading, colour: Colour) -> str:
    """A button for each token that has been read; arrow keys go from one to the next."""
    shade = _SHADES[colour]
    buttons = []
    for place in range(reading.done if reading.ids else 0):
        share = shade(reading, place)
        look = f' class="{"less" if share < 0 else "more"}" style="--share:{abs(share):.2f}"' if share else ""
        said = html.escape(_said(reading, place))
        word = escaped(reading.texts[place]) or "&nbsp;"
        name = f"{_word(reading.texts[place])}: {said}"
        stop = "" if place else ' tabindex="0"'
        buttons.append(
            f'<button type="button" data-place="{place}" title="{said}" aria-label="{name}"'
            f"{stop or ' tabindex=-1'}{look}>{word}</button>"
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
    Colour.decile: "The darker, the rarer the token: deciles 9, the commonest, to 0. Plain ones have none.",
    Colour.drawn: "The darker, the more of the routers' weight is on blocks and not on the null bank.",
    Colour.gain: "Blue: less loss than the other model; orange and underlined: more; up to 4 nats.",
}


def _said(reading: Reading, place: int) -> str:
    """The numbers of a token."""
    words = [f"id {reading.ids[place]}"]
    if (loss := reading.losses[place]) is not None:
        words.append(f"loss {loss:.3f}")
    if reading.compared and (other := reading.compared[place]) is not None:
        words.append(f"the other's {other:.3f}")
    if (decile := reading.deciles[place]) is not None:
        words.append(f"decile {decile}")
    if (drawn := reading.drawn[place]) is not None:
        words.append(f"on memory {drawn:.2f}")
    return ", ".join(words)


def summary(reading: Reading, name: str, other: str | None) -> str:
    """How far it has been read, and the mean losses."""
    if len(reading.ids) < 2:
        return "<p>There is nothing to read: type some text.</p>"
    said = f"{reading.done - 1:,} of {len(reading.ids) - 1:,} tokens read."
    if reading.loss is not None:
        said += f" Mean loss of {escaped(name)}: <strong>{reading.loss:.4f}</strong> nats"
        known = [loss for loss in reading.compared if loss is not None]
        if other is not None and known:
            said += f"; of {escaped(other)}: <strong>{sum(known) / len(known):.4f}</strong>"
        said += "."
    if reading.left_out:
        said += f" {reading.left_out:,} more are left out: at most {LIMIT:,} are read."
    return f"<p>{said}</p>"


def detail(reading: Reading, place: int, found: Detail) -> str:
    """All about one token: its layers, and what is expected to follow it."""
    parts = [
        f"<h3 class='token'>{_word(reading.texts[place])}</h3><p>{html.escape(_said(reading, place))}</p>"
    ]
    if found.weights:
        slots = [f"M{block + 1}" for block in range(len(found.weights[0]) - 1)] + ["null"]
        rows = []
        for layer, weights in enumerate(found.weights):
            bars = "".join(
                f'<i class="slot{"" if slot < len(slots) - 1 else " null"}" style="--share:{weight:.4f};'
                f'--colour:{PALETTE[slot % len(PALETTE)]}" title="{slots[slot]} {weight:.3f}"></i>'
                for slot, weight in enumerate(weights)
            )
            share = found.added[layer] / found.state[layer] if found.state[layer] else 0.0
            numbers = [f"{weight:.3f}" for weight in weights]
            numbers += [f"{found.added[layer]:.3f}", f"{found.state[layer]:.3f}", f"{share:.3f}"]
            rows.append([str(layer), f'<span class="bar" aria-hidden="true">{bars}</span>', *numbers])
        heads = ["layer", "weights", *slots, "memory", "state", "memory / state"]
        caption = (
            "By layer: the router's weight of each block and of the null bank; the norm of what memory adds "
            "to the state, that of the state without it, and their quotient."
        )
        parts.append(table(caption, heads, rows))
    columns = "".join(_predictions(title, words) for title, words in found.predictions.items())
    parts.append(f'<h4>What is predicted to follow</h4><div class="columns">{columns}</div>')
    return "".join(parts)


def _predictions(title: str, words: Iterable[Prediction]) -> str:
    rows = [[f"<code>{_word(one.text)}</code>", f"{one.probability:.4f}"] for one in words]
    return table(title, ["token", "probability"], rows)


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML already."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in heads)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        for first, *cells in rows
    )
    name = html.escape(caption)
    content = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return (
        f'<div><p class="caption">{name}</p><div class="scroll" tabindex="0" role="region" '
        f'aria-label="{name}"><table aria-label="{name}">{content}</table></div></div>'
    )


def found_tokens(entries: Sequence[Entry], total: int) -> str:
    """A search's tokens, as buttons."""
    if not entries:
        return "<p>No token has this.</p>"
    buttons = "".join(
        f'<button type="button" data-place="{entry.id}" tabindex="{-1 if number else 0}">'
        f"{_word(entry.text)}<small>#{entry.id}</small></button>"
        for number, entry in enumerate(entries)
    )
    shown = f"{total:,} tokens" if total <= FOUND else f"{total:,} tokens, of which {FOUND} are shown"
    return f'<p>{shown}.</p><div class="tokens found" role="group" aria-label="tokens">{buttons}</div>'


def entry(one: Entry, neighbours: dict | None) -> str:
    """A token's numbers, and its neighbours in E and in each block side by side."""
    facts = [f"id {one.id}"]
    facts += [] if one.count is None else [f"{one.count:,} occurrences in the training text"]
    facts += [f"decile {one.decile} (0 rarest, 9 commonest)"] if one.decile is not None else ["no decile"]
    norms = table(
        "Norm of its row, as trained", ["table", "norm"], [[n, f"{v:.4f}"] for n, v in one.norms.items()]
    )
    parts = [f"<h3 class='token'>{_word(one.text)}</h3><p>{', '.join(facts)}</p>", norms]
    if neighbours is not None:
        tables = neighbours["neighbours"]
        heads = ["nearest", "E", *(f"M{block + 1}" for block in range(len(tables) - 1))]
        rows = [
            [str(rank + 1), *(f"<code>{_word(words[rank])}</code>" for words in tables)]
            for rank in range(len(tables[0]))
        ]
        rows.append(["overlap with E", "", *(f"{overlap:.3f}" for overlap in neighbours["jaccard"])])
        caption = "Nearest tokens by cosine, and Jaccard's index of each block's with those of E"
        parts.append(table(caption, heads, rows))
    return "".join(parts)
