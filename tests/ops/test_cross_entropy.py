import os

import pytest
import torch

from tide_lm.ops.cross_entropy import chunked_cross_entropy

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture
def memory_of_nan():
    """New tensors hold NaN until they are written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("memory_of_nan")
@pytest.mark.parametrize("tokens", [1, 7, 64, 65])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_chunks_give_the_loss_and_gradients_of_the_whole(tokens, z_loss):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(33, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(33, (tokens,), generator=generator)
    logits = hidden @ head.T
    per_token = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    whole = per_token.mean() + z_loss * logits.logsumexp(-1).square().mean()
    expected = torch.autograd.grad(whole, [hidden, head])

    found = chunked_cross_entropy(hidden, head, targets, z_loss, chunk=16)
    assert torch.allclose(found.objective.double(), whole, rtol=1e-5)
    assert torch.allclose(found.per_token_N.double(), per_token, rtol=1e-5)
    for ours, theirs in zip(torch.autograd.grad(found.objective, [hidden, head]), expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_the_heads_gradient_does_not_lose_with_the_number_of_chunks():
    generator, tokens = torch.Generator().manual_seed(0), 256 if INTERPRETED else 2048
    hidden = torch.randn(tokens, 16, generator=generator, requires_grad=True)
    head = torch.randn(64, 16, generator=generator, requires_grad=True)
    targets = torch.randint(64, (tokens,), generator=generator)
    (exact,) = torch.autograd.grad(chunked_cross_entropy(hidden, head, targets).objective, head)

    def error(chunk: int) -> float:
        with torch.autocast("cpu", torch.bfloat16):
            loss = chunked_cross_entropy(hidden, head, targets, chunk=chunk)
        (found,) = torch.autograd.grad(loss.objective, head)
        assert found.dtype == torch.float32
        return float((found - exact).norm() / exact.norm())

    assert error(chunk=16) < 1.2 * error(chunk=tokens) < 0.01


def test_no_tokens_are_an_error():
    with pytest.raises(ValueError, match="0 tokens to predict"):
        chunked_cross_entropy(torch.zeros(0, 8), torch.zeros(33, 8), torch.zeros(0, dtype=torch.int64))


def test_without_gradients_none_are_made():
    hidden, head = torch.randn(8, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    with torch.no_grad():
        loss = chunked_cross_entropy(hidden, head, torch.zeros(8, dtype=torch.long))
    assert not loss.objective.requires_grad


@pytest.mark.skipif(INTERPRETED, reason="the interpreter makes copies of its own")
def test_no_tensor_of_all_logits_is_ever_made():
    from torch.utils._python_dispatch import TorchDispatchMode

    tokens, vocab, chunk = 512, 300, 32
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    hidden = torch.randn(tokens, 4, requires_grad=True)
    head = torch.randn(vocab, 4, requires_grad=True)
    with Watch():
        chunked_cross_entropy(
            hidden, head, torch.zeros(tokens, dtype=torch.long), 1e-4, chunk
        ).objective.backward()
    assert chunk * vocab <= largest < tokens * vocab / 4
