"""Tokenizers by folder, trained, and Llama 3's."""

import copy
import hashlib
import importlib.util

import pytest

from tide_lm.data import tokenizers

TEXTS = ["every layer knows the token beneath the context"] * 4


def test_a_trained_tokenizer_begins_with_its_special_tokens():
    tokenizer = tokenizers.train(TEXTS, 270)
    assert tokenizers.vocab_size(tokenizer) == len(tokenizer) == 270
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.convert_ids_to_tokens([0, 1]) == ["<|begin_of_text|>", "<|end_of_text|>"]
    text = "Any bytes: ä三\r\n\t"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_training_twice_gives_the_same_tokenizer():
    first, second = (tokenizers.fingerprint(tokenizers.train(TEXTS, 300)) for _ in range(2))
    assert first == second != tokenizers.fingerprint(tokenizers.train(TEXTS, 280))


def test_a_vocabulary_smaller_than_the_bytes_is_refused():
    with pytest.raises(ValueError, match="vocab_size is 257"):
        tokenizers.train(TEXTS, 257)


def test_the_fingerprint_is_the_sha256_of_the_saved_file(tokenizer, tmp_path):
    tokenizer, wanted = copy.deepcopy(tokenizer), tokenizers.fingerprint(tokenizer)
    tokenizer(["cut", "and padded, too"], truncation=True, max_length=2, padding=True)
    assert tokenizers.fingerprint(tokenizer) == wanted
    tokenizer.save_pretrained(tmp_path)
    loaded = tokenizers.load(str(tmp_path))
    assert tokenizers.fingerprint(loaded) == wanted
    loaded.save_pretrained(tmp_path)
    assert hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest() == wanted


def test_ids_may_have_gaps(tokenizer, tmp_path):
    saved = tmp_path / "tokenizer.json"
    tokenizer.save_pretrained(tmp_path)
    text = saved.read_text(encoding="utf-8")
    last = max(tokenizer.get_vocab().values())
    saved.write_text(text.replace(f": {last}\n", f": {last + 40}\n"), encoding="utf-8")
    loaded = tokenizers.load(str(tmp_path))
    assert tokenizers.vocab_size(loaded) == last + 41 > len(loaded)


@pytest.mark.parametrize("name", ["no/such-tokenizer", "no-such-folder"])
def test_an_unknown_tokenizer_is_named(name):
    with pytest.raises(ValueError, match=f"'{name}'.*folder"):
        tokenizers.load(name)


def test_a_tokenizer_that_was_fetched_without_a_model_is_loaded_from_the_cache(
    tokenizer, tmp_path, monkeypatch
):
    model = tmp_path / "models--me--mine"
    tokenizer.save_pretrained(model / "snapshots" / "1")
    for name, content in ("refs/main", "1"), (".no_exist/1/config.json", ""):
        (model / name).parent.mkdir(parents=True)
        (model / name).write_text(content)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert tokenizers.fingerprint(tokenizers.load("me/mine")) == tokenizers.fingerprint(tokenizer)


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"since the folder has no tokenizer\.json: give one that has"):
        tokenizers.load(str(tmp_path))


def test_llama3_without_its_package_names_the_install_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llama-models"):
        tokenizers.load("llama3")


@pytest.mark.skipif(not importlib.util.find_spec("llama_models"), reason="llama-models is not installed")
def test_llama3_is_the_tokenizer_of_llama_3():
    tokenizer = tokenizers.load("llama3")
    assert tokenizer("Hello world!").input_ids == [9906, 1917, 0]
    assert tokenizers.vocab_size(tokenizer) == len(tokenizer) == 128_256
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (
        128000,
        128001,
        128004,
    )
    assert tokenizer.convert_tokens_to_ids(["<|eot_id|>", "<|reserved_special_token_245|>"]) == [
        128009,
        128255,
    ]
    assert tokenizer.decode([9906, 1917, 0]) == "Hello world!"
