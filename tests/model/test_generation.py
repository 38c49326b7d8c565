"""`generate` in all its forms gives what full recomputation gives."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tide_lm.model import TideForCausalLM

NEW = 12


KINDS = {
    "": {},
    "rows in values": {"memory_values": True},
    "pairs": {"memory_values": True, "memory_pair_rows": 19, "num_memory_blocks": 4},
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def model(request, tiny_model):
    """No end token: every test gets as many tokens as it asks for."""
    model = tiny_model(eos_token_id=None, **request.param)
    model.generation_config.eos_token_id = None
    return model


def greedy_without_cache(model, ids: torch.Tensor) -> torch.Tensor:
    """The whole sequence anew for every token, one row at a time."""
    for _ in range(NEW):
        logits = model(ids, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return ids


def generate(model, ids: torch.Tensor, **options) -> torch.Tensor:
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, **options}
    return model.generate(ids, max_new_tokens=NEW, **options)


def test_greedy_with_a_cache_equals_recomputation(model, token_ids):
    expected = greedy_without_cache(model, token_ids)
    assert torch.equal(generate(model, token_ids), expected)
    assert torch.equal(generate(model, token_ids, use_cache=False), expected)


def test_memory_matters_to_what_is_generated(model, token_ids):
    """Else the tests here would pass for a model that ignores its tables."""
    plain = generate(model, token_ids)
    assert not torch.equal(plain, generate(model, token_ids, drop_memory_layers=[0, 1]))


def test_memory_is_looked_up_once_a_forward_and_only_for_new_tokens(model, token_ids):
    looked_up = []
    model.model.memory.register_forward_hook(lambda module, args, output: looked_up.append(args[0].shape))
    generate(model, token_ids)
    assert looked_up == [(2, 9)] + [(2, 1)] * (NEW - 1)


def test_left_padded_batches_equal_each_row_alone(model):
    rows = [torch.tensor([[5, 9, 30, 7, 12]]), torch.tensor([[40, 3]]), torch.tensor([[8, 8, 8]])]
    width = max(row.shape[1] for row in rows)
    ids = torch.full((len(rows), width), model.config.pad_token_id)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, width - row.shape[1] :] = row
        mask[i, width - row.shape[1] :] = 1
    batch = generate(model, ids, attention_mask=mask)
    for i, row in enumerate(rows):
        assert torch.equal(batch[i, width:], greedy_without_cache(model, row)[0, row.shape[1] :])


def test_a_static_cache_gives_the_same_tokens(model, token_ids):
    static = generate(model, token_ids, cache_implementation="static", disable_compile=True)
    assert torch.equal(static, generate(model, token_ids))


def test_beams_with_a_cache_equal_beams_without(model, token_ids):
    with_cache = generate(model, token_ids, num_beams=3)
    assert torch.equal(with_cache, generate(model, token_ids, num_beams=3, use_cache=False))


def test_sampling_follows_the_seed(model, token_ids):
    def sample(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return generate(model, token_ids, do_sample=True, top_k=20, temperature=1.5)

    assert torch.equal(sample(1), sample(1))
    assert not torch.equal(sample(1), sample(2))


def test_assisted_decoding_gives_the_greedy_tokens(model, tiny_config, token_ids):
    torch.manual_seed(11)
    assistant = TideForCausalLM(
        tiny_config(num_hidden_layers=1, num_memory_blocks=1, eos_token_id=None)
    ).eval()
    assistant.generation_config.eos_token_id = None
    row = token_ids[:1]
    assert torch.equal(generate(model, row, assistant_model=assistant), generate(model, row))


def test_a_chunked_prefill_equals_one_pass(model, token_ids):
    whole = model(token_ids).logits
    first = model(token_ids[:, :4], use_cache=True)
    more = {"previous_ids": token_ids[:, 3:-1]} if model.config.memory_pair_rows else {}
    rest = model(token_ids[:, 4:], past_key_values=first.past_key_values, use_cache=True, **more)
    chunked = torch.cat([first.logits, rest.logits], dim=1)
    assert torch.allclose(chunked, whole, atol=1e-5)


@pytest.mark.torchrun
@pytest.mark.parametrize("values", [False, True], ids=["", "rows in values"])
def test_two_processes_split_a_model_with_tensor_parallelism(tiny_model, tmp_path, values):
    tiny_model(vocab_size=54, memory_values=values).save_pretrained(tmp_path)
    script = Path(__file__).parent / "tensor_parallel.py"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            script,
            tmp_path,
        ],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal on rank") == 2


def test_a_folder_is_a_text_generation_pipeline(tiny_model, tokenizer, tmp_path):
    from transformers import pipeline

    model = tiny_model(vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    pipe = pipeline("text-generation", model=str(tmp_path), device="cpu")
    assert type(pipe.model) is TideForCausalLM
    (answer,) = pipe("every layer knows", max_new_tokens=5, do_sample=False)
    ids = tokenizer("every layer knows", return_tensors="pt").input_ids
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
    assert answer["generated_text"] == tokenizer.decode(expected[0], skip_special_tokens=True)
