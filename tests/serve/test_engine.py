"""The engine on a CPU: the tokens that transformers generates, streamed, stopped and drawn."""

import gc

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tide_lm.compress.pack import pack
from tide_lm.model import TideConfig, TideForCausalLM
from tide_lm.serve import Engine, Sampling
from tide_lm.spec.form import Form

SIZES = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 40,
    "initializer_range": 0.2,
}
PROMPTS = [[5, 6, 7], [9], [1, 2, 3, 4, 5, 6]]


def tide(**changes) -> TideForCausalLM:
    torch.manual_seed(0)
    return TideForCausalLM(TideConfig(**SIZES | {"num_memory_blocks": 3} | changes)).eval()


def longrope() -> LlamaForCausalLM:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_theta": 1e4}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 20, **factors}
    return LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=rope))


@pytest.fixture(scope="module")
def model() -> TideForCausalLM:
    return tide()


def expected(model, prompt: list[int], tokens: int, **options) -> list[int]:
    ends = {"eos_token_id": None, "pad_token_id": 0}
    out = model.generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, **ends, **options)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_memory_blocks": 0},
        {"memory_values": True},
        {"memory_values": True, "memory_pair_rows": 37, "num_memory_blocks": 4},
    ],
    ids=str,
)
def test_prompts_of_any_length_go_on_as_transformers_has_it(changes):
    model = tide(**changes)
    steps = list(Engine(model, batch=4).generate(PROMPTS, 12))
    assert [list(tokens) for tokens in zip(*steps, strict=True)] == [
        expected(model, prompt, 12) for prompt in PROMPTS
    ]


@pytest.mark.parametrize("pairs", [0, 37])
@pytest.mark.parametrize("opaque", [False, True])
def test_without_memory_layers_get_none_of_it(opaque, pairs):
    model = tide(memory_values=True, num_memory_blocks=4, memory_pair_rows=pairs)
    if opaque:
        model.register_forward_hook(lambda *_: None)  # so that the model's own forward makes each step
    steps = list(Engine(model, batch=3, memory=False).generate(PROMPTS, 12))
    alone = [expected(model, prompt, 12, drop_memory_layers=[0, 1]) for prompt in PROMPTS]
    assert [list(tokens) for tokens in zip(*steps, strict=True)] == alone
    assert alone != [expected(model, prompt, 12) for prompt in PROMPTS]
    bare = tide(num_memory_blocks=0)
    assert next(Engine(bare, memory=False).generate([[9]], 1)) == expected(bare, [9], 1)


def test_a_llama_is_generated_with_as_well():
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    assert [step[0] for step in Engine(llama).generate([[3, 4]], 9)] == expected(llama, [3, 4], 9)


@pytest.mark.parametrize("form", [Form(4), Form(8, rank=0.5)], ids=str)
@pytest.mark.parametrize("place", ["device", "cpu", "store"])
@pytest.mark.parametrize("pairs", [0, 37], ids=["", "pairs"])
def test_packed_rows_are_found_wherever_they_are(tmp_path, place, form, pairs):
    pack(tide(num_memory_blocks=4, memory_pair_rows=pairs), tmp_path / "packed", form)
    packed = TideForCausalLM.from_pretrained(tmp_path / "packed", memory=place).eval()
    steps = list(Engine(packed, batch=3).generate(PROMPTS, 8))
    assert [step[2] for step in steps] == expected(packed, PROMPTS[2], 8)


def test_a_sequence_ends_with_a_token_to_stop_at_and_others_go_on(model):
    whole = [expected(model, prompt, 12) for prompt in PROMPTS]
    stop = whole[1][4]
    steps = list(Engine(model, batch=3).generate(PROMPTS, 12, stop=[stop]))
    for number, tokens in enumerate(whole):
        end = tokens.index(stop) + 1 if stop in tokens else len(tokens)
        told = [step[number] for step in steps]
        assert told == tokens[:end] + [None] * (len(steps) - end)
    assert len(list(Engine(model).generate([PROMPTS[1]], 12, stop=[stop]))) == whole[1].index(stop) + 1


def test_a_generation_ends_when_it_is_left_or_another_is_begun(model):
    engine = Engine(model)
    begun = engine.generate([[5, 6, 7]], 12)
    first = next(begun)
    assert next(engine.generate([[5, 6, 7]], 12)) == first
    with pytest.raises(ValueError, match="another was begun"):
        next(begun)
    begun.close()
    assert [step[0] for step in engine.generate([[9]], 12)] == expected(model, [9], 12)


