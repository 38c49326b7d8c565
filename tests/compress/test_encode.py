"""Rows of a trained memory in fewer bits and of lower rank."""

import numpy as np
import pytest
import torch

from tide_lm.compress.encode import Encoder, folded_rows
from tide_lm.spec.form import Form
from tide_lm.store.rows import RowDecoder

FINGERPRINT = "0" * 64


@pytest.fixture
def memory(tiny_model):
    """Of 3 blocks of 32 numbers: rows lie near a plane of 8 directions, and gains differ."""
    memory = tiny_model().model.memory
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        plane = torch.randn(3, 8, 32, generator=generator)
        near = torch.einsum("vkr,krd->vkd", torch.randn(len(memory.weight), 3, 8, generator=generator), plane)
        memory.weight.copy_(near + 0.1 * torch.randn(near.shape, generator=generator))
        memory.norm.weight.copy_(1 + 0.3 * torch.randn(memory.norm.weight.shape, generator=generator))
    return memory


def decoded(memory, form: Form) -> torch.Tensor:
    encoder = Encoder(memory, form, FINGERPRINT)
    rows = torch.cat(list(encoder.rows()))
    assert rows.shape == (len(memory.weight), encoder.header.codec.row_bytes)
    return RowDecoder(encoder.header, encoder.sections)(rows)


def error(memory, form: Form) -> float:
    """The share of the rows' squares that is lost."""
    rows = torch.cat(list(folded_rows(memory)))
    return float((decoded(memory, form) - rows).square().sum() / rows.square().sum())


def test_folded_rows_are_what_layers_receive(memory):
    ids = torch.arange(len(memory.weight))
    with torch.no_grad():
        assert torch.allclose(torch.cat(list(folded_rows(memory))), memory(ids).rows_UJD, atol=1e-6)


@pytest.mark.parametrize(("bits", "most"), [(16, 4e-6), (8, 5e-5), (4, 0.009), (3, 0.035), (2, 0.14)])
def test_fewer_bits_lose_little(memory, bits, most):
    assert 0 < error(memory, Form(bits)) < most


@pytest.mark.parametrize("blocks", ["even", "joint"])
def test_a_lower_rank_keeps_the_plane(memory, blocks):
    share = 8 / 32
    least = error(memory, Form(16, rank=share, blocks=blocks))
    assert least < 0.1
    assert error(memory, Form(16, rank=share / 2, blocks=blocks)) > 4 * least
    assert error(memory, Form(16, rank=0.999, blocks=blocks)) < 1e-4
    assert error(memory, Form(8, rank=share, blocks=blocks)) == pytest.approx(least, rel=0.05)


@pytest.mark.parametrize("form", [Form(8), Form(4, rank=0.5), Form(8, rank=0.25, blocks="joint")])
def test_rows_read_a_few_at_once_are_the_same(memory, form, monkeypatch):
    whole = Encoder(memory, form, FINGERPRINT)
    sections, rows_UB = whole.sections, torch.cat(list(whole.rows()))
    columns_N = torch.cat(list(whole._numbers())).square().mean(0).sqrt()
    assert np.allclose(sections["columns"], columns_N.numpy(), rtol=1e-5)
    monkeypatch.setattr("tide_lm.compress.encode._ROWS_AT_ONCE", 7)
    few = Encoder(memory, form, FINGERPRINT)
    for name, values in sections.items():
        assert np.allclose(few.sections[name], values, rtol=1e-3, atol=1e-3), name
    read = [RowDecoder(each.header, each.sections) for each in (whole, few)]
    assert torch.allclose(read[0](rows_UB), read[1](torch.cat(list(few.rows()))), atol=0.02)


def test_ranks_are_rounded_up_as_in_the_paper(memory):
    assert Encoder(memory, Form(rank=0.3), FINGERPRINT).ranks == (10, 10, 10)
    assert Encoder(memory, Form(rank=0.3, blocks="joint"), FINGERPRINT).ranks == (29,)
    assert Encoder(memory, Form(rank=1e-9), FINGERPRINT).ranks == (1, 1, 1)
    assert Encoder(memory, Form(), FINGERPRINT).ranks == ()


def test_a_lower_rank_loses_least_of_all_planes(memory):
    """By torch's own decomposition, of each block."""
    rows = torch.cat(list(folded_rows(memory))).double()
    found = decoded(memory, Form(16, rank=0.2)).double()
    for block in range(3):
        kept = torch.linalg.svdvals(rows[:, block])[7:].square().sum()
        assert (found[:, block] - rows[:, block]).square().sum() == pytest.approx(float(kept), rel=0.01)


def test_a_row_that_is_not_finite_is_named(memory):
    with torch.no_grad():
        memory.weight[17, 1, 3] = float("nan")
    with pytest.raises(ValueError, match=r"row 17 of the tables is not finite in block 2"):
        Encoder(memory, Form(4), FINGERPRINT)


def test_rows_of_zeros_stay_zeros(memory):
    with torch.no_grad():
        memory.weight.zero_()
    assert not decoded(memory, Form(4)).any()
    assert not decoded(memory, Form(4, rank=0.5)).any()


def test_counts_of_other_tokens_are_refused(memory):
    with pytest.raises(ValueError, match=r"3 counts.* 53"):
        Encoder(memory, Form(), FINGERPRINT, np.ones(3))


@pytest.mark.parametrize(
    "wrong",
    [{"rank": 0.0}, {"rank": 1.5}, {"rank": float("nan")}, {"bits": 5}, {"group": 3}, {"blocks": "joint"}],
)
def test_forms_that_are_none_are_refused(wrong):
    with pytest.raises(ValueError, match=r"rank is|bits is|group is|blocks is"):
        Form(**wrong)
