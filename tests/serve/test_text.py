"""Text as it comes from tokens."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from tide_lm.serve.generate import generate
from tide_lm.serve.sampling import Sampling
from tide_lm.serve.text import Text, generate_plainly


def tokenizer_of(words: list[str], decoder) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, words[0]))
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def taken(text: Text, ids: list[int]) -> list[str]:
    pieces = []
    for token in ids:
        text.ids.append(token)
        pieces.append(text.take())
    return [*pieces, text.take(last=True)]


def test_the_space_between_prompt_and_text_is_kept():
    tokenizer = tokenizer_of(["</s>", "▁The", "▁tide", "▁comes", "s"], decoders.Metaspace())
    text = Text(tokenizer, 2, frozenset([0]))
    assert taken(text, [3, 4, 3, 0]) == [" comes", "s", " comes", "", ""]
    assert str(text) == " comess comes"


def test_a_character_is_told_when_it_is_whole():
    tokenizer = tokenizer_of(["</s>", "a", "Ã", "©", "Ġb"], decoders.ByteLevel())
    text = Text(tokenizer, 1, frozenset([0]))
    assert taken(text, [2, 3, 4, 2]) == ["", "é", " b", "", "\ufffd"]


@pytest.mark.parametrize(
    ("sampling", "drawn"),
    [
        (Sampling(), {"do_sample": False}),
        (Sampling(0.7), {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 1.0}),
        (Sampling(0.7, 3, 0.9), {"do_sample": True, "temperature": 0.7, "top_k": 3, "top_p": 0.9}),
    ],
)
def test_transformers_draws_from_all_tokens_unless_it_is_told_otherwise(
    tiny_model, monkeypatch, sampling, drawn
):
    model, given = tiny_model(), {}
    monkeypatch.setattr(model, "generate", lambda ids, **named: given.update(named))
    generate_plainly(model, [5, 6], 9, sampling, frozenset([1]), lambda token: None)
    assert given["max_new_tokens"] == 9
    assert {
        name: given[name] for name in given if name in ("do_sample", "temperature", "top_k", "top_p")
    } == drawn


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, 3, 0.9, seed=1)], ids=str)
def test_the_model_of_the_caller_stays_as_it_was(tiny_model, tokenizer, sampling):
    model = tiny_model(vocab_size=len(tokenizer))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    texts = generate(model, tokenizer, ["every layer", "tide"], 5, sampling)
    assert [len(text.ids) for text in texts] == [5, 5]  # none of them a token that ends a text
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, before[name])


def test_the_text_of_a_model_that_is_no_llama_comes_token_by_token(tokenizer):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2)).eval()
    heard, steps = [], []
    model.register_forward_hook(lambda *_: steps.append(len(heard)))
    (text,) = generate(model, tokenizer, ["every layer"], 5, None, lambda *given: heard.append(given))
    assert "".join(part for _, part, _ in heard) == str(text)
    assert [ended for *_, ended in heard] == [False] * len(text.ids) + [True]
    assert steps == list(range(len(text.ids)))  # each token is told before the next step
    assert len(steps) > 1
