"""Dataclasses from plain values; an unknown name or a wrong value is an error that names the setting."""

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from tide_lm.spec.names import suggestion

_IN_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}

AtLeastOne = Annotated[int, 1]


def merge(kind: type, *layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge settings of a dataclass section by section; later layers win."""
    known = get_type_hints(kind)
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            is_section = dataclasses.is_dataclass(known.get(name))
            merged[name] = {**merged.get(name, {}), **section(name, value)} if is_section else value
    return merged


def plain(value: Any) -> Any:
    """Return a path as text and numpy's numbers as Python's, as settings have them."""
    return value.item() if hasattr(value, "item") else str(value) if isinstance(value, Path) else value


def unfolded(values: Any) -> dict[str, Any]:
    """Return settings section by section; `section.key` names one of a section, and wins over the section."""
    if not isinstance(values, Mapping):
        raise ValueError(f"the settings are {values!r:.60}: give a dict, such as {{'train.steps': 100}}")
    found: dict[str, Any] = {}
    for name in sorted(values, key=lambda name: "." in str(name)):
        value = values[name]
        within, dot, key = str(name).partition(".")
        if dot:
            found[within] = {**section(within, found.get(within, {})), key: plain(value)}
        elif isinstance(value, Mapping):
            found[within] = {key: plain(each) for key, each in value.items()}
        else:
            found[within] = plain(value)
    return found


def section(name: str, values: Any) -> Mapping[str, Any]:
    """Return a section's settings, after a check that it is one."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{name} is {values!r}: it must be a section of settings")
    return values


def build(kind: type, values: Mapping[str, Any], name: str = "") -> Any:
    """Build a dataclass, and those within it; `name` is that of the section."""
    known = get_type_hints(kind, include_extras=True)
    for key in values:
        if key not in known:
            what = f"setting of {name}" if name else "section"
            raise ValueError(f"unknown {what} {key!r}: {suggestion(key, known)}")
    prefix = f"{name}." if name else ""
    return kind(**{key: check(f"{prefix}{key}", value, known[key]) for key, value in values.items()})


def check_all(settings: Any, name: str = "") -> None:
    """Check the values of a dataclass, and of those within it, as `build` does before it makes one."""
    kinds = get_type_hints(type(settings), include_extras=True)
    prefix = f"{name}." if name else ""
    for key, kind in kinds.items():
        value = getattr(settings, key)
        if dataclasses.is_dataclass(kind):
            check_all(value, key)
        else:
            check(f"{prefix}{key}", value, kind)


def check(name: str, value: Any, kind: Any) -> Any:
    """Return a value of this kind: a section, one of some choices, a boolean, a string or a number."""
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        return build(kind, section(name, value), name)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{name} is {value!r}: {suggestion(str(value), get_args(kind))}")
        return value
    least = 0
    if get_origin(kind) is Annotated:
        kind, least = get_args(kind)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f"{name} is {value!r}: it must be {_IN_WORDS.get(kind, kind.__name__)}")
    if kind in (int, float) and not least <= value < math.inf:
        raise ValueError(f"{name} is {value!r}: it must be finite and at least {least}")
    return value


def parse_override(text: str, kind: type) -> dict[str, Any]:
    """Parse `section.key=value`, or `key=value` for a setting of `kind` that is no section.

    The value is written as in TOML; a string needs no quotes.
    """
    name, equals, value = text.partition("=")
    first, dot, key = name.partition(".")
    hint = get_type_hints(kind).get(first)
    is_section = hint is None or dataclasses.is_dataclass(hint)
    if not equals or (is_section and not dot):
        raise ValueError(f"{text!r} is not a setting: write section.key=value, or recipe=NAME")
    if not dot:
        return {first: _parse(value, str)}
    return {first: {key: _parse(value, get_type_hints(hint).get(key) if is_section and hint else None)}}


def _parse(text: str, kind: Any) -> Any:
    """Parse a TOML value; what is not valid TOML is a string, and so is what must be one."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return text if kind is str and not isinstance(value, str) else value
