"""The text that every installation has: the documentation of Python and of the packages TIDE depends on.

It differs between versions, so models trained on it compare only if its sha256 is the same. Files are read,
never imported. Docstrings are found with regular expressions: a parser finds the same ones (but for a few in
a thousand) and takes thirty times as long.
"""

import ast
import importlib.util
import inspect
import os
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("numpy", "rich", "safetensors", "tokenizers", "torch", "transformers", "typer")
SHORTEST = 80

_NO_LIBRARY = {"__pycache__", "dist-packages", "site-packages", "test", "tests"}
_TRIPLE_QUOTED = (
    r'([rRuU]?(?:"""(?:[^"\\]++|\\.|"(?!""))*+"""' r"|'''(?:[^'\\]++|\\.|'(?!''))*+'''))"
)  # possessive, so that an unclosed quote costs no backtracking
_AT_TOP = re.compile(r"\A(?:[ \t]*(?:#[^\n]*)?\n)*+" + _TRIPLE_QUOTED, re.DOTALL)
_AFTER_HEADER = re.compile(r":[ \t]*(?:#[^\n]*)?\n\s*+" + _TRIPLE_QUOTED, re.DOTALL)


def documents() -> Iterator[tuple[str, str]]:
    """Yield Python's reference by topic, then one document of docstrings per file, no docstring twice."""
    from pydoc_data.topics import topics

    yield from ((f"pydoc_data/{name}", topics[name]) for name in sorted(topics))
    seen: set[str] = set()
    for name, path in source_files():
        if fresh := [text for text in dict.fromkeys(docstrings(path)) if text not in seen]:
            seen.update(fresh)
            yield name, "\n\n".join(fresh) + "\n"


def source_files() -> list[tuple[str, Path]]:
    """Return the sources of the standard library and of the packages, each with its name, sorted."""
    roots = {"python": Path(sysconfig.get_path("stdlib"))}
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)  # imports nothing if the package is top-level
        if spec is not None and spec.submodule_search_locations:
            roots[package] = Path(spec.submodule_search_locations[0])
    found = []
    for package, root in roots.items():
        for folder, inner, names in os.walk(root):
            inner[:] = [name for name in inner if name not in _NO_LIBRARY]
            paths = (Path(folder, name) for name in names if name.endswith(".py"))
            found += [(f"{package}/{path.relative_to(root).as_posix()}", path) for path in paths]
    return sorted(found)


def docstrings(path: Path) -> Iterator[str]:
    """Yield the file's docstrings of some length, cleaned as `inspect.getdoc` does."""
    try:
        source = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return
    for literal in _AT_TOP.findall(source) + _AFTER_HEADER.findall(source):
        if len(text := inspect.cleandoc(_value(literal)).strip()) >= SHORTEST:
            yield text


def _value(literal: str) -> str:
    if literal[0] in "rR" or "\\" not in literal:
        return literal.lstrip("rRuU")[3:-3]
    try:
        with warnings.catch_warnings(action="ignore"):  # about unknown escapes, which stay as they are
            return ast.literal_eval(literal)
    except SyntaxError:
        return ""
