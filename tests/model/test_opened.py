"""A run, its checkpoints, its export and other folders open as what they are."""

import json
import shutil

import pytest
import torch
from huggingface_hub.errors import RepositoryNotFoundError
from safetensors.torch import load_file

from tide_lm.model.opened import naming, open_model


def test_a_run_opens_as_its_export_with_the_frequencies_of_its_data(trained):
    opened = open_model(str(trained))
    assert (opened.name, opened.run, opened.sequence) == ("run", trained, 32)
    saved = load_file(trained / "export" / "model.safetensors")
    assert torch.equal(opened.model.model.memory.weight, saved["model.memory.weight"])
    assert opened.bins.counts_V.sum() > 1000
    assert opened.model_with_memory is opened.model


def test_the_device_may_be_chosen(trained, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert open_model(str(trained), device="cpu").model.device.type == "cpu"


@pytest.mark.parametrize("how", ["step", "path"])
def test_a_checkpoint_opens_with_its_weights_and_place(trained, how, token_ids):
    if how == "step":
        opened = open_model(str(trained), step=4)
    else:
        opened = open_model(str(trained / "checkpoints" / "00000004"))
    assert (opened.step, opened.tokens, opened.run) == (4, 4 * 4 * 32, trained)
    export = open_model(str(trained / "export")).model
    with torch.no_grad():
        assert torch.equal(opened.model(token_ids).logits, export(token_ids).logits)
    before = open_model(str(trained), step=2).model
    assert not torch.equal(before.model.memory.weight, export.model.memory.weight)


def test_any_folder_of_a_causal_model_opens(tiny_model, tokenizer, tmp_path):
    folder = tmp_path / "some-llama"
    tiny_model(num_memory_blocks=0, vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    opened = open_model(str(folder), run=tmp_path / "results-here")
    assert opened.run == tmp_path / "results-here"
    with pytest.raises(ValueError, match=r"some-llama has no memory.*give a TIDE model"):
        _ = opened.model_with_memory
    with pytest.raises(ValueError, match="give --counts"):
        _ = opened.bins
    (tmp_path / "counts.json").write_text(json.dumps({"5": 3, "9": 1}))
    counted = open_model(str(folder), counts=tmp_path / "counts.json")
    assert counted.bins.counts_V[5] == 3


def test_two_models_of_one_name_do_not_share_results(tiny_model, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for parent in ("one", "two"):
        tiny_model(num_memory_blocks=0, vocab_size=len(tokenizer)).save_pretrained(tmp_path / parent / "same")
        tokenizer.save_pretrained(tmp_path / parent / "same")
    open_model("one/same").write("norms", {})
    open_model(str(tmp_path / "one" / "same"))
    with pytest.raises(ValueError, match=r"results of one/same.*give another"):
        open_model("two/same")
    open_model("two/same", run=tmp_path / "elsewhere")


def test_what_cannot_be_opened_is_named(trained, tmp_path):
    for path in (
        tmp_path / "nowhere",
        trained / "chekpoints" / "00000004",
        trained / "checkpoints" / "latest",
    ):
        with pytest.raises(ValueError, match=f"there is no {path}"):
            open_model(str(path))
    with pytest.raises(ValueError, match=r"results has no config\.json, so it is no model"):
        open_model(str(trained / "results"))
    with pytest.raises(ValueError, match=r"step 3.* 2, 4"):
        open_model(str(trained), step=3)
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    weights = next((run / "checkpoints" / "00000002").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"00000002 is damaged .*: give \S+/run/checkpoints/00000004, or"):
        open_model(str(run), step=2)
    shutil.rmtree(run / "checkpoints" / "00000004")
    with pytest.raises(ValueError, match=r"00000002 is damaged .*: there is no other, so train again"):
        open_model(str(run), step=2)


def test_a_path_that_the_hub_does_not_know_is_mended(tmp_path, monkeypatch):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    of_hub = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
    of_transformers = OSError("run/mine is not a local folder")
    of_transformers.__cause__ = of_hub
    for error in of_hub, of_transformers:
        with (
            pytest.raises(ValueError, match=r"there is no run/mine here, .*: did you mean 'runs/mine'"),
            naming("run/mine"),
        ):
            raise error


def test_a_folder_inside_a_run_is_itself(trained, tiny_model, tokenizer, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    tiny_model(num_memory_blocks=0, vocab_size=len(tokenizer)).save_pretrained(run / "finetuned")
    tokenizer.save_pretrained(run / "finetuned")
    opened = open_model(str(run / "finetuned"))
    assert (opened.name, opened.model.config.num_memory_blocks) == ("finetuned", 0)


def test_no_code_of_a_folder_runs_and_nothing_is_unpickled(tiny_model, tokenizer, tmp_path, monkeypatch):
    model = tiny_model(num_memory_blocks=0, vocab_size=len(tokenizer))
    for name in ("code", "pickle"):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    config = json.loads((tmp_path / "code" / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.EvilConfig"}}
    (tmp_path / "code" / "config.json").write_text(json.dumps(config))
    (tmp_path / "code" / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ValueError, match="cannot be opened as a model"):
        open_model(str(tmp_path / "code"))
    assert not (tmp_path / "ran").exists()
    (tmp_path / "pickle" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pickle" / "pytorch_model.bin")
    with pytest.raises(ValueError, match="safetensors"):
        _ = open_model(str(tmp_path / "pickle")).model


@pytest.mark.parametrize("kind", ["Bert", "XLNet", "Pegasus"])
def test_models_that_are_not_causal_are_refused(kind, tokenizer, tmp_path):
    import transformers

    sizes = {
        "Bert": {
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "hidden_size": 16,
            "intermediate_size": 16,
        },
        "XLNet": {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16},
        "Pegasus": {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
        | dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
        | dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 16),
    }[kind]
    config = getattr(transformers, f"{kind}Config")(vocab_size=len(tokenizer), **sizes)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / kind)
    config.save_pretrained(tmp_path / kind)
    tokenizer.save_pretrained(tmp_path / kind)
    with pytest.raises(ValueError, match=r"sees the tokens that follow|has an encoder too"):
        _ = open_model(str(tmp_path / kind)).model


def test_weights_that_are_not_finite_are_told(trained, tmp_path):
    opened = open_model(str(trained))
    opened.model.lm_head.weight.data[0] = torch.nan
    opened.model.save_pretrained(tmp_path)
    opened.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="logits that are not finite"):
        _ = open_model(str(tmp_path)).model


def test_counts_of_another_tokenizer_are_refused(trained, tmp_path):
    from tide_lm.data.prepare import Settings, prepare

    (tmp_path / "texts.jsonl").write_text('{"text": "other words altogether"}\n' * 3)
    prepare(Settings(str(tmp_path / "texts.jsonl"), train_tokenizer=260, validation=0), tmp_path / "other")
    with pytest.raises(ValueError, match="prepared with another tokenizer"):
        _ = open_model(str(trained), counts=tmp_path / "other").frequencies


def test_results_say_whose_they_are_and_a_checkpoint_does_not_take_the_runs_place(trained, tmp_path):
    whole = open_model(str(trained), run=tmp_path).write("norms", {"a": 1})
    part = open_model(str(trained), step=2, run=tmp_path).write("norms", {"a": 2})
    assert (whole.name, part.name) == ("norms.json", "norms-00000002.json")
    assert json.loads(part.read_text())["subject"] == {"model": str(trained), "step": 2, "tokens": 256}
