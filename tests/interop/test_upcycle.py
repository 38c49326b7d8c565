"""A Llama becomes a TIDE model that computes the same to the bit, and a Llama again."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch
from command import call, result_of, tide_lm
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from tide_lm.interop.upcycle import check_weights, open_source, strip, upcycle
from tide_lm.model import TideConfig, TideForCausalLM, streamed_tensors
from tide_lm.serve import Engine

IDS = torch.tensor([[1, 2, 3, 50, 4, 4, 7, 9], [0, 5, 52, 6, 8, 7, 1, 3]])
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
KINDS = {
    "llama 2": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "llama 3.2": {"tie_word_embeddings": True, "rope_parameters": LLAMA3},
    "wide heads": {"head_dim": 16, "tie_word_embeddings": True},
    "smollm": {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 48, "head_dim": 24},
}


def llama(**changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 53, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    model = LlamaForCausalLM(LlamaConfig(**sizes | heads | {"pad_token_id": 2} | changes)).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.normal_(1, 0.2)
    return model


def upcycled(folder, out, seed=0, **memory) -> TideForCausalLM:
    settings = {"num_memory_blocks": 4} | memory
    upcycle(open_source(str(folder)), out, settings, seed)
    return TideForCausalLM.from_pretrained(out).eval()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_same_to_the_bit_and_so_is_the_way_back(tmp_path, kind, dtype):
    llama(**KINDS[kind]).to(dtype).save_pretrained(tmp_path / "llama", max_shard_size="20KB")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "llama").eval()
    values = {"memory_values": True, "memory_value_scale": 5.0}
    for number, memory in enumerate([{}, values, values | {"memory_pair_rows": 53}]):
        out = tmp_path / f"tide-{number}"
        found = upcycled(tmp_path / "llama", out, **memory)
        assert found.dtype == dtype
        assert found.config.tie_word_embeddings == model.config.tie_word_embeddings
        assert found.config.rope_parameters == model.config.rope_parameters
        assert found.config.memory_gain_init == 0  # by which a training knows that gains begin there
        assert torch.equal(found(IDS).logits, model(IDS).logits)
    plain = [tokens for (tokens,) in Engine(found).generate([[1, 2, 3]], 8)]
    assert plain == [tokens for (tokens,) in Engine(model).generate([[1, 2, 3]], 8)]
    strip(open_source(str(out)), tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    assert type(again) is LlamaForCausalLM
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert again.config.to_diff_dict() == model.config.to_diff_dict()
    assert not (tmp_path / "again" / "modeling_tide.py").exists()


@torch.no_grad()
def test_a_large_model_is_written_in_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr("tide_lm.interop.upcycle._SHARD", 20_000)
    model = llama()
    model.save_pretrained(tmp_path / "llama")
    found = upcycled(tmp_path / "llama", tmp_path / "tide")
    assert len(list((tmp_path / "tide").glob("model-*-of-*.safetensors"))) > 2
    assert torch.equal(found(IDS).logits, model(IDS).logits)
    strip(open_source(str(tmp_path / "tide")), tmp_path / "again")
    assert torch.equal(
        AutoModelForCausalLM.from_pretrained(tmp_path / "again")(IDS).logits, model(IDS).logits
    )


def test_tables_do_not_depend_on_how_many_rows_are_made_at_once(tmp_path, monkeypatch):
    llama().save_pretrained(tmp_path / "llama")
    whole = upcycled(tmp_path / "llama", tmp_path / "whole").model.memory.weight
    monkeypatch.setattr(streamed_tensors, "_NUMBERS_PER_PIECE", 10 * 4 * 32)
    parts = upcycled(tmp_path / "llama", tmp_path / "parts")
    assert torch.equal(parts.model.memory.weight, whole)
    assert torch.equal(parts(IDS).logits, llama()(IDS).logits)
    assert len(whole.flatten(1).unique(dim=0)) == len(whole)


def test_a_base_model_of_ours_is_a_llama_too(tmp_path, tiny_model):
    base = tiny_model(num_memory_blocks=0)
    base.save_pretrained(tmp_path / "base")
    found = upcycled(tmp_path / "base", tmp_path / "tide")
    assert torch.equal(found(IDS).logits, base(IDS).logits)


@torch.no_grad()
def test_a_head_that_is_tied_in_name_alone_is_kept(tmp_path):
    model = llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "llama")
    weights = load_file(tmp_path / "llama" / "model.safetensors")
    for head in weights["model.embed_tokens.weight"].clone(), torch.randn(53, 32):
        save_file(
            weights | {"lm_head.weight": head}, tmp_path / "llama" / "model.safetensors", {"format": "pt"}
        )
        expected = LlamaForCausalLM.from_pretrained(tmp_path / "llama").eval()
        out = tmp_path / f"tide-{len(list(tmp_path.iterdir()))}"
        found = upcycled(tmp_path / "llama", out)
        assert torch.equal(found(IDS).logits, expected(IDS).logits)
        assert found.config.tie_word_embeddings is torch.equal(head, weights["model.embed_tokens.weight"])
        strip(open_source(str(out)), out.with_suffix(".llama"))
        again = AutoModelForCausalLM.from_pretrained(out.with_suffix(".llama"))
        assert torch.equal(again(IDS).logits, expected(IDS).logits)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [1 << 62], "data_offsets": [0, 8]},
        ["F32"],
    ],
)
def test_headers_that_lie_are_refused(tmp_path, entry):
    text = json.dumps({"a": entry}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ValueError, match=r"a\.safetensors is (no safetensors file|cut short)"):
        streamed_tensors.read(tmp_path / "a.safetensors")


def test_tables_routers_and_gates_begin_as_noise_and_gains_at_zero(tmp_path):
    llama(hidden_size=64, head_dim=16, vocab_size=3000).save_pretrained(tmp_path / "llama")
    model = upcycled(tmp_path / "llama", tmp_path / "tide", memory_values=True)
    assert not model.model.memory.norm.weight.any()
    drawn = {"tables": model.model.memory.weight}
    for number, layer in enumerate(model.model.layers):
        drawn |= {
            f"router {number}": layer.router.weight,
            f"gates {number}": layer.self_attn.value_gate.weight,
        }
    for name, weight in drawn.items():
        assert weight.std().item() == pytest.approx(0.2, rel=0.1), name
        assert abs(weight.mean().item()) < 0.04, name


def test_a_seed_gives_the_same_file_again(tmp_path):
    llama().save_pretrained(tmp_path / "llama")
    kept = [
        (tmp_path / out / "model.safetensors").read_bytes()
        for out, seed in (("a", 0), ("b", 0), ("c", 1))
        if upcycled(tmp_path / "llama", tmp_path / out, seed=seed)
    ]
    assert kept[0] == kept[1]
    a, c = (TideForCausalLM.from_pretrained(tmp_path / out).model for out in "ac")
    assert not torch.equal(a.memory.weight, c.memory.weight)
    assert not torch.equal(a.layers[0].router.weight, c.layers[0].router.weight)


def test_the_options_of_the_command_are_those_of_the_function(tmp_path):
    llama().save_pretrained(tmp_path / "llama")
    command = "upcycle", tmp_path / "llama", "--out"
    done = result_of(*command, tmp_path / "usual")
    usual = TideConfig.from_pretrained(tmp_path / "usual")
    assert (done["folder"], usual.num_memory_blocks, usual.memory_values) == (
        str(tmp_path / "usual"),
        8,
        True,
    )
    chosen = "--memory-blocks", 2, "--memory-value-scale", 5, "--memory-pairs", "--seed", 7
    result_of(*command, tmp_path / "tide", *chosen)
    memory = {"num_memory_blocks": 2, "memory_value_scale": 5.0, "memory_pair_rows": 53}
    upcycled(tmp_path / "llama", tmp_path / "same", 7, memory_values=True, **memory)
    result_of(*command, tmp_path / "mixed", "--no-memory-values")
    assert not TideConfig.from_pretrained(tmp_path / "mixed").memory_values
    for name in "config.json", "model.safetensors":
        assert (tmp_path / "tide" / name).read_bytes() == (tmp_path / "same" / name).read_bytes(), name


def test_only_the_gains_get_a_gradient_at_first(tmp_path):
    llama().save_pretrained(tmp_path / "llama")
    model = upcycled(tmp_path / "llama", tmp_path / "tide", memory_values=True).train()
    memory = [model.model.memory.weight, *(layer.router.weight for layer in model.model.layers)]
    for moved in False, True:
        model.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        assert model.model.memory.norm.weight.grad.abs().max() > 0
        assert all(bool(parameter.grad.any()) is moved for parameter in memory)
        model.model.memory.norm.weight.data -= 0.1 * model.model.memory.norm.weight.grad


def test_a_memory_that_is_in_use_is_not_stripped_by_the_way(tmp_path, tiny_model):
    model = tiny_model()
    model.save_pretrained(tmp_path / "tide")
    arguments = ["upcycle", str(tmp_path / "tide"), "--strip", "--out", str(tmp_path / "llama")]
    done = tide_lm(*arguments)
    assert done.returncode == 1
    assert "is in use" in done.stderr
    assert not (tmp_path / "llama").exists()
    assert tide_lm(*arguments, "--anyway").returncode == 0
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    assert torch.equal(plain(IDS).logits, model(IDS, drop_memory_layers=[0, 1]).logits)


def broken(folder, what):
    weights, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    tensors = load_file(weights)
    if what == "pickled":
        weights.rename(folder / "pytorch_model.bin")
    elif what == "cut short":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif what == "no header":
        weights.write_bytes(b"\xff" * 100)
    elif what == "a tensor too many":
        save_file(tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}, weights)
    elif what == "a tensor too few":
        del tensors["model.norm.weight"]
        save_file(tensors, weights)
    elif what == "another shape":
        save_file(tensors | {"model.norm.weight": torch.zeros(31)}, weights)
    elif what == "whole numbers":
        save_file(tensors | {"model.norm.weight": torch.zeros(32, dtype=torch.int8)}, weights)
    elif what == "quantised":
        config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    elif what == "another type":
        config["model_type"] = "mistral"
    elif what == "a size that is text":
        config["hidden_size"] = "64"
    elif what == "a curve of no name":
        config["hidden_act"] = "wavy"
    elif what == "no config":
        config = None
    (folder / "config.json").unlink() if config is None else (folder / "config.json").write_text(
        json.dumps(config)
    )


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("pickled", "has no model.safetensors"),
        ("cut short", "cut short"),
        ("no header", "is no safetensors file"),
        ("a tensor too many", "holds model.layers.0.self_attn.q_proj.bias"),
        ("a tensor too few", "lacks model.norm.weight"),
        ("another shape", r"of shape \(31,\), and its config.json says \(32,\)"),
        ("whole numbers", "as I8: only F32, F16, BF16"),
        ("quantised", "is quantised"),
        ("another type", "of type 'mistral'"),
        ("no config", "llama.*config.json"),
        ("a size that is text", "cannot be opened as a model"),
        ("a curve of no name", "no model can be built from the config.json of"),
    ],
)
def test_what_cannot_be_upcycled_is_refused_and_leaves_nothing(tmp_path, what, told):
    llama().save_pretrained(tmp_path / "llama")
    broken(tmp_path / "llama", what)
    with pytest.raises(ValueError, match=told):
        upcycled(tmp_path / "llama", tmp_path / "tide")
    assert not (tmp_path / "tide").exists()
    with pytest.raises(ValueError, match=told):
        check_weights(tmp_path / "llama")


def test_a_missing_file_of_several_is_told(tmp_path):
    llama().save_pretrained(tmp_path / "llama", max_shard_size="20KB")
    missing = sorted((tmp_path / "llama").glob("model-*.safetensors"))[1]
    missing.unlink()
    told = (
        rf"^{re.escape(str(missing))}, which model.safetensors.index.json names, is not there: copy it again"
    )
    with pytest.raises(ValueError, match=told):
        upcycled(tmp_path / "llama", tmp_path / "tide")
    assert not (tmp_path / "tide").exists()


def test_a_memory_that_cannot_be_is_told(tmp_path):
    llama(head_dim=12).save_pretrained(tmp_path / "llama")
    with pytest.raises(ValueError, match=r"cannot have this memory: hidden_size is 32.*set memory_values"):
        upcycled(tmp_path / "llama", tmp_path / "tide", memory_values=True)
    assert not (tmp_path / "tide").exists()


def test_models_of_other_kinds_are_refused(tmp_path, tiny_model):
    LlamaForSequenceClassification(llama().config).save_pretrained(tmp_path / "classes")
    with pytest.raises(ValueError, match="architecture LlamaForSequenceClassification"):
        open_source(str(tmp_path / "classes"))
    tiny_model().save_pretrained(tmp_path / "tide")
    with pytest.raises(ValueError, match="a TIDE model already, with K = 3"):
        upcycled(tmp_path / "tide", tmp_path / "out")
    for biases in {"attention_bias": True}, {"mlp_bias": True}:
        llama(**biases).save_pretrained(tmp_path / "biased")
        with pytest.raises(ValueError, match="has biases"):
            open_source(str(tmp_path / "biased"))
    llama().save_pretrained(tmp_path / "llama")
    with pytest.raises(ValueError, match="a Llama already"):
        strip(open_source(str(tmp_path / "llama")), tmp_path / "out")


def test_errors_name_the_model_of_the_hub_and_not_its_place_here(tmp_path, monkeypatch):
    monkeypatch.setattr("tide_lm.interop.upcycle.snapshot_download", lambda *_, **__: tmp_path)
    with pytest.raises(ValueError, match=r"^me/mine cannot be opened as a model"):
        open_source("me/mine")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--strip", "--memory-blocks", "4"], "--memory-blocks"),
        (["--anyway"], "goes with --strip"),
        (["--memory-blocks", "0"], "it must be at least 1"),
        (["--memory-value-scale", "nan"], "--memory-value-scale is nan"),
        (["--memory-value-scale", "0"], "--memory-value-scale is 0"),
        (["--memory-value-scale", "-1"], "--memory-value-scale is -1"),
    ],
)
def test_wrong_calls_are_told(tmp_path, arguments, told):
    llama().save_pretrained(tmp_path / "llama")
    done = tide_lm("upcycle", tmp_path / "llama", "--out", tmp_path / "tide", *arguments)
    assert done.returncode == 2
    assert told in done.said
    assert not (tmp_path / "tide").exists()


def big(folder):
    """A model of 270 MB, with a tokenizer's file beside it."""
    sizes = {"vocab_size": 25_000, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 3}
    llama(**sizes, num_attention_heads=16, tie_word_embeddings=False).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")


