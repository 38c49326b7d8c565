"""Models go to a stand-in for the Hub, and others have them from there as they were."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from hub import TOKEN, Hub
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tide_lm.compress.pack import STORE, pack
from tide_lm.model import TideForCausalLM
from tide_lm.spec.form import Form

START = """
import os, sys
def stay_here(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo") and "127.0.0.1" not in str(arguments):
        os.write(2, f"{event} {arguments} leaves this machine".encode())
        os._exit(3)
sys.addaudithook(stay_here)
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
local = sys.argv[1]
def keep(name, model):
    with torch.no_grad():
        save_file({"logits": model.eval()(torch.tensor(IDS)).logits}, name)
"""


@pytest.fixture
def hub():
    with Hub() as hub:
        yield hub


@pytest.fixture
def user(hub, token_ids, tmp_path):
    """Runs code in a fresh interpreter with an empty cache; gives what it printed, and the logits it kept."""

    def run(code: str, token: str = TOKEN) -> tuple[list[str], dict[str, torch.Tensor]]:
        folder = tmp_path / "user"
        folder.mkdir()
        settings = {
            "HF_ENDPOINT": hub.address,
            "HF_HOME": str(folder / "home"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": token,
            "no_proxy": "*",
        }
        others = {
            key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))
        }
        done = subprocess.run(
            [sys.executable, "-c", START.replace("IDS", str(token_ids.tolist())) + code, str(tmp_path)],
            capture_output=True,
            text=True,
            cwd=folder,
            env={**others, **settings},
            timeout=600,
        )
        assert done.returncode == 0, "\n".join([done.stderr, *hub.requests])
        kept = {path.name: load_file(path)["logits"] for path in folder.iterdir() if path.is_file()}
        return done.stdout.splitlines(), kept

    return run


def logits(model, ids) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(ids).logits


@pytest.mark.slow
def test_a_model_is_pushed_changed_and_pushed_again(hub, user, tiny_model, tokenizer, token_ids, tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    hub.commit("you/yours", {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()})
    said, found = user(
        """
assert "tide_lm" not in sys.modules
model = AutoModelForCausalLM.from_pretrained("you/yours", trust_remote_code=True)
first = model.push_to_hub("me/mine").oid
import tide_lm
keep("first", tide_lm.TideForCausalLM.from_pretrained("me/mine"))
with torch.no_grad():
    model.model.memory.weight.neg_()
model.push_to_hub("me/mine")
AutoTokenizer.from_pretrained(f"{local}/tokenizer").push_to_hub("me/mine")
keep("newest", tide_lm.TideForCausalLM.from_pretrained("me/mine"))
keep("newest by auto", AutoModelForCausalLM.from_pretrained("me/mine"))
keep("first again", tide_lm.TideForCausalLM.from_pretrained("me/mine", revision=first))
keep("first by auto", AutoModelForCausalLM.from_pretrained("me/mine", revision=first))
print(AutoTokenizer.from_pretrained("me/mine")("every layer").input_ids)
""",
    )
    wanted = {"first": logits(model, token_ids)}
    with torch.no_grad():
        model.model.memory.weight.neg_()
    wanted["newest"] = logits(model, token_ids)
    assert not torch.equal(wanted["newest"], wanted["first"])
    assert len(found) == 5
    for name, kept in found.items():
        assert torch.equal(kept, wanted[name.split()[0]]), name
    assert json.loads(said[-1]) == tokenizer("every layer").input_ids

    shutil.rmtree(tmp_path / "user")
    before = len(hub.requests)
    user("import tide_lm; tide_lm.TideForCausalLM.from_pretrained('me/mine', force_download=True)")
    asked = [request for request in hub.requests[before:] if request.startswith("GET")]
    assert len([request for request in asked if request.endswith("/model.safetensors")]) == 1

    empty, files, changed, whole = hub.commits["me/mine"].values()
    added = {"README.md", "config.json", "generation_config.json", "model.safetensors", "modeling_tide.py"}
    assert files.keys() - empty.keys() == added
    assert b"library_name: transformers" in files["README.md"]
    assert files["modeling_tide.py"] == (tmp_path / "model" / "modeling_tide.py").read_bytes()
    assert [name for name in changed if changed[name] != files.get(name)] == ["model.safetensors"]
    assert whole.keys() - changed.keys() == {"tokenizer.json", "tokenizer_config.json"}


@pytest.mark.slow
def test_a_packed_model_goes_with_its_store(hub, user, tiny_model, token_ids, tmp_path):
    wanted = {}
    for name, gain in {"first": 1.0, "newest": 2.0}.items():
        pack(tiny_model(memory_values=True, memory_gain_init=gain), tmp_path / name, Form(4))
        wanted[name] = logits(TideForCausalLM.from_pretrained(tmp_path / name, memory="store"), token_ids)
    assert not torch.equal(wanted["first"], wanted["newest"])
    _, found = user(
        f"""
from tide_lm.model import TideForCausalLM
token = {TOKEN!r}  # which nothing else knows here
places = {{"memory": "store", "memory_cache_bytes": 0, "token": token}}
pushed = [
    TideForCausalLM.from_pretrained(f"{{local}}/{{name}}", memory="cpu").push_to_hub("me/packed", token=token)
    for name in ("first", "newest")
]
keep("newest", TideForCausalLM.from_pretrained("me/packed", **places))
keep("newest by auto", AutoModelForCausalLM.from_pretrained("me/packed", **places))
first = TideForCausalLM.from_pretrained("me/packed", revision=pushed[0].oid, **places)
assert first.model.memory.file.path.is_symlink()
keep("first", first)
keep("first by auto", AutoModelForCausalLM.from_pretrained("me/packed", revision=pushed[0].oid, **places))
first.push_to_hub("me/copy", token=token)
first.save_pretrained("saved", push_to_hub=True, repo_id="me/saved", token=token)
""",
        token="",
    )
    assert len(found) == 4
    for name, kept in found.items():
        assert torch.equal(kept, wanted[name.split()[0]]), name
    _, files, changed = hub.commits["me/packed"].values()
    assert {name for name in files if changed[name] != files[name]} == {STORE, "config.json"}
    for copy in ("me/copy", "me/saved"):
        files = list(hub.commits[copy].values())[-1]
        assert files[STORE] == (tmp_path / "first" / STORE).read_bytes()
        assert {"config.json", "model.safetensors", "modeling_tide.py"} < files.keys()


@pytest.mark.slow
def test_a_llama_of_the_hub_is_upcycled_and_what_is_missing_is_named(hub, user, token_ids, tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 53, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    llama.save_pretrained(tmp_path / "llama")
    said, found = user(
        """
from pathlib import Path
from huggingface_hub import HfApi
from tide_lm.interop.upcycle import open_source, upcycle
from tide_lm.model import TideForCausalLM
AutoModelForCausalLM.from_pretrained(f"{local}/llama").push_to_hub("me/llama")
source = open_source("me/llama")
upcycle(source, Path("tide"), {"num_memory_blocks": 3}, 0)
HfApi().create_repo("me/tide")
HfApi().upload_folder(repo_id="me/tide", folder_path="tide")
model = TideForCausalLM.from_pretrained("me/tide")
keep("upcycled", model)
with torch.no_grad():
    model.model.memory.norm.weight.fill_(1)
model.push_to_hub("me/tide")
print(*sorted(open_source("me/tide").tensors.keys() - source.tensors.keys()))
def refuse(act, *arguments, **options):
    try:
        act(*arguments, **options)
    except (OSError, ValueError) as error:
        print(type(error).__name__, *str(error).split())
refuse(TideForCausalLM.from_pretrained, "me/missing")
refuse(AutoModelForCausalLM.from_pretrained, "me/missing")
refuse(open_source, "me/missing")
refuse(TideForCausalLM.from_pretrained, "me/tide", revision="0" * 40)
""",
    )
    assert torch.equal(found["upcycled"], logits(llama, token_ids))
    cards = [files["README.md"] for files in hub.commits["me/tide"].values() if "README.md" in files]
    assert len(cards) == 2
    assert all(
        b"base_model: me/llama" in card and b"# me/llama with 3 memory blocks" in card for card in cards
    )
    added, by_class, by_auto, source, revision = said
    routers = [f"model.layers.{layer}.router.weight" for layer in range(2)]
    assert added.split() == [*routers, "model.memory.norm.weight", "model.memory.weight"]
    assert by_class.startswith("OSError me/missing is not a local folder and is not a valid model identifier")
    assert by_auto == by_class
    assert source.startswith("ValueError there is no me/missing here, nor on the Hugging Face Hub (if it is")
    assert revision.startswith(f"OSError {'0' * 40} is not a valid git identifier")
