"""How help names what an option takes: in a reader's words, where typer shows Python's types."""

import re
from functools import partial
from typing import Any

from typer.core import TyperArgument, TyperCommand, TyperGroup

_WORDS = {"bool": "", "str": "TEXT", "int": "N", "float": "NUMBER", "path": "PATH", "Path": "PATH"}


class _InWords:
    def get_params(self, context: Any) -> list[Any]:
        params = super().get_params(context)  # type: ignore[misc]
        for param in params:
            if hasattr(param, "display_type_rich"):  # typer 0.29 and newer
                shown = param.display_type_rich(context) or ""
                if shown.startswith("<"):  # a type of Python, and no word of ours
                    shown = re.sub(r"[<>\]]|list\[| range", "", shown)
                word = "" if isinstance(param, TyperArgument) else _WORDS.get(shown, shown)
                param.display_type_rich = partial(_same, word)
        return params


def _same(word: str, ctx: Any = None) -> str | None:
    return word or None


class Command(_InWords, TyperCommand):
    """A command whose help is in words."""


class Group(_InWords, TyperGroup):
    """A group of commands whose help is in words."""
