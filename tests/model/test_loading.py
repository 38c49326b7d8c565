"""Folders open through the Auto classes, with and without the package imported first."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from reference import tide_forward
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from tide_lm.model import TideConfig, TideForCausalLM, TideModel
from tide_lm.model.loading import memory_tensors
from tide_lm.run.optional import ELSEWHERE


@pytest.fixture
def folder(tiny_model, tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def run_python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs code in a fresh interpreter, which has imported nothing yet."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=600,
    )


def test_tensors_have_the_names_and_shapes_of_the_public_format(folder):
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    assert shapes.pop("model.memory.weight") == (53, 3, 32)
    assert shapes.pop("model.memory.norm.weight") == (3, 32)
    for layer in range(2):
        assert shapes.pop(f"model.layers.{layer}.router.weight") == (4, 32)
    assert not [name for name in shapes if "memory" in name or "router" in name]
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "tide"
    assert config["architectures"] == ["TideForCausalLM"]
    assert config["num_memory_blocks"] == 3


def test_auto_classes_open_a_folder(folder, token_ids):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is TideForCausalLM
    assert type(AutoConfig.from_pretrained(folder)) is TideConfig
    assert type(AutoModel.from_pretrained(folder)) is TideModel
    assert type(AutoModelForCausalLM.from_config(model.config)) is TideForCausalLM
    again = TideForCausalLM.from_pretrained(folder)
    assert torch.equal(again(token_ids).logits, model(token_ids).logits)


@pytest.mark.parametrize(
    ("imports", "first"),
    [
        pytest.param("import tide_lm, transformers", "pass", marks=pytest.mark.slow),
        (
            "import transformers, tide_lm",
            "assert transformers.AutoConfig.for_model('tide', num_memory_blocks=5).num_memory_blocks == 5",
        ),
    ],
    ids=["tide-lm first", "transformers first"],
)
def test_importing_the_package_is_enough_in_either_order_and_nothing_of_a_folder_runs(folder, imports, first):
    (folder / "modeling_tide.py").write_text("raise SystemExit('the folder was executed')")
    code = f"""
import sys
{imports}
assert "tide_lm.model" not in sys.modules
{first}
from transformers import AutoModelForCausalLM, LlamaForCausalLM
print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)
"""
    done = run_python(code, str(folder))
    assert done.stdout.strip() == "TideForCausalLM", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("look", ["True", "importlib.util.find_spec(HOOKED)"], ids=["", "looked"])
def test_auto_config_knows_the_model_type_before_any_folder_is_opened(look):
    """Also test it after somebody has looked for the module without importing it."""
    code = f"""
import importlib.util, tide_lm
HOOKED = "transformers.models.auto.configuration_auto"
assert {look}
from transformers import AutoConfig
config = AutoConfig.for_model("tide", num_memory_blocks=5)
print(config.model_type, config.num_memory_blocks)
"""
    done = run_python(code)
    assert done.stdout.strip() == "tide 5", done.stderr


@pytest.mark.slow
def test_a_folder_opens_with_trust_remote_code_and_is_saved_again_without_our_source(folder, tmp_path):
    code = """
import sys
from transformers import AutoConfig, AutoModelForCausalLM
assert "tide_lm" not in sys.modules
config = AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
model.save_pretrained(sys.argv[2])
print(type(config).__name__, type(model).__name__)
"""
    done = run_python(code, str(folder), str(tmp_path / "again"), HF_MODULES_CACHE=str(tmp_path / "modules"))
    assert done.stdout.strip() == "TideConfig TideForCausalLM", done.stderr
    python_files = [path.name for path in (tmp_path / "again").glob("*.py")]
    assert python_files == ["modeling_tide.py"]
    nodes = list(ast.walk(ast.parse((tmp_path / "again" / "modeling_tide.py").read_text())))
    assert [node.module for node in nodes if isinstance(node, ast.ImportFrom)] == ["tide_lm.model"]
    assert not [node for node in nodes if isinstance(node, ast.Import)]


@pytest.mark.slow
def test_without_the_package_a_folder_names_the_install_command(folder, tmp_path):
    code = """
