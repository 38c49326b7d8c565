"""Numbers as readers see them."""

import pytest

from tide_lm.report.formatting import gigabytes, quantity


@pytest.mark.parametrize(
    ("value", "said"),
    [(999, "999"), (999_499_999, "999M"), (999_500_000, "1B"), (1_034_000_000, "1.03B")],
)
def test_a_number_that_rounds_to_the_next_unit_is_in_it(value, said):
    assert quantity(value, ".3g") == said


@pytest.mark.parametrize(
    ("value", "said"),
    [(999, "999 bytes"), (999_940_000, "999.9 MB"), (999_960_000, "1.000 GB"), (1_234_567_890, "1.235 GB")],
)
def test_bytes_that_round_to_a_gigabyte_are_one(value, said):
    assert gigabytes(value) == said
