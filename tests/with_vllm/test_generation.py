"""vLLM generates what our model does, wherever its rows are."""

import gc
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams
from vllm.compilation.backends import split_graph
from vllm.config import CompilationConfig, CUDAGraphMode
from vllm.distributed import cleanup_dist_env_and_memory

from tide_lm.compress.pack import pack
from tide_lm.interop.vllm_model import _split_graphs
from tide_lm.model import TideForCausalLM
from tide_lm.spec.form import Form

LONG = [(7 * i + i * i) % 290 + 3 for i in range(150)]
PROMPTS = [[0, 5, 6, 7], [0, 9], LONG, [*LONG[:64], 8, 9], [0, *range(3, 70)]]
TOKENS = 24


@pytest.fixture
def generate():
    """Starts vLLM for a folder, and ends it after the test."""
    started = []

    def make(folder, **options):
        usual = {
            "dtype": "float32",
            "max_model_len": 256,
            "enforce_eager": True,
            "max_num_seqs": 8,
            "seed": 0,
        }
        started.append(LLM(str(folder), **usual | options))

        def generated(prompts):
            asked = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=1, ignore_eos=True)
            done = started[-1].generate([{"prompt_token_ids": one} for one in prompts], asked, use_tqdm=False)
            return [output.outputs[0] for output in done]

        return generated

    yield make
    started.clear()
    gc.collect()
    cleanup_dist_env_and_memory()


@torch.no_grad()
def check(folder, outputs, prompts=PROMPTS):
    """Tokens are the same, and their log-probabilities almost."""
    model = TideForCausalLM.from_pretrained(folder).eval()
    for prompt, output in zip(prompts, outputs, strict=True):
        told = list(output.token_ids)
        logits_TV = model(torch.tensor([[*prompt, *told]])).logits[0, len(prompt) - 1 : -1]
        assert told == logits_TV.argmax(-1).tolist()
        logs = logits_TV.log_softmax(-1)
        for place, (token, known) in enumerate(zip(told, output.logprobs, strict=True)):
            assert known[token].logprob == pytest.approx(float(logs[place, token]), abs=2e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_memory_blocks": 0},
        {"memory_values": True, "memory_value_scale": 5.0, "tie_word_embeddings": True},
        {"memory_values": True, "num_key_value_heads": 1},
        {"memory_values": True, "memory_pair_rows": 97, "num_memory_blocks": 4},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ],
    ids=["plain", "base", "values", "values of one head", "pairs", "linear positions"],
)
def test_tokens_are_those_of_our_model(saved, generate, changes):
    """Several prompts at once, read in pieces, and again from vLLM's cache of prefixes."""
    folder = saved(**changes)
    generated = generate(folder, max_num_batched_tokens=64, enable_chunked_prefill=True)
    for _ in range(2):
        check(folder, generated(PROMPTS))


@pytest.mark.parametrize("pairs", [0, 97], ids=["", "pairs"])
@pytest.mark.parametrize("place", ["device", "cpu", "store"])
def test_packed_rows_are_found_wherever_they_are(saved, generate, tmp_path, place, pairs):
    model = TideForCausalLM.from_pretrained(
        saved(memory_values=True, memory_pair_rows=pairs, num_memory_blocks=4)
    )
    pack(model, tmp_path / "packed", Form(4))
    extra = {"tide_memory": place, "tide_memory_cache_bytes": 1 << 12}
    check(
        tmp_path / "packed",
        generate(tmp_path / "packed", additional_config=extra, skip_tokenizer_init=True)(PROMPTS),
    )


@pytest.mark.parametrize(("packed", "pairs"), [(False, 0), (False, 97), (True, 97)])
def test_compiled_it_generates_the_same(saved, generate, tmp_path, packed, pairs):
    folder = saved(memory_values=True, memory_pair_rows=pairs, num_memory_blocks=4)
    if packed:
        pack(TideForCausalLM.from_pretrained(folder), tmp_path / "packed", Form(4))
        folder = tmp_path / "packed"
    extra = {"tide_memory": "store"} if packed else {}
    check(
        folder,
        generate(folder, enforce_eager=False, additional_config=extra, skip_tokenizer_init=True)(PROMPTS),
    )


@pytest.mark.skipif(
    platform.machine() == "aarch64" and " bf16" not in Path("/proc/cpuinfo").read_text(),
    reason="vLLM's attention in bfloat16 uses instructions that this CPU does not have",
)
@torch.no_grad()
def test_in_bfloat16_it_chooses_what_our_model_finds_almost_as_likely(saved, generate):
    folder = saved(memory_values=True, initializer_range=0.05)
    outputs = generate(folder, dtype="bfloat16", enforce_eager=False)(PROMPTS)
    model = TideForCausalLM.from_pretrained(folder).eval()
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        told = list(output.token_ids)
        logits_TV = model(torch.tensor([[*prompt, *told]])).logits[0, len(prompt) - 1 : -1]
        chosen = logits_TV.gather(-1, torch.tensor(told)[:, None])[:, 0]
        assert (logits_TV.amax(-1) - chosen).max() < 0.05 * logits_TV.std()


