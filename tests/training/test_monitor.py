import re
import sys

import pytest

from tide_lm.run.optional import install
from tide_lm.training.monitor import Monitor


@pytest.mark.slow
def test_a_run_is_watched_in_weights_and_biases_under_one_id(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for step in (1, 2):
        monitor = Monitor(tmp_path, tensorboard=False, wandb=True)
        monitor.open()
        monitor.add({"step": step, "loss": 2.0, "validation": {"loss_by_decile": [1.0, None]}})
        monitor._wandb_run.finish()
    assert len({path.name.split("-")[-1] for path in (tmp_path / "wandb").glob("offline-run-*")}) == 1


def test_what_weights_and_biases_refuses_is_said_before_anything_is_written(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")

    def refuse(**_):
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ValueError, match=r"train\.wandb.*No API key configured"):
        Monitor(tmp_path, tensorboard=False, wandb=True).open()
    assert not list(tmp_path.iterdir())


def test_without_the_package_it_is_named_before_anything_is_done(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=re.escape(install("wandb"))):
        Monitor(tmp_path, tensorboard=False, wandb=True)
