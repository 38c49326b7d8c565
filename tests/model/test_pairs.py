"""Rows for pairs of tokens: which row a pair has, and that every way to run a model finds it."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from tide_lm.analysis.tables import names
from tide_lm.compress.encode import Encoder, folded_rows
from tide_lm.compress.pack import pack
from tide_lm.model import TideForCausalLM
from tide_lm.model.loading import open_store
from tide_lm.model.pairs import pair_numbers, previous_ids
from tide_lm.spec.form import Form

PAIRS = {"num_memory_blocks": 4, "memory_pair_rows": 19, "memory_values": True}


def signed(number: int) -> int:
    """As 64 bits hold it."""
    number %= 2**64
    return number - 2**64 if number >= 2**63 else number


def number_of(token: int, previous: int, rows: int) -> int:
    mixed = token + 2 * 0x9E3779B1
    mixed = signed((mixed ^ mixed >> 15) * 0x85EBCA77 + previous * 0xC2B2AE3D)
    mixed = signed((mixed ^ mixed >> 17) * 0x27D4EB2F165667C5)
    return ((mixed ^ mixed >> 29) & 0x7FFFFFFF) % rows


@pytest.mark.parametrize("rows", [1, 19, 128_256])
def test_the_hash_is_the_one_that_models_were_trained_with(rows):
    generator = torch.Generator().manual_seed(0)
    ids, previous = torch.randint(128_256, (2, 300), generator=generator)
    expected = [number_of(*pair, rows) for pair in zip(ids.tolist(), previous.tolist(), strict=True)]
    assert pair_numbers(ids, previous, rows).tolist() == expected
    assert number_of(5, 6, 1000) == 162 and number_of(6, 5, 1000) == 324  # noqa: PT018


def test_the_hash_spreads_pairs_evenly():
    ids, previous = (grid.flatten() for grid in torch.meshgrid(*[torch.arange(400)] * 2, indexing="ij"))
    counts = pair_numbers(ids, previous, 1000).bincount(minlength=1000)
    assert counts.float().std() < 1.2 * counts.float().mean() ** 0.5


def test_half_of_the_blocks_are_the_tokens_and_half_the_pairs(tiny_model):
    memory = tiny_model(**PAIRS).model.memory
    memory.norm.weight.data.normal_()
    ids = torch.tensor([[3, 4, 3, 4, 9, 4]])
    assert memory.weight.shape == (53 + 19, 2, 32)
    rows = memory(ids).rows_UJD
    for place, (previous, token) in enumerate(zip([0, 3, 4, 3, 4, 9], ids[0].tolist(), strict=True)):
        own, pair = memory.weight[token], memory.weight[53 + number_of(token, previous, 19)]
        raw = torch.stack([own[0], pair[0], own[1], pair[1]])
        normed = raw * torch.rsqrt(raw.square().mean(-1, keepdim=True) + memory.norm.eps)
        expected = memory.norm.weight * normed
        torch.testing.assert_close(rows[place], expected, rtol=1e-4, atol=1e-6)


def test_what_goes_on_from_a_cache_needs_the_token_before(tiny_model, token_ids):
    model = tiny_model(**PAIRS)
    whole, first = model(token_ids).logits, model(token_ids[:, :4], use_cache=True)
    options = {"past_key_values": first.past_key_values, "use_cache": True}
    with pytest.raises(ValueError, match="pass previous_ids"):
        model(token_ids[:, 4:], **options)
    for wrong in token_ids[:, 3:4], token_ids[:, 3:-1].float(), token_ids[:, 3:-1] - 60:
        with pytest.raises(ValueError, match=r"previous_ids are of shape|is outside the vocabulary"):
            model(token_ids[:, 4:], previous_ids=wrong, **options)
    rest = model(token_ids[:, 4:], previous_ids=token_ids[:, 3:-1], **options)
    assert torch.allclose(torch.cat([first.logits, rest.logits], 1), whole, atol=1e-5)


def test_what_hides_the_token_before_is_refused(tiny_model, token_ids):
    model = tiny_model(**PAIRS)
    mask, options = torch.ones_like(token_ids), {"do_sample": False, "max_new_tokens": 3}
    with pytest.raises(ValueError, match="leave prefill_chunk_size out"):
        model.generate(token_ids, attention_mask=mask, prefill_chunk_size=4, **options)
    cache = model(token_ids[:, :4], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="give generate the whole text"):
        model.generate(token_ids[:, 4:], attention_mask=mask, past_key_values=cache, **options)
    with pytest.raises(ValueError, match="use generate, the engine"):
        model.generate_batch(token_ids.tolist())


def test_a_text_begins_where_its_positions_do(tiny_model):
    """As batches without padding have several in a row; their positions keep attention apart too."""
    model, texts = tiny_model(**PAIRS), [[5, 6, 7], [8, 9]]
    packed = torch.tensor([[*texts[0], *texts[1]]])
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    found = model(packed, position_ids=positions, use_cache=False).logits[0].split([3, 2])
    for text, logits in zip(texts, found, strict=True):
        assert torch.allclose(logits, model(torch.tensor([text])).logits[0], atol=1e-5)


def test_blocks_of_a_tokens_row_are_named_as_routers_number_them(tiny_config):
    assert names(tiny_config(**PAIRS)) == ["E", "M1", "M3"]
    assert names(tiny_config()) == ["E", "M1", "M2", "M3"]
    assert names(tiny_config(num_memory_blocks=0)) == ["E"]


def test_masked_tokens_are_before_no_token():
    ids, mask = torch.tensor([[7, 7, 5, 6]]), torch.tensor([[0, 0, 1, 1]])
    assert previous_ids(ids, mask).tolist() == [[0, 0, 0, 5]]
    assert previous_ids(ids).tolist() == [[0, 7, 7, 5]]


@pytest.mark.parametrize("size", [61, 40])
def test_rows_of_pairs_stay_when_the_vocabulary_changes(tiny_model, size):
    model, ids = tiny_model(**PAIRS), torch.tensor([[3, 4, 30, 4]])
    before, pairs = model.model.memory(ids).rows_UJD, model.model.memory.weight[53:].clone()
    model.resize_token_embeddings(size)
    assert torch.equal(model.model.memory.weight[size:], pairs)
    assert torch.equal(model.model.memory(ids).rows_UJD, before)


def test_a_saved_model_opens_with_the_same_rows_and_not_with_others(tiny_model, token_ids, tmp_path):
    model = tiny_model(**PAIRS)
    model.save_pretrained(tmp_path)
    opened = TideForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(opened(token_ids).logits, model(token_ids).logits)
    with pytest.raises(ValueError, match="memory_pair_rows"):
        TideForCausalLM.from_pretrained(tmp_path, memory_pair_rows=20)
    with pytest.raises(StrictDataclassError, match=r"num_memory_blocks is 3.*use an even number"):
        tiny_model(memory_pair_rows=19)
    with pytest.raises(StrictDataclassError, match="memory_pair_rows is -1"):
        tiny_model(num_memory_blocks=4, memory_pair_rows=-1)


@pytest.mark.parametrize("place", ["device", "cpu", "store"])
def test_packed_it_computes_the_same(tiny_model, token_ids, tmp_path, place):
    model = tiny_model(**PAIRS)
    model.model.memory.norm.weight.data.normal_()
    counts = torch.arange(53).numpy()
    pack(model, tmp_path / "packed", Form(16), counts)
    file = open_store(model.config.from_pretrained(tmp_path / "packed"), str(tmp_path / "packed"))
    assert file.section("counts").tolist() == [*range(53), *[0] * 19]
    packed = TideForCausalLM.from_pretrained(tmp_path / "packed", memory=place)
    assert torch.allclose(packed(token_ids).logits, model(token_ids).logits, atol=0.02)
    rows = packed.model.memory(token_ids).of_positions()
    assert torch.allclose(rows, model.model.memory(token_ids).rows_UJD, rtol=0.01)
    tokens = torch.tensor([5, 3, 5])
    assert torch.allclose(
        packed.model.memory.directions(tokens).sign(), model.model.memory.directions(tokens).sign()
    )
    with pytest.raises(ValueError, match="token id 53 is outside the vocabulary of 53"):
        packed(torch.tensor([[53]]))  # and not the first row of a pair


@pytest.mark.parametrize("rank", [1.0, 0.5])
def test_rows_are_folded_with_the_gains_of_their_kind(tiny_model, rank):
    memory = tiny_model(**PAIRS).model.memory
    memory.norm.weight.data.normal_()
    rows = torch.cat(list(folded_rows(memory)))
    normed = memory.weight * torch.rsqrt(memory.weight.square().mean(-1, keepdim=True) + memory.norm.eps)
    assert torch.allclose(rows[:53], normed[:53] * memory.norm.weight[::2], atol=1e-5)
    assert torch.allclose(rows[53:], normed[53:] * memory.norm.weight[1::2], atol=1e-5)
    encoder = Encoder(memory, Form(8, rank=rank), "0" * 64, torch.arange(53).numpy())
    assert encoder.header.vocab_size == len(rows) == sum(map(len, encoder.rows()))
    with pytest.raises(ValueError, match="72 counts of tokens: there must be 53"):
        Encoder(memory, Form(8), "0" * 64, torch.arange(72).numpy())
