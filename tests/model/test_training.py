"""Trainer, gradient checkpointing, PEFT, autocast and torch.compile work on a TIDE model as on a Llama."""

import functools
import shutil
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tide_lm.model import Memory, TideForCausalLM
from tide_lm.training.objective import compile_layers

VALUES_AND_STRICT = (True, True), (False, True), (False, False)


def gradients(model, token_ids) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(token_ids, labels=token_ids).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("values", [False, True], ids=["", "rows in values"])
def test_gradient_checkpointing_changes_no_gradient(tiny_model, token_ids, values):
    model = tiny_model(memory_values=values).train()
    plain = gradients(model, token_ids)
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    checkpointed = gradients(model, token_ids)
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)
    assert checkpointed["model.memory.weight"].abs().max() > 0


def test_wrapped_attention_keeps_its_rows(tiny_model, token_ids):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = tiny_model(memory_values=True)
    plain = model(token_ids).logits
    for layer in model.model.layers:
        layer.self_attn = checkpoint_wrapper(layer.self_attn)
    assert torch.equal(model(token_ids).logits, plain)


def test_checkpointing_options_other_than_reentrance_are_kept(tiny_model, token_ids):
    model = tiny_model().train()
    model.gradient_checkpointing_enable({"preserve_rng_state": False})
    assert gradients(model, token_ids)["model.memory.weight"].abs().max() > 0


def test_reentrant_checkpointing_is_refused_with_its_reason(tiny_model):
    with pytest.raises(ValueError, match=r"use_reentrant=True .*use False"):
        tiny_model().gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="use_reentrant=None"):
        tiny_model().gradient_checkpointing_enable({"use_reentrant": None})
    tiny_model(num_memory_blocks=0).gradient_checkpointing_enable({"use_reentrant": True})


def test_trainer_learns_saves_and_resumes(tiny_config, tmp_path):
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(3, 51).view(8, 6)]

    def trainer(steps: int) -> Trainer:
        torch.manual_seed(0)
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=steps,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            gradient_checkpointing=True,
            save_steps=10,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            seed=0,
        )
        return Trainer(TideForCausalLM(tiny_config()), arguments, train_dataset=rows)

    first = trainer(20)
    first.train()
    losses = [entry["loss"] for entry in first.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 1
    resumed = trainer(20)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    for name, parameter in resumed.model.named_parameters():
        assert torch.equal(parameter, first.model.get_parameter(name)), name
    assert (tmp_path / "checkpoint-20" / "modeling_tide.py").exists()
    TideForCausalLM.from_pretrained(tmp_path / "checkpoint-20")


def test_lora_trains_only_its_adapters_and_reloads(tiny_model, token_ids, tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    tiny_model().save_pretrained(tmp_path / "base")
    base = TideForCausalLM.from_pretrained(tmp_path / "base")
    before = base(token_ids).logits.detach().clone()
    model = get_peft_model(base, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    assert torch.equal(model(token_ids).logits, before)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name for name in trained)
    assert any("router" in name for name in trained)

    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=1.0)
    for _ in range(3):
        model(token_ids, labels=token_ids).loss.backward()
        optimizer.step()
    after = model.eval()(token_ids).logits
    assert not torch.allclose(after, before, atol=1e-3)
    model.save_pretrained(tmp_path / "adapter")
    fresh = TideForCausalLM.from_pretrained(tmp_path / "base")
    assert torch.allclose(PeftModel.from_pretrained(fresh, tmp_path / "adapter")(token_ids).logits, after)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"memory_values": True}], ids=["", "rows in values"])
def test_compiles_as_one_graph_and_agrees(tiny_model, token_ids, changes):
    model = tiny_model(**changes).train()
    plain = gradients(model, token_ids)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = compiled(token_ids, labels=token_ids).loss
    model.zero_grad()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, plain[name], atol=1e-6), name


def test_one_graph_serves_all_layers(tiny_model, token_ids, monkeypatch):
    model = tiny_model(num_hidden_layers=5, memory_values=True)
    plain, counter = model(token_ids, use_cache=False).logits, CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    compile_layers(model)
    torch._dynamo.reset()
    assert torch.allclose(model(token_ids, use_cache=False).logits, plain, atol=1e-5)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")) or " " in sys.prefix,
    reason="inductor on a CPU needs a C++ compiler, and a path without spaces",
)
def test_compiles_with_inductor_and_a_memory_made_outside(tiny_model, token_ids):
    """Deduplication has a shape that depends on data, so it stays outside the graph."""
    model = tiny_model()
    unique, index = token_ids.unique(return_inverse=True)
    rows = model.model.memory(unique).rows_UJD.detach()
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        logits = compiled(token_ids, memory=Memory(rows, index)).logits
        assert torch.allclose(logits, model(token_ids).logits, atol=1e-5)


@pytest.mark.parametrize(
    ("values", "strict"),
    [(True, False), *(pytest.param(*case, marks=pytest.mark.slow) for case in VALUES_AND_STRICT)],
)
def test_exports_with_sizes_that_may_change(tiny_model, token_ids, strict, values):
    model = tiny_model(memory_values=values)
    any_size = torch.export.Dim.DYNAMIC
    program = torch.export.export(
        model,
        (token_ids,),
        {"use_cache": False},
        dynamic_shapes={"input_ids": {0: any_size, 1: any_size}, "use_cache": None},
        strict=strict,
    )
    other = torch.randint(3, 53, (4, 11))
    assert torch.allclose(program.module()(other, use_cache=False).logits, model(other).logits, atol=1e-5)


def test_autocast_keeps_the_residual_stream_and_the_gradients_finite(tiny_model, token_ids):
    model = tiny_model().train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(token_ids, labels=token_ids)
    assert torch.allclose(output.loss, model(token_ids, labels=token_ids).loss, atol=0.05)
    output.loss.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


@pytest.mark.parametrize("values", [False, True], ids=["", "rows in values"])
def test_bfloat16_stays_near_float32(tiny_model, token_ids, values):
    exact = tiny_model(memory_values=values)(token_ids).logits
    rounded = tiny_model(memory_values=values).to(torch.bfloat16)(token_ids).logits
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).norm() / exact.norm() < 0.03
