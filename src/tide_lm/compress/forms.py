"""The smaller forms of tables that are measured, by name."""

from collections.abc import Sequence

from tide_lm.spec.form import Form
from tide_lm.spec.names import suggestion

_SHARES = (0.9, 0.7, 0.5, 0.3, 0.1)
FORMS = (
    *(Form(bits) for bits in (16, 8, 4, 3, 2)),
    *(Form(16, rank=share) for share in _SHARES),
    *(Form(16, rank=share, blocks="joint") for share in _SHARES),
    *(Form(bits, rank=0.5, blocks="joint") for bits in (8, 4)),
)


def forms_named(names: Sequence[str]) -> list[Form]:
    """Return the forms that are called so, such as "4 bits"."""
    known = {str(form): form for form in FORMS}
    if unknown := [name for name in names if name not in known]:
        choice = f"choose from {', '.join(map(repr, known))}"
        raise ValueError(f"{unknown[0]!r} is no form of tables: {suggestion(unknown[0], known, choice)}")
    return [known[name] for name in names]
