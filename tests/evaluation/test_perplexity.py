"""Perplexity against a few lines that compute it anew, whatever the batch, the padding and the length."""

import json
import lzma
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from tide_lm.data.frequency import FrequencyBins
from tide_lm.evaluation.perplexity import TextSize, Windows, cut, document_tokens, perplexity


@pytest.fixture
def text(tmp_path):
    from pydoc_data.topics import topics

    path = tmp_path / "text.jsonl"
    names = sorted(topics)[:6]
    path.write_text("".join(json.dumps({"text": topics[name][:600]}) + "\n" for name in names))
    return path


@pytest.fixture
def model(tiny_model, tokenizer):
    return tiny_model(vocab_size=len(tokenizer)).eval()


def plain_nats(model, tokenizer, path, size, stride) -> tuple[float, int]:
    """One window at a time, no padding, with the model's own logits."""
    nats, tokens = 0.0, 0
    for line in path.read_text().splitlines():
        ids = [tokenizer.bos_token_id, *tokenizer(json.loads(line)["text"]).input_ids]
        done = 1
        for begin in range(0, len(ids), stride):
            end = min(begin + size + 1, len(ids))
            window = torch.tensor([ids[begin:end]])
            with torch.no_grad():
                log_p = model(window[:, :-1]).logits[0].double().log_softmax(-1)
            for place in range(done, end):
                nats -= log_p[place - begin - 1, ids[place]].item()
                tokens += 1
            done = end
            if end == len(ids):
                break
    return nats, tokens


@pytest.mark.parametrize(("size", "stride"), [(32, 32), (32, 16), (31, 7), (400, 399)])
def test_it_equals_a_plain_computation(model, tokenizer, text, size, stride):
    nats, tokens = plain_nats(model, tokenizer, text, size, stride)
    found = perplexity(model, tokenizer, text, Windows(size, stride))
    assert found["tokens"] == tokens
    assert found["loss"] == pytest.approx(nats / tokens, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-6)
    texts = [json.loads(line)["text"] for line in text.read_text().splitlines()]
    assert found["words"] == sum(len(text.split()) for text in texts)
    assert found["bytes"] == sum(len(text.encode()) for text in texts)
    assert found["word_perplexity"] == pytest.approx(math.exp(nats / found["words"]), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / found["bytes"], rel=1e-6)


def test_batch_and_padding_change_nothing(model, tokenizer, text):
    found = [perplexity(model, tokenizer, text, Windows(64, 32, batch))["loss"] for batch in (1, 3, 64)]
    assert found == pytest.approx([found[0]] * 3, rel=1e-6)


def test_other_causal_models_are_measured_by_their_logits(tokenizer, text):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=32, n_layer=2, n_head=2)
    ).eval()
    nats, tokens = plain_nats(model, tokenizer, text, 48, 24)
    found = perplexity(model, tokenizer, text, Windows(48, 24))
    assert found["loss"] == pytest.approx(nats / tokens, rel=1e-6)


def test_rows_by_decile_weighted_by_count_give_the_total(model, tokenizer, text):
    counts = np.arange(len(tokenizer))
    bins = FrequencyBins.from_counts(counts, tokenizer)
    found = perplexity(model, tokenizer, text, Windows(64, 32), bins)
    total = sum(
        loss * tokens
        for loss, tokens in zip(found["loss_by_decile"], found["tokens_by_decile"], strict=True)
        if tokens
    )
    total += (found["unbinned"]["loss"] or 0) * found["unbinned"]["tokens"]
    assert total / found["tokens"] == pytest.approx(found["loss"], rel=1e-9)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 16, 17, 40])
@pytest.mark.parametrize(("size", "stride"), [(8, 8), (8, 3), (8, 1)])
@pytest.mark.parametrize("piece", [1, 5, 100])
def test_every_token_but_the_first_is_predicted_once(length, size, stride, piece):
    ids = np.arange(length)
    pieces = (ids[start : start + piece] for start in range(0, length, piece))
    predicted = []
    for window in cut(pieces, Windows(size, stride)):
        assert 2 <= len(window.ids) <= size + 1
        assert np.array_equal(np.diff(window.ids), np.ones(len(window.ids) - 1))
        predicted += window.ids[window.first :].tolist()
    assert predicted == list(range(1, length))