_PEAK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def test_a_request_to_end_leaves_nothing_and_the_next_call_takes_what_a_kill_left(tmp_path, monkeypatch):
    llama().save_pretrained(tmp_path / "llama")
    arguments = "upcycle", tmp_path / "llama", "--out", tmp_path / "tide", "--memory-blocks", 2
    seen = []

    @contextmanager
    def ended_at_work():
        def advance(count: int) -> None:
            seen.append((tmp_path / ".tide.tmp").exists())
            signal.raise_signal(signal.SIGTERM)

        yield lambda total: advance

    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patched:
        patched.setattr("tide_lm.cli.upcycle.writing_progress", ended_at_work)
        assert tide_lm(*arguments).returncode == 128 + signal.SIGTERM
    assert seen == [True]
    assert os.listdir(tmp_path) == ["llama"]
    assert signal.getsignal(signal.SIGTERM) is before
    (tmp_path / ".tide.tmp").mkdir()
    (tmp_path / ".tide.tmp" / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".tide.lock").touch()
    assert tide_lm(*arguments).returncode == 0
    assert TideConfig.from_pretrained(tmp_path / "tide").num_memory_blocks == 2
    assert sorted(os.listdir(tmp_path)) == ["llama", "tide"]


@pytest.mark.slow
def test_a_large_model_is_neither_read_nor_made_at_once_and_a_kill_leaves_nothing(tmp_path):
    big(tmp_path / "llama")
    llama().save_pretrained(tmp_path / "small")
    command = call("upcycle", tmp_path / "llama", "--out", tmp_path / "tide", "--json")
    draft = tmp_path / ".tide.tmp" / "model.safetensors"
    for number in signal.SIGTERM, signal.SIGKILL:
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        given_up = time.monotonic() + 600
        while not (draft.exists() and draft.stat().st_size > 1 << 26):
            assert process.poll() is None
            assert time.monotonic() < given_up
            time.sleep(0.01)
        process.send_signal(number)
        process.wait()
        assert not (tmp_path / "tide").exists()
        assert draft.exists() is (number == signal.SIGKILL)
    peaks = []
    for measured in call("upcycle", tmp_path / "small", "--out", tmp_path / "small-tide", "--json"), command:
        found = subprocess.run(
            [sys.executable, "-c", _PEAK, *measured], capture_output=True, text=True, check=True, timeout=600
        ).stdout
        peaks.append(int(found.splitlines()[-1]))
    written = json.loads(found[: found.rindex("}") + 1])
    assert written["tables"] == 8 * 25_000 * 1024
    assert (tmp_path / "tide" / "tokenizer_config.json").exists()
    assert (tmp_path / "tide" / "model.safetensors").stat().st_size > 4 * written["tables"]
    assert peaks[1] - peaks[0] < 200_000  # KB, of 270 MB that are read and 0.8 GB that are made
    assert sorted(os.listdir(tmp_path)) == ["llama", "small", "small-tide", "tide"]
