"""Tokens are drawn as often as their chances say, from those that are left."""

import pytest
import torch

from tide_lm.serve import Sampling

CHANCES = torch.tensor([0.05, 0.4, 0.25, 0.2, 0.1])
DRAWS = 20_000


def shares(sampling: Sampling) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = sampling.pick(CHANCES.log().expand(DRAWS, -1), generator)
    return torch.bincount(drawn, minlength=5) / DRAWS


@pytest.mark.parametrize(
    ("sampling", "left"),
    [
        (Sampling(1.0), [0, 1, 2, 3, 4]),
        (Sampling(1.0, top_k=3), [1, 2, 3]),
        (Sampling(1.0, top_k=99), [0, 1, 2, 3, 4]),
        (Sampling(1.0, top_p=0.64), [1, 2]),
        (Sampling(1.0, top_p=0.66), [1, 2, 3]),
        (Sampling(1.0, top_p=0.01), [1]),
        (Sampling(1.0, top_p=1.0), [0, 1, 2, 3, 4]),
        (Sampling(1.0, top_k=4, top_p=0.89), [1, 2, 3]),  # which have 0.895 of the chances of the four
    ],
    ids=str,
)
def test_tokens_are_drawn_as_often_as_their_chances_say(sampling, left):
    wanted = torch.zeros(5)
    wanted[left] = CHANCES[left] / CHANCES[left].sum()
    torch.testing.assert_close(shares(sampling), wanted, atol=0.012, rtol=0)
    assert not shares(sampling)[wanted == 0].any()


def test_a_temperature_sharpens_or_flattens():
    for temperature in 0.5, 2.0:
        wanted = (CHANCES.log() / temperature).softmax(-1)
        torch.testing.assert_close(shares(Sampling(temperature)), wanted, atol=0.012, rtol=0)


def test_temperature_0_takes_the_most_likely():
    assert Sampling(top_k=2, top_p=0.5).pick(CHANCES[None]).tolist() == [1]
    assert Sampling(1e-39).pick(CHANCES[None]).tolist() == [1]


def test_a_seed_gives_the_same_tokens_again():
    logits, sampling = torch.randn(64, 50), Sampling(1.0, top_p=0.9)
    first, second, other = (sampling.pick(logits, torch.Generator().manual_seed(s)) for s in (3, 3, 4))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
