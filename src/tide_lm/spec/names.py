"""What to write instead of a name that is not known."""

import difflib
from collections.abc import Iterable


def suggestion(name: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """Ask for the known name that is most like this one; if none is, say `otherwise`, or list them all."""
    known = list(known)
    by_letters = {other.lower().replace(" ", ""): other for other in known}
    near = difflib.get_close_matches(name.lower().replace(" ", ""), by_letters, n=1)
    return f"did you mean {by_letters[near[0]]!r}?" if near else otherwise or f"use one of {', '.join(known)}"
