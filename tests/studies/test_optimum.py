"""Runs at the optimum: their names and settings, tokens saved, the split that stays unread, null models."""

import hashlib
import json
import lzma
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from studies import optimum, test_split
from studies.nulls import Pairs, PairsConfig, Reinjected, ReinjectedConfig, embedding_as_table
from studies.optimum import Tuned, best_losses, beta2, read, tokens_needed
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


def test_tokens_to_a_loss_are_read_off_a_line_over_their_logarithm():
    losses = {100: 5.0, 400: 4.0, 1600: 3.5}
    assert tokens_needed(losses, 4.5) == pytest.approx(200)
    assert tokens_needed(losses, 3.75) == pytest.approx(800)
    assert tokens_needed(losses, 5.5) is None
    assert tokens_needed(losses, 3.0) is None


def test_an_arm_counts_at_its_best_rate_with_the_mean_of_its_seeds():
    def record(rate, loss, seed=0, batch=64, name="base", warmup=0.1, beta2=0.95, size="6m"):
        run = {"name": name, "size": size, "batch": batch, "tokens": 9, "peak_rate": rate, "seed": seed}
        return {**run, "warmup": warmup, "config": {"optim": {"beta2": beta2}}, "val_loss": loss}

    records = [record(1, 4.0), record(1, 4.2, seed=1), record(2, 4.5), record(2, None, seed=1)]
    records += [record(1, 3.0, batch=32), record(1, 3.0, name="best"), record(1, 3.0, warmup=0.05)]
    records += [record(1, 4.3, beta2=0.99), record(1, 3.0, size="small", batch=32)]
    assert best_losses(records, "base") == {9: pytest.approx(4.1)}


def test_the_runs_that_are_kept_are_all_of_arms_and_named_once():
    records = read(Path(optimum.__file__).parents[1] / "results" / "study" / "optimum.jsonl")
    assert {record["name"] for record in records} <= optimum.ARMS.keys()
    keys = [
        (
            *(record[key] for key in ("size", "name", "tokens", "batch", "warmup", "peak_rate", "seed")),
            beta2(record),
        )
        for record in records
    ]
    assert len(set(keys)) == len(keys)


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
    rows = memory(torch.tensor([[3, 4, 3, 4, 9, 4]])).rows_UKD
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
