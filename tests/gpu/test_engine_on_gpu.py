"""The engine on a GPU: its kernel against the model, wherever rows are, and steps of several sequences."""

import copy
import dataclasses
import gc

import pytest
import torch

from tide_lm import TideConfig, TideForCausalLM
from tide_lm.compress.pack import pack
from tide_lm.serve import Engine, Sampling
from tide_lm.spec import presets
from tide_lm.spec.form import Form

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
SIZES = {
    "vocab_size": 5003,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_memory_blocks": 8,
    "memory_gain_init": 0.5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def model_of(seed: int = 0, **changes) -> TideForCausalLM:
    torch.manual_seed(seed)
    model = TideForCausalLM(TideConfig(**SIZES | {"initializer_range": 0.05} | changes))
    return model.to(torch.bfloat16).cuda().eval()


def generated(engine: Engine, prompts, tokens: int, **options) -> list[list[int]]:
    return [list(one) for one in zip(*engine.generate(prompts, tokens, **options), strict=True)]


@torch.no_grad()
def check_tokens(
    model: TideForCausalLM, prompt: list[int], tokens: list[int], logits_TV: torch.Tensor | None = None
) -> None:
    """Logits are as good as the model's in bfloat16, and tokens the exact model's wherever that is clear."""
    ids = torch.tensor([prompt + tokens[:-1]], device="cuda")
    exact = copy.deepcopy(model).float()(ids).logits[0, len(prompt) - 1 :]
    rough = model(ids).logits[0, len(prompt) - 1 :].float()
    if logits_TV is not None:
        error = (logits_TV - exact[1:]).norm() / exact[1:].norm()
        assert error <= 1.5 * (rough - exact).norm() / exact.norm()
    top = exact.topk(2).values
    clear = (top[:, 0] - top[:, 1]) > 2 * (rough - exact).abs().amax(-1)
    assert clear.float().mean() > 0.1
    assert torch.equal(exact.argmax(-1)[clear], torch.tensor(tokens, device="cuda")[clear])


def with_logits(engine: Engine, prompt: list[int], tokens: int) -> tuple[list[int], torch.Tensor]:
    """Tokens, and the logits of all but the first, which is the prompt's."""
    decoder, found, seen = engine.decoder(Sampling()), [], []
    generation = engine.generate([prompt], tokens)
    found.append(next(generation)[0])
    generation.close()
    engine.cache.place_B.fill_(len(prompt))
    engine.cache.ids_B.fill_(found[0])
    for number in range(1, tokens):
        if engine.forward.waits:
            engine.forward.look_up(engine.cache.ids_B.tolist())
        decoder.step(len(prompt) + number)
        found.append(int(engine.cache.ids_B))
        seen.append(engine.forward.kernel.logits_V.clone())
    return found, torch.stack(seen)


@pytest.mark.parametrize(
    ("seed", "changes"),
    [
        (0, {}),
        (1, {"num_memory_blocks": 0}),
        (2, {"num_memory_blocks": 24, "memory_gain_init": 5.0}),
        (3, {"memory_values": True, "memory_value_scale": 5.0}),
        (4, {"memory_values": True, "num_memory_blocks": 3, "vocab_size": 101}),
        (5, {"num_key_value_heads": 8, "tie_word_embeddings": True}),
        (6, {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128}),
    ],
)
def test_the_kernel_gives_the_models_tokens(seed, changes):
    model = model_of(seed, **changes)
    engine = Engine(model)
    assert engine.why_not_fused is None
    tokens, logits_TV = with_logits(engine, [5, 6, 7, 8], 256)
    check_tokens(model, [5, 6, 7, 8], tokens, logits_TV)
    assert generated(engine, [[5, 6, 7, 8]], 256) == [tokens]


@pytest.mark.parametrize("place", ["device", "cpu", "store"])
@pytest.mark.parametrize("form", [Form(16), Form(4), Form(3), Form(8, rank=0.5)], ids=str)
def test_the_kernel_finds_packed_rows_wherever_they_are(tmp_path, form, place):
    pack(model_of().float().cpu(), tmp_path / "packed", form)
    options = {"memory": place, "memory_cache_bytes": 1 << 16, "dtype": torch.bfloat16}
    model = TideForCausalLM.from_pretrained(tmp_path / "packed", **options).cuda().eval()
    engine = Engine(model)
    assert engine.why_not_fused is None
    tokens, logits_TV = with_logits(engine, [5, 6, 7, 8], 64)
    check_tokens(model, [5, 6, 7, 8], tokens, logits_TV)
    assert generated(engine, [[5, 6, 7, 8]], 64) == [tokens]


@pytest.mark.parametrize("preset", ["tiny", "small", "medium", "350m", "750m", "1b", "3b"])
def test_the_kernel_is_for_all_presets(preset):
    shape = dataclasses.replace(presets.get(f"tide-24e-{preset}").model, num_hidden_layers=2, vocab_size=1001)
    torch.manual_seed(0)
    config = TideConfig(**shape.to_transformers() | {"initializer_range": 0.05, "eos_token_id": None})
    model = TideForCausalLM(config).to(torch.bfloat16).cuda().eval()
    engine = Engine(model)
    assert engine.why_not_fused is None
    tokens, logits_TV = with_logits(engine, [5, 6, 7, 8], 64)
    check_tokens(model, [5, 6, 7, 8], tokens, logits_TV)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_memory_blocks": 0, "num_key_value_heads": 8},
        {"memory_values": True, "num_memory_blocks": 4, "tie_word_embeddings": True},
    ],
)
def test_several_sequences_have_the_models_tokens(changes):
    model = model_of(**changes)
    prompts = [[5, 6, 7], [9], list(range(300))]
    for prompt, tokens in zip(prompts, generated(Engine(model, batch=4), prompts, 64), strict=True):
        check_tokens(model, prompt, tokens)


