"""Runs at the optimum: their names and settings, the split that stays unread, null models."""

import hashlib
import json
import lzma
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from studies import optimum, test_split
from studies.nulls import Pairs, PairsConfig, Reinjected, ReinjectedConfig, embedding_as_table
from studies.optimum import Tuned
from studies.optimum_summary import read
from tide_lm.model import TideConfig, TideForCausalLM

SIZES = {
    "vocab_size": 53,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_a_name_says_all_that_differs():
    run = Tuned.named("best, 0.004, batch 32, tokens 5")
    assert run == replace(Tuned("best", 0.004), batch=32, tokens=5.0)
    assert run.slug != Tuned.named("best, 0.004, batch 32").slug
    with pytest.raises(ValueError, match=r"worst, 0\.004.*ARM one of base"):
        Tuned.named("worst, 0.004")
    with pytest.raises(ValueError, match=r"'speed': set size, batch"):
        Tuned.named("best, 0.004, speed 3")


def test_rates_follow_the_peak_and_tokens_the_layers(prepared):
    config = Tuned.named("base, 0.008, beta2 0.99, tokens 2").config(prepared, gpu=False)
    assert (config.optim.max_lr, config.optim.min_lr, config.optim.warmup_lr) == (0.008, 0.0008, 0.00008)
    assert config.optim.beta2 == 0.99
    for size in ("6m", "small"):
        train = Tuned.named(f"base, 0.008, size {size}, tokens 2").config(prepared, gpu=False).train
        layers = TideForCausalLM(TideConfig.from_preset(f"base-{size}")).model.layers
        parameters = sum(weight.numel() for weight in layers.parameters())
        assert 0 <= 2 * parameters - 512 * train.batch * train.steps < 512 * train.batch


def test_the_runs_that_are_kept_are_all_of_arms_and_named_once():
    records = read(Path(optimum.__file__).parents[1] / "results" / "study" / "optimum.jsonl")
    runs = [Tuned.of(record) for record in records]
    assert {run.arm for run in runs} <= optimum.ARMS.keys()
    assert len(set(runs)) == len(runs)
    assert all(Tuned.named(run.name) == run for run in runs)
    assert all(512 * run.batch * run.steps == r["tokens"] for run, r in zip(runs, records, strict=True))


def test_what_is_in_the_split_is_not_trained_on(tmp_path, monkeypatch):
    for folder in ("corpus", "more"):
        (tmp_path / folder).mkdir()
        texts = [f"{folder} one", f"{folder} two"]
        lines = "\n".join(json.dumps({"id": text, "text": text}) for text in texts)
        (tmp_path / folder / "wiki_train.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    left_out = hashlib.sha256(b"more one").hexdigest()
    monkeypatch.setattr(test_split, "hashes", lambda: {left_out})
    found = [text for part in test_split.training(tmp_path) for _, text in part.documents()]
    assert found == ["corpus one", "corpus two", "more two"]


def test_the_split_is_listed_once_and_is_not_chosen_again(tmp_path):
    listed = json.loads(test_split.LISTED.read_text())["documents"]
    assert (
        len({document["sha256"] for document in listed})
        == len(listed)
        == len(test_split.hashes.__wrapped__())
    )
    with pytest.raises(SystemExit, match="not chosen again"):
        test_split.main(tmp_path)


@pytest.mark.parametrize("in_values", [False, True])
def test_a_reinjected_row_is_the_embeddings_and_nothing_at_scale_0(in_values):
    torch.manual_seed(0)
    model = Reinjected(ReinjectedConfig(**SIZES, num_memory_blocks=0, in_values=in_values)).eval()
    ids = torch.tensor([[3, 4, 5]])
    with_rows = model(ids).logits
    for layer in model.model.layers:
        layer.scale.data.zero_()
        if in_values:
            layer.value_scale.data.zero_()
    states = model.model(ids).last_hidden_state
    assert not torch.equal(model.lm_head(states), with_rows)
    embedded = model.model.embed_tokens(ids)
    row = embedded * torch.rsqrt(embedded.square().mean(-1, keepdim=True) + model.config.rms_norm_eps)
    model.model.layers[-1].scale.data.fill_(2.0)
    model.model.norm = torch.nn.Identity()
    added = model.model(ids).last_hidden_state
    model.model.layers[-1].scale.data.zero_()
    torch.testing.assert_close(added - model.model(ids).last_hidden_state, 2 * row)


def test_rows_of_pairs_are_of_the_token_and_the_one_before_it():
    torch.manual_seed(0)
    memory = Pairs(PairsConfig(**SIZES, num_memory_blocks=2, orders=[1, 2])).model.memory
    rows = memory(torch.tensor([[3, 4, 3, 4, 9, 4]])).rows_UJD
    assert torch.equal(rows[1, 0], rows[5, 0])  # by the token alone
    assert torch.equal(rows[1, 1], rows[3, 1])  # after the same token
    assert not torch.equal(rows[1, 1], rows[5, 1])


def test_an_embedding_that_learns_as_a_table_does_has_a_group_of_its_own():
    embedding, other = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([embedding, other], weight_decay=0.1)
    embedding_as_table(optimizer, embedding, 5.0)
    first, second = optimizer.param_groups
    assert first["params"] == [other]
    assert (second["params"], second["weight_decay"], second["lr_multiple"]) == ([embedding], 0.0, 5.0)


@pytest.fixture
def with_test_split(prepared, tmp_path):
    """Prepared data with two documents of a test split."""
    data = tmp_path / "data"
    shutil.copytree(prepared, data)
    text = "It was a dark night, and nobody was there to see it. " * 10
    documents = [{"id": "enwiki-1", "text": text}, {"id": "book-a/b", "text": f"{text}\n\nII\n\n{text}"}]
    (data / "test_split.jsonl").write_text("".join(json.dumps(d) + "\n" for d in documents))
    return data


def test_a_stopped_run_goes_on_and_then_reads_the_test_split(with_test_split, tmp_path):
    run = Tuned.named("best, 0.004, size tiny, tokens 0.02, test")
    places = with_test_split, tmp_path / "scratch", tmp_path / "kept"
    heard = []

    def stop(line):
        if line.startswith("step"):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        optimum.train_kept(run, *places, stop)
    assert not list(places[2].glob("*"))
    optimum.train_kept(run, *places, heard.append)
    assert any(line.startswith("resumed from step") for line in heard)
    record = json.loads((places[2] / f"{run.slug}.json").read_text())
    assert Tuned.of(record) == run
    assert record["tokens"] == run.steps * run.batch * 64
    assert [piece[0] for piece in record["test"]] == ["enwiki-1", "book-a/b", "book-a/b"]
    assert record["test"][0][3] == len("It was a dark night, and nobody was there to see it. " * 10)
    assert all(0 < nats / tokens < 20 for _, nats, tokens, _ in record["test"])
    assert not (places[1] / run.slug).exists()


def test_text_of_another_tokenizer_is_beside_the_usual_one():
    run = Tuned.named("base untied, 0.004, size 6m-llama3, beta2 0.99")
    assert run.text(Path("data/optimum")) == Path("data/optimum-llama3")
    assert Tuned.named("base, 0.004").text(Path("data/optimum")) == Path("data/optimum")
    assert run.steps == Tuned.named("base, 0.004").steps
    assert Tuned.named(run.name) == run