def test_a_text_shorter_than_a_window_and_a_wrong_stride_are_named(model, tokenizer, tmp_path):
    (tmp_path / "short.txt").write_text("A few words.")
    with pytest.raises(ValueError, match=r"short\.txt has \d+ tokens .*window of 64"):
        perplexity(model, tokenizer, tmp_path / "short.txt", Windows(64, 32))
    with pytest.raises(ValueError, match=r"stride is 9 .*window 8"):
        Windows(8, 9)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_text(tmp_path):
    """Read one document of 2 MB and one of 24 MB, in a process each."""
    code = """
import sys, torch
from tide_lm.data import tokenizers
import tide_lm.evaluation.perplexity as module
from tide_lm.model import TideConfig, TideForCausalLM
tokenizer = tokenizers.train(["The quick brown fox jumps over the lazy dog.\\n"], 400)
config = TideConfig(vocab_size=400, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                    num_attention_heads=1, num_memory_blocks=1)
model = TideForCausalLM(config).eval()
module.token_losses = lambda model, inputs, targets: torch.ones_like(targets, dtype=torch.float32)
module.perplexity(model, tokenizer, sys.argv[1], module.Windows(2048, 2048, 8))
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) // 1024)  # ru_maxrss would count what the parent held
"""
    peaks = []
    for size in (2, 24):
        path = tmp_path / f"{size}.txt"
        path.write_text("The quick brown fox jumps over the lazy dog.\n" * (size * 22_000))
        done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
    assert peaks[1] < peaks[0] + 20, peaks


def test_a_long_text_read_by_lines_has_the_tokens_of_the_whole(tokenizer, tmp_path):
    from pydoc_data.topics import topics

    text = "".join(topics[name] for name in sorted(topics))[:400_000]
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    size = TextSize()
    (document,) = document_tokens(str(tmp_path / "long.txt"), "text", tokenizer, size)
    pieces = list(document)
    assert len(pieces) > 2
    assert np.concatenate(pieces).tolist() == [tokenizer.bos_token_id, *tokenizer(text).input_ids]
    assert (size.words, size.bytes) == (len(text.split()), len(text.encode()))


def test_without_bos_a_document_begins_with_eos(model, tokenizer, text):
    from copy import deepcopy

    without = deepcopy(tokenizer)
    without.bos_token = None
    found = [perplexity(model, each, text, Windows(64, 32)) for each in (tokenizer, without)]
    assert found[0]["tokens"] == found[1]["tokens"]


def test_a_tokenizer_that_does_not_fit_and_a_broken_model_are_named(tiny_model, tokenizer, text):
    small = tiny_model(vocab_size=100).eval()
    with pytest.raises(ValueError, match=r"id \d+.* 100"):
        perplexity(small, tokenizer, text, Windows(64, 32))
    broken = tiny_model(vocab_size=len(tokenizer)).eval()
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="weights are damaged"):
        perplexity(broken, tokenizer, text, Windows(64, 32))


def test_wikitext_is_read_as_it_lies(model, tokenizer, shared_data, tmp_path):
    with lzma.open(shared_data / "wikitext/wikitext2_raw_test.txt.xz", "rt", encoding="utf-8") as file:
        text = file.read(20_000)
    packed = tmp_path / "text.txt.xz"
    with lzma.open(packed, "wt", encoding="utf-8") as file:
        file.write(text)
    (tmp_path / "plain.txt").write_text(text)
    found = [perplexity(model, tokenizer, path, Windows(64, 64)) for path in (packed, tmp_path / "plain.txt")]
    assert {result.pop("source") for result in found} == {str(packed), str(tmp_path / "plain.txt")}
    assert found[0] == found[1]
    assert found[0]["words"] == len(text.split())
