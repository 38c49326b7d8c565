"""K = 0 is LlamaForCausalLM, to the bit."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tide_lm.model import TideForCausalLM


def llama_with_the_weights_of(model: TideForCausalLM) -> LlamaForCausalLM:
    settings = model.config.to_dict()
    for key in (
        "model_type",
        "auto_map",
        "num_memory_blocks",
        "memory_gain_init",
        "memory_values",
        "memory_value_scale",
        "memory_store",
    ):
        settings.pop(key, None)
    llama = LlamaForCausalLM(LlamaConfig(**settings)).eval().to(model.dtype)
    llama.load_state_dict(model.state_dict())
    return llama


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_and_gradients_equal_llama_bit_for_bit(tiny_model, token_ids, dtype, tied):
    base = tiny_model(num_memory_blocks=0, tie_word_embeddings=tied).to(dtype)
    llama = llama_with_the_weights_of(base)
    mask = torch.ones_like(token_ids)
    mask[0, :3] = 0

    ours = base(token_ids, attention_mask=mask, labels=token_ids)
    theirs = llama(token_ids, attention_mask=mask, labels=token_ids)
    assert torch.equal(ours.logits, theirs.logits)
    assert torch.equal(ours.loss, theirs.loss)

    ours.loss.backward()
    theirs.loss.backward()
    expected = dict(llama.named_parameters())
    for name, parameter in base.named_parameters():
        assert torch.equal(parameter.grad, expected[name].grad), name


def test_base_has_exactly_llamas_tensors(tiny_model):
    base = tiny_model(num_memory_blocks=0)
    assert list(base.state_dict()) == list(llama_with_the_weights_of(base).state_dict())


@pytest.mark.parametrize("values", [False, True], ids=["", "rows in values"])
def test_memory_that_is_off_leaves_llama(tiny_model, token_ids, values):
    """Gains of zero, and every layer dropped, are both the base model exactly."""
    base = tiny_model(num_memory_blocks=0)(token_ids).logits
    without = tiny_model(memory_gain_init=0.0, memory_values=values)(token_ids).logits
    dropped = tiny_model(memory_values=values)(token_ids, drop_memory_layers=[0, 1]).logits
    assert torch.equal(without, base)
    assert torch.equal(dropped, base)


def test_a_llama_folder_opens_as_the_base_model(tiny_model, token_ids, tmp_path):
    llama = llama_with_the_weights_of(tiny_model(num_memory_blocks=0))
    llama.save_pretrained(tmp_path)
    base = TideForCausalLM.from_pretrained(tmp_path, num_memory_blocks=0)
    assert torch.equal(base(token_ids).logits, llama(token_ids).logits)


def test_all_positions_or_the_last_ones_get_logits(tiny_model, token_ids):
    base = tiny_model(num_memory_blocks=0)
    everything = base(token_ids).logits
    assert torch.equal(base(token_ids, logits_to_keep=2).logits, everything[:, -2:])
    assert torch.equal(base(token_ids, logits_to_keep=torch.tensor([1, 4])).logits, everything[:, [1, 4]])


def test_the_decoder_takes_what_llamas_takes_in_its_order(tiny_model, token_ids):
    base = tiny_model(num_memory_blocks=0)
    llama, places = llama_with_the_weights_of(base), torch.arange(token_ids.shape[1])[None] + 3
    given = token_ids, torch.ones_like(token_ids), places, None, None
    ours, theirs = base.model(*given, True), llama.model(*given, use_cache=True)  # as its decorators want
    assert torch.equal(ours.last_hidden_state, theirs.last_hidden_state)
    assert ours.past_key_values is not None
