"""Every parameter depends on the seed and on its own name alone; no construction allocates twice."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tide_lm.model import TideForCausalLM, TideModel
from tide_lm.model.initialisation import normal, normal_rows


class LargestAllocations(TorchDispatchMode):
    """Counts the storages of at least so many bytes that operations make or map outside meta."""

    def __init__(self, at_least: int) -> None:
        super().__init__()
        self.at_least, self.storages = at_least, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta and tensor.nbytes >= self.at_least:
                self.storages.add(tensor.untyped_storage().data_ptr())
        return result


def test_base_and_tide_of_one_seed_share_every_llama_weight(tiny_config):
    torch.manual_seed(7)
    tide = TideForCausalLM(tiny_config()).state_dict()
    torch.manual_seed(7)
    base = TideForCausalLM(tiny_config(num_memory_blocks=0)).state_dict()
    assert set(base) < set(tide)
    assert all(torch.equal(base[name], tide[name]) for name in base)


def test_another_seed_gives_other_weights(tiny_config):
    torch.manual_seed(7)
    first = TideForCausalLM(tiny_config())
    torch.manual_seed(8)
    second = TideForCausalLM(tiny_config())
    for name, parameter in first.named_parameters():
        drawn = "norm" not in name
        assert torch.equal(parameter, second.get_parameter(name)) != drawn, name


def test_no_two_parameters_are_drawn_alike(tiny_config):
    model = TideForCausalLM(tiny_config(tie_word_embeddings=False))
    starts = [tuple(p.flatten()[:4].tolist()) for name, p in model.named_parameters() if "norm" not in name]
    assert len(starts) == len(set(starts))


def test_values_have_the_spread_that_the_config_asks_for(tiny_config):
    model = TideForCausalLM(tiny_config(vocab_size=999, initializer_range=0.05, memory_gain_init=0.3))
    for weight in (model.model.memory.weight, model.model.embed_tokens.weight, model.lm_head.weight):
        assert weight.std().item() == pytest.approx(0.05, rel=0.05)
    assert model.model.embed_tokens.weight[model.config.pad_token_id].abs().max() == 0
    assert torch.all(model.model.memory.norm.weight == torch.tensor(0.3))
    assert all(torch.all(layer.input_layernorm.weight == 1) for layer in model.model.layers)


def test_a_table_drawn_in_shards_equals_the_table_drawn_whole():
    whole = normal_rows(3, "model.memory.weight", range(50), (4, 8))
    shards = [
        normal_rows(3, "model.memory.weight", range(a, b), (4, 8)) for a, b in ((0, 1), (1, 33), (33, 50))
    ]
    assert np.array_equal(np.concatenate(shards), whole)
    fewer_blocks = normal_rows(3, "model.memory.weight", range(50), (2, 8))
    assert np.array_equal(fewer_blocks, whole[:, :2])


def test_every_bit_of_the_seed_counts():
    draws = [normal(seed, "lm_head.weight", (4,)).tolist() for seed in (5, 2**63 + 5, 2**63 + 6, 2**64 - 1)]
    assert len({tuple(draw) for draw in draws}) == 4


def test_draws_are_pinned():
    """The values are part of what a seed means: a new numpy that changes them must be noticed."""
    assert normal(0, "lm_head.weight", (3,)).tolist() == pytest.approx(
        [0.6772100, 1.1999757, 0.4734340], abs=1e-6
    )
    assert normal_rows(0, "model.memory.weight", range(5, 6), (3,))[0].tolist() == pytest.approx(
        [0.0110750, 0.7573215, -1.0503817], abs=1e-6
    )


def test_precision_does_not_change_what_is_drawn(tiny_config):
    torch.manual_seed(3)
    single = TideForCausalLM(tiny_config())
    torch.manual_seed(3)
    half = TideForCausalLM._from_config(tiny_config(), dtype=torch.bfloat16)
    for name, parameter in half.named_parameters():
        assert torch.equal(parameter, single.get_parameter(name).to(torch.bfloat16)), name


def test_a_model_made_on_meta_is_initialised_like_any_other(tiny_config):
    torch.manual_seed(5)
    direct = TideForCausalLM(tiny_config())
    with torch.device("meta"):
        model = TideForCausalLM(tiny_config())
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    torch.manual_seed(5)
    model.init_weights()
    for name, tensor in {**direct.state_dict(), **dict(direct.named_buffers())}.items():
        assert torch.equal(model.get_parameter_or_buffer(name), tensor), name


def test_the_decoder_alone_draws_what_it_draws_under_a_head(tiny_config):
    torch.manual_seed(5)
    whole = TideForCausalLM(tiny_config())
    torch.manual_seed(5)
    decoder = TideModel(tiny_config())
    for name, parameter in decoder.named_parameters():
        assert torch.equal(parameter, whole.model.get_parameter(name)), name


def test_construction_and_loading_allocate_the_tables_once(tiny_config, tmp_path, monkeypatch):
    config = tiny_config(vocab_size=5_000)
    tables = config.vocab_size * config.num_memory_blocks * config.hidden_size * 4
    with LargestAllocations(tables) as built:
        model = TideForCausalLM(config)
    assert len(built.storages) == 1
    model.save_pretrained(tmp_path)
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # a dispatch mode sees its own thread alone
    with LargestAllocations(tables) as loaded:
        TideForCausalLM.from_pretrained(tmp_path)
    assert len(loaded.storages) == 1
    with LargestAllocations(tables) as nothing, torch.device("meta"):
        TideForCausalLM(config)
    assert not nothing.storages


def test_nothing_is_drawn_for_a_model_without_storage(tiny_config, monkeypatch):
    """accelerate's empty weights are made outside meta and moved there one by one."""
    from accelerate import init_empty_weights

    from tide_lm.model import initialisation, pretrained

    def refuse(*args):
        raise AssertionError("drawn for nothing")

    monkeypatch.setattr(pretrained, "normal", refuse)
    monkeypatch.setattr(initialisation, "normal_rows", refuse)
    with init_empty_weights():
        model = TideForCausalLM(tiny_config())
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.torchrun
def test_sharded_parameters_are_drawn_like_whole_ones(tmp_path):
    """Two processes, each with its shard of every parameter, as FSDP2 applies it from outside."""
    script = Path(__file__).parent / "sharded_initialisation.py"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal on rank") == 2


