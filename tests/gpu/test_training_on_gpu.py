"""A run on a GPU: compiled, in bfloat16, and resumed."""

import shutil

import pytest
import torch

from tide_lm.run_config import RunConfig
from tide_lm.train.trainer import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("update", ["row-lazy", "dense"])
def test_a_resumed_run_ends_as_one_that_was_not_stopped(prepared, tmp_path, update):
    settings = [
        f'data.path="{prepared}"',
        "data.sequence=32",
        "model.preset=tide-2e-tiny",
        f"optim.table_update={update}",
        "optim.warmup_steps=0",
        "train.steps=6",
        "train.batch=4",
        "train.dtype=bfloat16",
        "train.compile=true",
        "train.checkpoint_every=3",
        "train.validation_sequences=4",
        "train.tensorboard=false",
    ]
    config = RunConfig.load(None, settings)
    whole = Trainer(config, tmp_path / "run", print).train()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "00000006")
    resumed = Trainer(config, tmp_path / "run", print, resume=True).train()
    assert resumed["loss"] == pytest.approx(whole["loss"], rel=1e-3)