@pytest.mark.parametrize("place", ["device", "cpu", "store"])
def test_several_sequences_find_packed_rows(tmp_path, place):
    pack(model_of().float().cpu(), tmp_path / "packed", Form(4))
    model = TideForCausalLM.from_pretrained(tmp_path / "packed", memory=place, dtype=torch.bfloat16)
    prompts = [[5, 6, 7], [9]]
    for prompt, tokens in zip(prompts, generated(Engine(model.cuda(), batch=2), prompts, 32), strict=True):
        check_tokens(model, prompt, tokens)


@pytest.mark.parametrize("fused", [True, False])
def test_a_seed_gives_the_same_tokens_again(fused):
    engine = Engine(model_of(), fused=fused)
    drawn = [
        generated(engine, [[5, 6]], 32, sampling=Sampling(1.0, top_k=50, top_p=0.9, seed=seed))
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_generations_that_are_left_do_not_grow_memory():
    engine = Engine(model_of())
    for number in range(101):
        if number == 1:
            gc.collect()
            before = torch.cuda.memory_allocated()
        generation = engine.generate([[1, 2, 3]], 50)
        for _ in range(number % 7 + 1):
            next(generation)
        generation.close()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before


def test_tokens_stay_the_same_when_the_kernels_tags_begin_again():
    """After 65,536 layers, which are 16,384 tokens of 4."""
    engine = Engine(model_of())
    first = generated(engine, [[5, 6]], 500)
    assert all(generated(engine, [[5, 6]], 500) == first for _ in range(40))


def test_the_cache_is_used_to_its_end():
    engine = Engine(model_of(), length=300)
    assert len(generated(engine, [[1, 2, 3, 4]], 296)[0]) == 296
    with pytest.raises(ValueError, match="more than the cache's 300"):
        engine.generate([[1, 2, 3, 4]], 297)


def test_a_store_serves_one_kind_of_sampling_after_the_other(tmp_path):
    pack(model_of().float().cpu(), tmp_path / "packed", Form(4))
    options = {"memory": "store", "memory_cache_bytes": 1 << 14, "dtype": torch.bfloat16}
    engine = Engine(TideForCausalLM.from_pretrained(tmp_path / "packed", **options).cuda().eval())
    first = generated(engine, [[5, 6, 7]], 40)
    drawn = generated(engine, [[5, 6, 7]], 40, sampling=Sampling(1.0, seed=1))
    assert generated(engine, [[5, 6, 7]], 40) == first
    assert generated(Engine(engine.model), [[5, 6, 7]], 40) == first
    assert generated(engine, [[5, 6, 7]], 40, sampling=Sampling(1.0, seed=1)) == drawn


def test_several_sequences_are_drawn():
    engine = Engine(model_of(), batch=3)
    sampling = Sampling(1.0, top_p=0.9, seed=1)
    first = generated(engine, [[5], [6, 7], [8]], 20, sampling=sampling)
    assert generated(engine, [[5], [6, 7], [8]], 20, sampling=sampling) == first
    assert first[0] != first[2]
