"""Text as it comes from tokens."""

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tide_lm.serve.text import Text


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