def test_tables_count_as_embeddings(tiny_model):
    model = tiny_model()
    embeddings = model.get_input_embeddings().weight.numel() + model.model.memory.weight.numel()
    assert model.num_parameters() - model.num_parameters(exclude_embeddings=True) == embeddings
    model.model.memory.requires_grad_(False)
    trainable = sum(p.numel() for n, p in model.named_parameters() if p.requires_grad and "embed" not in n)
    assert model.num_parameters(only_trainable=True, exclude_embeddings=True) == trainable


def test_llamas_own_layers_are_never_built(tiny_config, monkeypatch):
    """Only as many attention modules are made as the model keeps."""
    from transformers.models.llama import modeling_llama

    made = []
    build = modeling_llama.LlamaAttention.__init__
    monkeypatch.setattr(
        modeling_llama.LlamaAttention,
        "__init__",
        lambda self, *args, **kwargs: (made.append(self), build(self, *args, **kwargs))[1],
    )
    model = TideForCausalLM(tiny_config())
    assert made == [layer.self_attn for layer in model.model.layers]


def test_resizing_keeps_the_tables_in_step_with_the_vocabulary(tiny_model):
    model = tiny_model()
    before = model.model.memory.weight.detach().clone()
    model.resize_token_embeddings(60, mean_resizing=False)
    weight = model.model.memory.weight
    assert weight.shape[0] == model.get_input_embeddings().num_embeddings == model.config.vocab_size == 60
    assert weight.requires_grad
    assert torch.equal(weight[:53], before)
    ids = torch.tensor([[59, 54]])
    assert torch.isfinite(model(ids).logits).all()
    assert not torch.equal(model(ids).logits, model(ids, drop_memory_layers=[0, 1]).logits)

    model.resize_token_embeddings(20)
    assert torch.equal(model.model.memory.weight, before[:20])
    model.resize_token_embeddings(pad_to_multiple_of=16)
    assert len(model.model.memory.weight) == 32


def test_rows_added_by_resizing_do_not_depend_on_the_seed_of_the_process(tiny_config):
    """Else an adapter trained on a resized model would meet other rows when it is loaded."""

    def resized(seed: int, *sizes: int) -> torch.Tensor:
        model = TideForCausalLM(tiny_config())
        torch.manual_seed(seed)
        for size in sizes:
            model.resize_token_embeddings(size)
        return model.model.memory.weight[53:]

    assert torch.equal(resized(1, 60), resized(2, 60))
    assert torch.equal(resized(1, 60), resized(1, 56, 60))  # nor on the steps to a size
    assert resized(1, 60).std().item() == pytest.approx(0.02, rel=0.1)


def test_resizing_to_the_same_size_moves_nothing(tiny_model):
    model = tiny_model()
    before = model.model.memory.weight.data_ptr()
    model.resize_token_embeddings(53)
    assert model.model.memory.weight.data_ptr() == before
