"""Row-lazy tables in the trainer: the losses of dense ones, without a dense gradient."""

from dataclasses import fields

import pytest
import torch

from tide_lm.run.settings import RunConfig
from tide_lm.training.trainer import Trainer

STEPS = 60  # many rows are missed for more than half of them


@pytest.fixture(params=[False, True], ids=["", "pairs"])
def settings(request, prepared):
    return [
        f"model.memory_pairs={str(request.param).lower()}",
        f'data.path="{prepared}"',
        "data.sequence=32",
        "model.preset=tide-2e-tiny",
        "model.vocab_size=320",
        "train.steps=200",
        "train.batch=4",
        "train.validation_sequences=4",
        "train.checkpoint_every=100000",
        "train.tensorboard=false",
        "optim.warmup_steps=10",
        "optim.max_lr=1e-3",
        "optim.table_lr_multiple=3",
        "optim.table_weight_decay=0.1",
    ]


def _losses(settings, run, steps, *more: str, row_lazy=True) -> tuple[list[float], Trainer]:
    trainer = Trainer(RunConfig.load(None, [*settings, *more]), run, print, row_lazy=row_lazy)
    losses = []
    for _ in range(steps):
        losses.append(trainer._train_step()["loss"])
        trainer.step += 1
    if row_lazy:
        trainer.row_optimizer.flush()
    return losses, trainer


@pytest.mark.parametrize("steps", [STEPS, pytest.param(200, marks=pytest.mark.slow)])
def test_a_seeded_run_has_the_losses_and_weights_of_dense_tables(settings, tmp_path, steps):
    dense, reference = _losses(settings, tmp_path / "run", steps, row_lazy=False)
    lazy, trainer = _losses(settings, tmp_path / "run", steps)
    assert lazy == pytest.approx(dense, abs=1e-4)
    assert min(dense) < dense[0] - 0.5
    for name, value in reference.model.named_parameters():
        found = dict(trainer.model.named_parameters())[name]
        assert torch.allclose(found, value, atol=1e-3 * value.abs().max().item()), name
    assert trainer.model.model.memory.weight.grad is None
    assert len(trainer.row_optimizer.gradient_RKD) < 128 < len(trainer.row_optimizer.table.weight_VKD)


def test_a_checkpoint_holds_all_that_is_known_of_rows(settings, tmp_path):
    _, trainer = _losses(settings, tmp_path / "run", 3)
    saved = {name: tensor.clone() for name, tensor in trainer.row_optimizer.to_checkpoint().items()}
    other = Trainer(RunConfig.load(None, settings), tmp_path / "run", print).row_optimizer
    room = other.placeholders(steps=3)
    assert room.keys() == saved.keys()
    for name, tensor in room.items():
        tensor.copy_(saved[name])
    other.from_checkpoint(room)
    for field in fields(other.table):
        found, expected = getattr(other.table, field.name), getattr(trainer.row_optimizer.table, field.name)
        assert expected.any(), field.name
        assert torch.equal(found, expected), field.name
    assert torch.equal(other.history.rates, trainer.row_optimizer.history.rates)


def test_micro_batches_add_up_to_the_whole_batch(settings, tmp_path):
    whole, _ = _losses(settings, tmp_path / "run", 12)
    parts, _ = _losses(settings, tmp_path / "run", 12, "train.micro_batch=1")
    assert parts == pytest.approx(whole, abs=1e-4)


def test_rows_that_the_data_never_use_decay_as_dense_ones(settings, tmp_path):
    others = "optim.weight_decay=0.4"  # of all that is no table
    _, reference = _losses(settings, tmp_path / "run", 30, others, row_lazy=False)
    _, trainer = _losses(settings, tmp_path / "run", 30, others)
    unused, expected = (t.model.model.memory.weight[310:320] for t in (trainer, reference))
    assert torch.equal(unused, expected)
    start = Trainer(RunConfig.load(None, settings), tmp_path / "run", print).model.model.memory.weight
    assert unused.norm() < start[310:320].norm()
