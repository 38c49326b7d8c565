"""What can only be seen on a GPU: no synchronisation, compiled graphs, half precision."""

import warnings

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture
def model(tiny_model):
    return tiny_model(eos_token_id=None).cuda()


def waits(model, ids) -> int:
    """How often a forward pass makes the host wait for the GPU."""
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(ids, use_cache=False)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            caught.clear()
            model(ids, use_cache=False)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


def test_memory_never_makes_the_host_wait(model, token_ids):
    """Llama's own mask does wait once; the check of the ids and the lookup must add nothing to it."""
    ids = token_ids.cuda()
    llama = (
        LlamaForCausalLM(
            LlamaConfig(vocab_size=53, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
        )
        .cuda()
        .eval()
    )
    assert waits(model, ids) <= waits(llama, ids)


def test_ids_on_the_gpu_are_checked_when_asked(model, token_ids, monkeypatch):
    monkeypatch.setenv("TIDE_LM_DEBUG", "1")
    model(token_ids.cuda())
    token_ids[0, 0] = 53
    with pytest.raises(ValueError, match="token id 53 is outside"):
        model(token_ids.cuda())


def test_gpu_and_cpu_agree(model, tiny_model, token_ids):
    expected = tiny_model(eos_token_id=None)(token_ids).logits
    assert torch.allclose(model(token_ids.cuda()).logits.cpu(), expected, atol=1e-4)
    half = model.to(torch.bfloat16)(token_ids.cuda()).logits.float().cpu()
    assert (half - expected).norm() / expected.norm() < 0.03


def test_inductor_gives_the_same_gradients_in_one_graph(model, token_ids):
    ids = token_ids.cuda()
    model.train()
    model(ids, labels=ids).loss.backward()
    plain = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    torch.compile(model, fullgraph=True)(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        difference = (parameter.grad - plain[name]).norm() / plain[name].norm()
        assert difference < 1e-3, name


def test_a_compiled_static_cache_gives_the_same_tokens(model, token_ids):
    ids = token_ids.cuda()
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    static = model.generate(ids, cache_implementation="static", **options)
    assert torch.equal(static, model.generate(ids, **options))
