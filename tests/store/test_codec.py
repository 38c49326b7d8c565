"""Rows in few bits: what comes back, its error, and the layout of the bytes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_lm.spec.form import BITS
from tide_lm.store.codec import RowCodec, gaussian_levels, pack, words_of

ERRORS = {16: 4e-6, 8: 4e-5, 4: 0.007, 3: 0.03, 2: 0.13}  # mean square, of numbers whose own is 1


def back(codec: RowCodec, rows: torch.Tensor) -> torch.Tensor:
    words = words_of(codec.levels, codec.bits) if codec.bits < 16 else None
    encoded = codec.encode(rows)
    assert encoded.shape == (len(rows), codec.row_bytes)
    assert encoded.dtype == torch.uint8
    return codec.decode(encoded, words)


@pytest.mark.parametrize("bits", BITS)
def test_the_error_of_gaussian_rows_is_small(bits):
    rows = (
        torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 64)[:, None]
    )
    error = (back(RowCodec(1000, bits), rows) - rows).square().mean(1) / rows.square().mean(1)
    assert error.max() < ERRORS[bits]


def test_a_groups_scale_is_the_nearest_that_a_byte_can_hold():
    rows = torch.randn(8, 320, generator=torch.Generator().manual_seed(0))
    codec = RowCodec(320, 8)
    scales, row_scale = codec.encode(rows)[:, codec.code_bytes :].split([codec.groups, 4], 1)
    row_scale = row_scale.contiguous().view(torch.float32)
    wanted = rows.unflatten(1, (codec.groups, 32)).abs().amax(-1) / codec.levels[-1]
    assert ((scales * row_scale - wanted).abs() <= 0.5001 * row_scale).all()
    assert (scales.amax(1) == 255).all()


@settings(max_examples=60)
@given(
    bits=st.sampled_from(BITS),
    group=st.sampled_from([8, 32, 64]),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 130)),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 2**32 - 1),
)
def test_rows_of_any_shape_and_size_come_back_near(bits, group, shape, exponent, seed):
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent
    found = back(RowCodec(shape[1], bits, group), rows)
    assert found.shape == rows.shape
    assert found.isfinite().all()
    largest = rows.abs().amax(1, keepdim=True)
    assert ((found - rows).abs() <= {16: 0.004, 8: 0.005, 4: 0.5, 3: 0.7, 2: 1.0}[bits] * largest).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [0.0, 1e-45, -1e-38, 1e-20, 3e38, -3.3e38])
def test_zero_tiny_and_huge_rows(bits, value):
    rows = torch.full((2, 40), value)
    rows[1, 1:] = 0
    found = back(RowCodec(40, bits), rows)
    assert found.isfinite().all()
    if abs(value) >= 1e-20 or value == 0:
        # In two bits no level is 0, so one number among zeros is not near.
        assert torch.allclose(found, rows, rtol=0.2, atol=abs(value) * (0.7 if bits == 2 else 0.3))
    else:
        assert (found.abs() <= 2 * abs(value) + 1e-37).all()


@pytest.mark.parametrize("bits", BITS)
def test_a_row_is_encoded_the_same_alone_and_among_others(bits):
    rows = torch.randn(7, 70, generator=torch.Generator().manual_seed(1))
    codec = RowCodec(70, bits)
    together, alone = codec.encode(rows), torch.cat([codec.encode(row[None]) for row in rows])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_what_is_encoded_twice_stays_as_it_is(bits):
    rows = torch.randn(9, 96, generator=torch.Generator().manual_seed(2))
    once = back(RowCodec(96, bits), rows)
    assert torch.allclose(back(RowCodec(96, bits), once), once, atol=0.03)


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_a_number_is_its_level_times_two_scales(bits):
    """Read from the bytes as docs/store-format.md has them, without the code under test."""
    codec = RowCodec(70, bits)
    rows = torch.randn(3, 70, generator=torch.Generator().manual_seed(3))
    encoded, found = codec.encode(rows).numpy(), back(codec, rows)
    for row, decoded in zip(encoded, found, strict=True):
        codes = row[: 96 * bits // 8]
        group_scales, row_scale = row[96 * bits // 8 : -4], row[-4:].view("<f4")[0]
        for number in range(70):
            if bits == 3:
                low, high = codes[number // 8 * 3 + number % 8 // 4], codes[number // 8 * 3 + 2]
                code = (low >> 2 * (number % 4) & 3) + 4 * (high >> number % 8 & 1)
            else:
                code = codes[number * bits // 8] >> number * bits % 8 & 2**bits - 1
            scale = np.float32(group_scales[number // 32]) * row_scale
            assert decoded[number] == codec.levels[int(code)] * torch.tensor(scale)


def test_levels_are_those_of_the_least_error():
    """The mean square errors of Max's quantisers for a Gaussian."""
    for bits, error in ((2, 0.1175), (3, 0.03454), (4, 0.009497)):
        levels = gaussian_levels(bits).double()
        x = torch.linspace(-8, 8, 400_001, dtype=torch.float64)
        nearest = levels[torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)]
        density = torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)
        assert torch.trapezoid((x - nearest).square() * density, x) == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_codes_come_back_from_their_bytes(bits):
    codes = torch.randint(2**bits, (5, 64), generator=torch.Generator().manual_seed(4))
    levels = torch.arange(2**bits).float()
    codec = RowCodec(64, bits)
    scales = torch.tensor([[1] * codec.groups + [0, 0, 128, 63]], dtype=torch.uint8).expand(5, -1)  # 1.0
    found = codec.decode(torch.cat([pack(codes, bits), scales], 1), words_of(levels, bits))
    assert torch.equal(found.long(), codes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((8, 5), "bits is 5: use one of 16, 8, 4, 3, 2"), ((8, 4, 12), "group is 12"), ((0, 4), "numbers is 0")],
)
def test_bad_codecs_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        RowCodec(*arguments)
