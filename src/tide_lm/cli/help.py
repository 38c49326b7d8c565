"""What help and errors call the values of options: in a reader's words, where typer has Python's types."""

import re
from functools import partial
from typing import Any

from typer import BadParameter
from typer.core import TyperArgument, TyperCommand, TyperGroup

_WORDS = {"bool": "", "str": "TEXT", "int": "N", "float": "NUMBER", "path": "PATH", "Path": "PATH"}
_FAULTS = {  # of typer 0.29 and newer, whose words are those of a schema
    r"Input should be a valid integer.*": "it must be a whole number",
    r"Input should be a valid number.*": "it must be a number",
    r"Input should be greater than or equal to (\S+)": r"it must be at least \1",
    r"Input should be less than or equal to (\S+)": r"it must be at most \1",
}


class _InWords:
    def make_context(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().make_context(*arguments, **options)  # type: ignore[misc]
        except BadParameter as error:
            for fault, words in _FAULTS.items():
                error.message = re.sub(fault, words, error.message)
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Name what turns an option off in its words: in a column of its own, it would cut other names."""
        for param in self.params:  # type: ignore[attr-defined]
            if off := param.secondary_opts:
                default = "On by default; " if param.default else ""
                param.help, param.show_default = f"{param.help} {default}{off[0]} turns it off.", False
                param.secondary_opts = []
        super().format_help(ctx, formatter)  # type: ignore[misc]

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
