"""Numbers, tokens and names as readers see them."""

from collections.abc import Callable, Sequence
from decimal import ROUND_CEILING, Context
from itertools import pairwise

NOT_MEASURED = "not measured"
MINUS = "\N{MINUS SIGN}"
DECILE_NAMES = ("0, rarest", *map(str, range(1, 9)), "9, commonest")


def number(value: float | None, spec: str = ".3f") -> str:
    """Format a number with three decimals or as `spec` says."""
    return NOT_MEASURED if value is None else format(value, spec).replace("-", MINUS)


def difference(value: float | None) -> str:
    """Format a number with three decimals and its sign."""
    return number(value, "+.3f")


def percent(value: float | None, digits: int = 1) -> str:
    """Format a share as a signed percentage, and a very large one as a power of ten."""
    if value is None or abs(value) < 100:
        return number(value, f"+,.{digits}%").replace("%", " %")
    return number(100 * value, "+.2e") + " %"


def percents(shares: Sequence[float | None]) -> list[float | None]:
    return [None if share is None else 100 * share for share in shares]


def count(value: float | None, digits: int = 3) -> str:
    """Format a count: exactly while it is short, with few digits where it is very small or large."""
    if value is None:
        return NOT_MEASURED
    text = number(value, ",.0f" if 10 ** (digits - 1) <= abs(value) < 1e6 else f".{digits}g")
    return text.replace("e+0", "e").replace("e+", "e").replace(f"e{MINUS}0", f"e{MINUS}")


def upper_bound(value: float) -> str:
    """Format an upper bound, rounded up to three digits, so that it stays one."""
    return count(float(Context(prec=3, rounding=ROUND_CEILING).create_decimal(str(value))))


def quantity(value: float | None, spec: str = ".4g") -> str:
    """Format a large number in the usual short form: 1.03B, 983K."""
    return _in_units(value, ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")), spec, "")


def gigabytes(value: float | None) -> str:
    """Format bytes as GB of 10^9 bytes, as in the paper, and fewer in smaller units."""
    spec = ".3f" if value is not None and value >= 0.99995e9 else ".4g"  # from what rounds to 1 GB
    return _in_units(value, ((1e9, " GB"), (1e6, " MB"), (1e3, " kB")), spec, " bytes")


def _in_units(value: float | None, units: Sequence[tuple[float, str]], spec: str, one: str) -> str:
    if value is None:
        return NOT_MEASURED
    for size, unit in units:
        if float(shown := f"{value / size:{spec}}") >= 1:
            return f"{shown}{unit}"
    return f"{value:.0f}{one}"


def ends(values: Sequence[float | None], shown: Callable[[float | None], str] = number) -> str:
    """Return the first and the last of some values in words."""
    return f"{shown(values[0])} to {shown(values[-1])}"


def three_digits(value: float | None) -> str:
    return number(value, ".3g")


def steps(values: Sequence[float | None], holds: Callable[[float, float], bool]) -> str:
    """Say at how many steps from one value to the next something holds."""
    found = [holds(a, b) for a, b in pairwise(values) if a is not None and b is not None]
    return f"at {sum(found)} of {len(found)} steps"


def token(text: str) -> str:
    """Show a token's spaces and control characters."""
    seen = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    return seen.replace(" ", "␣")


def short(name: str, longest: int = 30) -> str:
    """Shorten a name so that it fits a legend; its middle is left out."""
    half = (longest - 1) // 2
    return name if len(name) <= longest else f"{name[:half]}…{name[-half:]}"