import sys
sys.modules["tide_lm"] = None
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
"""
    done = run_python(code, str(folder), HF_MODULES_CACHE=str(tmp_path / "modules"))
    assert done.returncode == 1
    assert ELSEWHERE in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("missing", ["tide_lm", "torch"])
def test_the_shim_names_the_install_command_unless_another_package_is_missing(folder, missing):
    code = f"import runpy, sys; sys.modules[{missing!r}] = None; runpy.run_path(sys.argv[1])"
    done = run_python(code, str(folder / "modeling_tide.py"))
    assert done.returncode == 1
    last, cure = done.stderr.splitlines()[-1], ELSEWHERE
    assert cure in last if missing == "tide_lm" else missing in last and cure not in last


def test_a_sharded_checkpoint_gives_the_same_model(tiny_model, token_ids, tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    shards = list(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(token_ids).logits, model(token_ids).logits)


def test_a_tokenizer_in_the_folder_is_found(folder, tokenizer):
    tokenizer.save_pretrained(folder)
    found = AutoTokenizer.from_pretrained(folder)
    assert found("every layer").input_ids == tokenizer("every layer").input_ids


def test_half_precision_is_loaded_and_saved(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    model.save_pretrained(tmp_path / "half")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


@pytest.mark.parametrize(
    "device_map",
    [
        "auto",
        {"": "cpu"},
        {"model.embed_tokens": "cpu", "model.memory": "disk", "model.layers.0": "cpu"}
        | {"model.layers.1": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"},
    ],
    ids=["auto", "one device", "memory and a layer on disk"],
)
def test_device_maps(tiny_model, token_ids, tmp_path, device_map):
    model = tiny_model(tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "model")
    mapped = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    logits = mapped(token_ids.to(mapped.device)).logits.cpu()
    assert torch.allclose(logits, model(token_ids).logits, atol=1e-5)


def test_a_device_map_never_splits_a_layer_or_the_memory(tiny_model):
    from accelerate import infer_auto_device_map

    model = tiny_model(tie_word_embeddings=False)
    bytes_of = {
        name: sum(p.numel() * 4 for p in module.parameters()) for name, module in model.named_modules()
    }
    before = bytes_of["model.embed_tokens"] + bytes_of["model.memory"]
    room = {"cpu": before + bytes_of["model.layers.0"] // 2, "disk": 10**9}

    def inside_a_layer(no_split) -> list[str]:
        chosen = infer_auto_device_map(model, max_memory=room, no_split_module_classes=no_split)
        return [name for name in chosen if re.search(r"layers\.\d+\.", name)]

    assert inside_a_layer([])
    assert not inside_a_layer(model._no_split_modules)
    assert "EmbeddingMemory" in model._no_split_modules


def rewrite(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "name",
    [
        "model.memory.weight",
        "model.memory.norm.weight",
        "model.layers.1.router.weight",
        "model.layers.1.self_attn.value_gate.weight",
    ],
)
def test_missing_memory_is_an_error_that_names_the_tensor(tiny_model, tmp_path, name):
    folder = tmp_path / "model"
    tiny_model(memory_values=True).save_pretrained(folder)
    rewrite(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=re.escape(name)):
        TideForCausalLM.from_pretrained(folder)
    with pytest.raises(ValueError, match=re.escape(name.removeprefix("model."))):
        AutoModel.from_pretrained(folder)


@pytest.mark.parametrize("saved", [False, True])
def test_where_rows_go_cannot_be_switched_when_a_folder_is_opened(tiny_model, tmp_path, saved):
    tiny_model(memory_values=saved).save_pretrained(tmp_path)
    has = "holds" if saved else "lacks"
    told = rf"{has} model\.layers\.0\.self_attn\.value_gate\.weight.*is {not saved}: leave memory_values as"
    with pytest.raises(ValueError, match=told):
        TideForCausalLM.from_pretrained(tmp_path, memory_values=not saved)
    TideForCausalLM.from_pretrained(tmp_path, num_memory_blocks=0)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("model.memory.weight", (53, 2, 32)), ("model.layers.0.router.weight", (3, 32))],
)
def test_misshapen_memory_is_an_error_that_names_both_shapes(folder, name, shape):
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(shape)}))
    with pytest.raises(ValueError, match=re.escape(f"{name} of shape {shape}")):
        TideForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_memory_blocks": 0},
        {"memory_values": True},
        {"memory_store": {"file": "rows.tide", "fingerprint": "0" * 64}},
    ],
    ids=str,
)
def test_the_config_says_which_tensors_memory_adds_to_a_llama(tiny_config, changes):
    config = tiny_config(**changes)
    with torch.device("meta"):
        found, llama = TideForCausalLM(config).state_dict(), LlamaForCausalLM(config).state_dict()
    added = {name: tuple(tensor.shape) for name, tensor in found.items() if name not in llama}
    assert memory_tensors(config) == added


def test_a_checkpoint_is_checked_before_anything_is_allocated(folder, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the model was built")

    rewrite(folder, lambda tensors: tensors.pop("model.layers.0.router.weight"))
    monkeypatch.setattr(TideForCausalLM, "__init__", refuse)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.router\.weight"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_a_variant_and_a_state_dict_are_checked_and_loaded(tiny_model, token_ids, tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path, variant="fp32")
    again = TideForCausalLM.from_pretrained(tmp_path, variant="fp32")
    given = TideForCausalLM.from_pretrained(None, config=model.config, state_dict=model.state_dict())
    for other in again, given:
        assert torch.equal(other(token_ids).logits, model(token_ids).logits)
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        TideForCausalLM.from_pretrained(tmp_path)
    partial = {name: tensor for name, tensor in model.state_dict().items() if "router" not in name}
    with pytest.raises(ValueError, match="lacks 2 tensors of the memory"):
        TideForCausalLM.from_pretrained(None, config=model.config, state_dict=partial)


def test_a_llama_folder_opened_as_tide_names_upcycle(tiny_model, tmp_path):
    from transformers import LlamaConfig

    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=53,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
        )
    ).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="tide-lm upcycle"):
        TideForCausalLM.from_pretrained(tmp_path)


def test_what_was_loaded_can_still_be_asked_for(folder):
    model, info = TideForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert isinstance(model, TideForCausalLM)
    assert not info["missing_keys"]


SAVED = Path(__file__).parent / "saved_by_0_1_0"


def test_a_folder_of_an_earlier_version_with_an_extension_that_is_gone_is_refused():
    for trusted in False, True:
        with pytest.raises(ValueError, match=r"memory_own_block is True.*0\.1\.0"):
            AutoModelForCausalLM.from_pretrained(SAVED, trust_remote_code=trusted)


def test_a_folder_that_an_earlier_version_saved_opens_as_it_was(tmp_path):
    """It has `memory_dim`, and rows in values. What is gone since is taken out of the copy."""
    folder = shutil.copytree(SAVED, tmp_path / "saved")
    config = json.loads((folder / "config.json").read_text())
    assert config["memory_dim"] == 16
    off = dict.fromkeys(("memory_own_block", "memory_gate"), False)
    (folder / "config.json").write_text(json.dumps({**config, **off}))

    def without_extensions(tensors) -> None:
        for layer in range(3):
            own, null = tensors[name := f"model.layers.{layer}.router.weight"]
            others = [torch.zeros_like(own)] * 2
            tensors[name] = torch.stack([*others[:layer], own, *others[layer:], null])
            for part in "gate", "out", "norm":
                del tensors[f"model.layers.{layer}.memory_gate.{part}.weight"]

    rewrite(folder, without_extensions)
    ids = torch.tensor(json.loads((folder / "expected.json").read_text())["ids"])
    tensors = {name: value.double() for name, value in load_file(folder / "model.safetensors").items()}
    expected, _ = tide_forward(tensors, SimpleNamespace(**config), ids)
    for trusted in False, True:
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trusted).eval()
        with torch.no_grad():
            found = model(ids).logits
        assert torch.allclose(found.double(), expected, atol=1e-5)
