"""Numbers and tokens as readers see them."""

from collections.abc import Callable, Sequence
from decimal import ROUND_CEILING, Context
from itertools import pairwise

NOT_MEASURED = "not measured"
TOO_LARGE = "too large"
MINUS = "\N{MINUS SIGN}"


def nats(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.3f}"


def difference(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:+.3f}".replace("-", MINUS)


def percent(value: float | None, digits: int = 1) -> str:
    """A share as a signed percentage; a very large one as a power of ten."""
    if value is None:
        return NOT_MEASURED
    text = f"{value:+,.{digits}%}" if abs(value) < 100 else f"{value * 100:+.2e} %"
    return text.replace("%", " %").replace("  ", " ").replace("-", MINUS)


def count(value: float | None) -> str:
    """A count, exact while it is short; with few digits where it is very small or large."""
    if value is None:
        return NOT_MEASURED
    text = f"{value:,.0f}" if 100 <= abs(value) < 1e6 else f"{value:.3g}"
    return text.replace("e+0", "e").replace("e+", "e").replace("e-0", "e-").replace("-", MINUS)


def bound(value: float) -> str:
    """An upper bound, rounded up to three digits, so that it stays one."""
    return count(float(Context(prec=3, rounding=ROUND_CEILING).create_decimal(str(value))))


def ends(values: Sequence[float | None], shown: Callable[[float | None], str] = nats) -> str:
    """The first and the last of a row."""
    return f"{shown(values[0])} to {shown(values[-1])}"


def steps(values: Sequence[float | None], holds: Callable[[float, float], bool]) -> str:
    """At how many steps from one value to the next something holds."""
    found = [holds(a, b) for a, b in pairwise(values) if a is not None and b is not None]
    return f"at {sum(found)} of {len(found)} steps"


def quantity(value: float | None) -> str:
    """A large number in the usual short form: 1.03B, 983K."""
    if value is None:
        return NOT_MEASURED
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.0f}"


def gigabytes(value: float | None) -> str:
    """GB of 10^9 bytes, as in the paper; less in smaller units."""
    if value is None:
        return NOT_MEASURED
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= size:
            return f"{value / size:.3f} {unit}"
    return f"{value:.0f} bytes"


def token(text: str) -> str:
    """A token so that its spaces and control characters can be seen."""
    seen = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    return seen.replace(" ", "␣")


def short(name: str, longest: int = 30) -> str:
    """A name that fits a legend, its middle left out if need be."""
    half = (longest - 1) // 2
    return name if len(name) <= longest else f"{name[:half]}…{name[-half:]}"
