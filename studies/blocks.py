"""Generated blocks of a Markdown page; all the rest of the page is written by hand.

A block stands between two comments, the first of which names it:

    <!-- numbers: NAME -->

    | a table | made by a function |

    <!-- end -->

Both comments may also stand in one line, around a few words of a sentence.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tide_lm.run import files

Blocks = Mapping[str, Callable[[], str]]  # by name, what makes the text of a block

_BLOCK = re.compile(r"<!-- numbers: (?P<name>\S+) -->(?P<text>.*?)<!-- end -->", re.DOTALL)
_STRAY = re.compile(r"<!--\s*(?:numbers\b|end\b).*?-->")


def names(page: str) -> list[str]:
    """Return the names of a page's blocks."""
    return [block["name"] for block in _BLOCK.finditer(page)]


def rewritten(page: str, blocks: Blocks) -> str:
    """Return a page with all of its blocks made anew."""

    def make(block: re.Match[str]) -> str:
        name, text = block["name"], block["text"]
        if stray := _STRAY.search(text):
            raise ValueError(f"{stray[0]} stands inside the block {name}: end that one before it")
        if name not in blocks:
            raise ValueError(f"there is no block {name}: use one of {', '.join(sorted(blocks))}")
        space = "\n\n" if "\n" in text else ""
        return f"<!-- numbers: {name} -->{space}{blocks[name]()}{space}<!-- end -->"

    if stray := _STRAY.search(_BLOCK.sub("", page)):
        raise ValueError(f"{stray[0]} is no part of a block: write <!-- numbers: NAME --> ... <!-- end -->")
    return _BLOCK.sub(make, page)


def rewrite(pages: Iterable[Path], blocks: Blocks) -> list[Path]:
    """Rewrite the pages on which a block has changed, after all could be made, and return them."""
    changed = {}
    for path in pages:
        page = path.read_text(encoding="utf-8")
        try:
            new = rewritten(page, blocks)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if new != page:
            changed[path] = new
    for path, new in changed.items():
        files.write_atomically(path, new)
    return list(changed)