def test_a_graph_ends_before_the_look_up_and_begins_after_it():
    """With vLLM's own splitter, since on a CPU it compiles a step whole."""
    graphs = []

    def step(ids_N, weight):
        rows_NKD = weight.new_empty(len(ids_N), 2, 8)
        torch.ops.tide_lm.vllm_rows(ids_N + 1, ids_N, rows_NKD, "memory")
        return (2 * rows_NKD * weight).sum()

    def kept(graph, inputs):
        graphs.append(graph)
        return lambda *inputs: (torch.zeros(()),)

    torch.compile(step, backend=kept, fullgraph=True)(torch.arange(4), torch.ones(8))
    attention = CompilationConfig._attention_ops
    compilation = CompilationConfig(
        splitting_ops=[*attention], cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE
    )
    _split_graphs(SimpleNamespace(compilation_config=compilation), "memory", object(), "tide_lm::vllm_rows")
    assert compilation.cudagraph_mode is CUDAGraphMode.PIECEWISE
    _, pieces = split_graph(graphs[0], compilation.splitting_ops)
    assert [piece.is_splitting_graph for piece in pieces] == [False, True, False]
    (look_up,) = (node for node in pieces[1].graph.graph.nodes if node.op == "call_function")
    assert look_up.target._qualified_op_name == "tide_lm::vllm_rows"


def run(folder, *arguments) -> subprocess.CompletedProcess:
    """vLLM in processes of its own."""
    code = """
import json, sys
if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    asked = SamplingParams(temperature=0, max_tokens=24, logprobs=1, ignore_eos=True)
    options = json.loads(sys.argv[2])
    llm = LLM(sys.argv[1], dtype="float32", max_model_len=256, enforce_eager=True, max_num_seqs=8, **options)
    done = llm.generate([{"prompt_token_ids": one} for one in json.loads(sys.argv[3])], asked)
    print("TOKENS", json.dumps([list(output.outputs[0].token_ids) for output in done]))
"""
    call = [sys.executable, "-c", code, str(folder), *(json.dumps(one) for one in arguments)]
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}  # a core for each of two processes
    return subprocess.run(call, capture_output=True, text=True, timeout=600, env=environment)


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"memory_values": True}, None),
        ({"memory_values": True, "num_key_value_heads": 1}, None),
        ({"memory_values": True}, "store"),
    ],
    ids=["key heads are split", "key heads are shared", "rows are in a store"],
)
def test_two_processes_share_tables_heads_and_the_vocabulary(saved, tmp_path, changes, place):
    folder, options = saved(**changes), {"tensor_parallel_size": 2, "skip_tokenizer_init": True}
    if place is not None:
        pack(TideForCausalLM.from_pretrained(folder), tmp_path / "packed", Form(4))
        folder, options["additional_config"] = tmp_path / "packed", {"tide_memory": place}
    done = run(folder, options, PROMPTS)
    found = re.findall(r"^TOKENS (.*)$", done.stdout, re.MULTILINE)
    assert found, done.stderr[-3000:]
    model = TideForCausalLM.from_pretrained(folder).eval()
    for prompt, told in zip(PROMPTS, json.loads(found[0]), strict=True):
        logits_TV = model(torch.tensor([[*prompt, *told]])).logits[0, len(prompt) - 1 : -1]
        assert told == logits_TV.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"additional_config": {"tide_memory": "disk"}}, "tide_memory is 'disk': it must be one of"),
        ({"additional_config": {"tide_memories": "cpu"}}, "additional_config has 'tide_memories'"),
        ({"additional_config": {"tide_memory": "store"}}, "pack it first, with `tide-lm pack`"),
        ({"additional_config": {"tide_memory": "cpu"}}, "pack it first, with `tide-lm pack`"),
        (
            {"additional_config": {"tide_memory": "cpu", "tide_memory_cache_bytes": -1}},
            "tide_memory_cache_bytes is -1",
        ),
    ],
)
def test_wrong_options_are_told(saved, generate, options, told):
    with pytest.raises(ValueError, match=told):
        generate(saved(), **options)


@pytest.mark.parametrize("name", ["model.memory.weight", "model.layers.1.router.weight"])
def test_a_folder_that_lacks_memory_fails_when_it_is_loaded(saved, generate, name):
    folder = saved()
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"lacks {re.escape(name)}"):
        generate(folder)


def test_stages_are_refused(saved):
    done = run(saved(), {"pipeline_parallel_size": 2}, PROMPTS)
    assert done.returncode != 0
    assert "pipeline_parallel_size is 2" in done.stdout + done.stderr


def test_another_vllm_is_told_of_when_a_model_is_wanted(monkeypatch, caplog):
    import vllm

    from tide_lm.interop import vllm_plugin

    assert vllm_plugin.TideForCausalLM.__module__ == "tide_lm.interop.vllm_model"
    monkeypatch.setattr(vllm, "__version__", "0.31.2")
    vllm_plugin.register()
    assert not caplog.records
    assert vllm_plugin.TideForCausalLM
    assert "tide-lm knows vLLM 0.32, and this is 0.31.2" in caplog.text
    monkeypatch.setitem(sys.modules, "tide_lm.interop.vllm_model", None)
    with pytest.raises(ImportError, match=r"knows vLLM 0\.32, and this is 0\.31\.2: install one"):
        vllm_plugin.TideForCausalLM  # noqa: B018