def test_positions_stay_exact_in_a_model_that_was_cast(model):
    cast = tide().to(torch.bfloat16)
    assert cast.model.rotary_emb.inv_freq.dtype == torch.bfloat16
    Engine(cast)
    assert torch.equal(cast.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


def test_rows_are_not_read_for_tokens_that_nothing_follows(tmp_path, model):
    pack(model, tmp_path / "packed", Form(4))
    packed = TideForCausalLM.from_pretrained(tmp_path / "packed", memory="store", memory_cache_bytes=0).eval()
    list(Engine(packed).generate([[5, 6]], 1))
    assert packed.model.memory.counters.misses == 2


def test_a_hundred_generations_hold_no_more_tensors_than_one(model):
    engine = Engine(model)

    def tensors() -> int:
        gc.collect()
        return sum(type(one) is torch.Tensor for one in gc.get_objects())

    list(engine.generate([[1, 2]], 3, Sampling(1.0, top_k=5, seed=0)))
    before = tensors()
    for number in range(100):
        generation = engine.generate([[1, 2]], 3, Sampling(1.0, top_k=5, seed=number))
        next(generation)
        generation.close()
    assert tensors() <= before


def test_steps_of_the_last_few_kinds_of_sampling_are_kept(model):
    engine = Engine(model)
    kinds = [engine.decoder(Sampling(1.0 + number)) for number in range(9)]
    assert len(engine._decoders) < len(kinds)
    assert engine.decoder(Sampling(9.0, seed=1)) is kinds[-1]


def test_a_seed_draws_the_same_tokens_again_and_no_seed_others_each_time(model):
    engine = Engine(model)
    first, again, other, one, two = (
        list(engine.generate([[1, 2]], 12, Sampling(1.0, seed=seed))) for seed in (0, 0, 3, None, None)
    )
    assert first == again
    new = list(Engine(model).generate([[1, 2]], 12, Sampling(1.0)))
    newer = list(Engine(model).generate([[1, 2]], 12, Sampling(1.0)))
    assert len({str(drawn) for drawn in (first, other, one, two, new, newer)}) == 6


def test_a_step_looks_at_all_positions_and_no_more_than_the_cache_has(model):
    forward = Engine(tide(max_position_embeddings=1000)).decoder(Sampling()).forward
    reaches = [forward.reach(longest) for longest in (1, 256, 257, 512, 513, 1000)]
    assert reaches == [256, 256, 512, 512, 1000, 1000]


def test_prompts_and_numbers_may_be_tensors_and_arrays(model):
    whole = expected(model, [1, 2, 3], 5)
    sampling = Sampling(0.0, seed=np.int64(3))
    first = Engine(model).generate(torch.tensor([[1, 2, 3]]), np.int64(5), sampling)
    assert [step[0] for step in first] == whole
    stop = torch.tensor([whole[2]])
    stopped = [step[0] for step in Engine(model).generate([[1, 2, 3]], 5, stop=stop)]
    assert stopped == whole[: whole.index(whole[2]) + 1]


def test_an_engine_may_be_made_where_nothing_is_recorded():
    model = tide()
    with torch.inference_mode():
        engine = Engine(model)
    assert [step[0] for step in engine.generate([[1, 2, 3]], 5)] == expected(model, [1, 2, 3], 5)
    model.train()(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()


def test_an_engine_is_told_apart_from_a_model_that_has_changed():
    model = tide()
    engine = Engine(model)
    model.model.norm.weight.data = model.model.norm.weight.data.clone()
    with pytest.raises(ValueError, match="weights were moved or replaced: make a new Engine"):
        engine.generate([[1]])


def test_the_cache_is_used_to_its_end_and_no_further(model):
    engine = Engine(model, length=10)
    assert [step[0] for step in engine.generate([[1, 2, 3, 4]])] == expected(model, [1, 2, 3, 4], 6)
    with pytest.raises(ValueError, match="4 tokens, which with 7 new are more than the cache's 10"):
        engine.generate([[1, 2, 3, 4]], 7)
    with pytest.raises(ValueError, match="10 tokens, which with 1 new"):
        engine.generate([[1] * 10])


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda model: Engine(model, length=41), "length is 41: this model knows 2 to 40"),
        (lambda model: Engine(model, batch=0), "batch is 0"),
        (lambda model: Engine(tide(attn_implementation="eager")), "attention is 'eager'"),
        (lambda model: Engine(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1))), "type 'gpt2'"),
        (lambda model: Engine(model).generate([[1], [2]]), "2 prompts: this engine takes 1 to 1"),
        (lambda model: Engine(model).generate([]), "0 prompts"),
        (lambda model: Engine(model).generate([[]]), "prompt 0 is empty"),
        (lambda model: Engine(model).generate([[1, 101]]), "token id 101 of prompt 0"),
        (lambda model: Engine(model).generate([[-1]]), "token id -1 of prompt 0"),
        (lambda model: Engine(model).generate([[1]], 0), "max_new_tokens is 0"),
        (
            lambda model: Engine(model).generate([[1]], 3.0),
            "max_new_tokens is 3.0: it must be a whole number",
        ),
        (lambda model: Engine(model).generate([[1]], stop=5), r"stop is 5: it must be a list of token ids"),
        (lambda model: Engine(model).generate([[1]], sampling=0.8), "sampling is 0.8: give a Sampling"),
        (lambda model: Engine(model).generate([[1]], 40), "give a shorter prompt; the model knows no more"),
        (lambda model: Engine(model, 10).generate([[1]], 10), "a larger length, up to the model's 40"),
        (lambda model: Sampling(1.0, top_k=2.5), "top_k is 2.5: it must be a whole number"),
        (lambda model: Engine(model).generate([1, 2]), "a list of lists of token ids"),
        (lambda model: Engine(model).generate([[1.5]]), "a list of lists of token ids"),
        (lambda model: Engine(model.model), "this is a TideModel: give a causal model"),
        (lambda model: Engine(longrope(), batch=2), "with positions of type longrope it must be 1"),
        (lambda model: Sampling(1.0, seed=2**64), "seed is 18446744073709551616"),
        (lambda model: Sampling(-1.0), "temperature is -1.0"),
        (lambda model: Sampling(float("nan")), "temperature is nan"),
        (lambda model: Sampling(1.0, top_k=0), "top_k is 0"),
        (lambda model: Sampling(1.0, top_p=0.0), "top_p is 0.0"),
        (lambda model: Sampling(1.0, top_p=1.5), "top_p is 1.5"),
    ],
)
def test_what_cannot_be_is_told(model, call, told):
    with pytest.raises(ValueError, match=told):
        call(model)
