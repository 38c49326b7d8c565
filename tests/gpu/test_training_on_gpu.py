"""A run on a GPU: compiled, in bfloat16, and resumed."""

import json
import shutil
import subprocess
import sys

import pytest
import torch

from tide_lm.model import EmbeddingMemory, TideConfig
from tide_lm.run.settings import OptimSection, RunConfig
from tide_lm.training.row_optimizer import RowOptimizer
from tide_lm.training.trainer import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture
def settings(prepared):
    return [
        f'data.path="{prepared}"',
        "data.sequence=32",
        "model.preset=tide-2e-tiny",
        "optim.warmup_steps=0",
        "train.steps=6",
        "train.batch=4",
        "train.dtype=bfloat16",
        "train.compile=true",
        "train.checkpoint_every=3",
        "train.validation_sequences=4",
        "train.tensorboard=false",
    ]


@pytest.mark.parametrize("row_lazy", [True, False])
def test_a_resumed_run_ends_as_one_that_was_not_stopped(settings, tmp_path, row_lazy):
    config = RunConfig.load(None, settings)
    whole = Trainer(config, tmp_path / "run", print, row_lazy=row_lazy).train()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "00000006")
    resumed = Trainer(config, tmp_path / "run", print, resume=True, row_lazy=row_lazy).train()
    assert resumed["loss"] == pytest.approx(whole["loss"], rel=1e-3)


def test_torchrun_with_one_gpu_trains_as_without_it(settings, tmp_path):
    """The way of many GPUs: NCCL ahead gloo, FSDP2, rows with an owner, sharded checkpoints and export."""
    expected = Trainer(RunConfig.load(None, settings), tmp_path / "alone", print).train()
    chosen = [argument for setting in settings for argument in ("--set", setting)]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m", "--"]
    call = [*start, "tide_lm", "train", *chosen, "--run", str(tmp_path / "run"), "--resume", "--json"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["loss"] == pytest.approx(expected["loss"], rel=1e-3)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "00000006")
    resumed = subprocess.run(call, capture_output=True, text=True, timeout=300)
    assert "resumed from step 3" in resumed.stderr
    assert json.loads(resumed.stdout)["loss"] == pytest.approx(expected["loss"], rel=1e-3)


def test_rows_that_are_caught_up_beside_other_work_are_waited_for():
    """If they were not, some would be moved twice: they take milliseconds."""
    ids_BT = torch.randint(8000, (8, 2048), generator=torch.Generator().manual_seed(0))
    found = []
    for ahead in (False, True):
        torch.manual_seed(0)
        memory = EmbeddingMemory(TideConfig(vocab_size=8000, hidden_size=1024, num_memory_blocks=8)).cuda()
        torch.nn.init.normal_(memory.weight)
        tables = RowOptimizer(memory, OptimSection(), torch.float32)
        tables.set_rates(torch.full((200,), 1e-3, dtype=torch.float64))
        for moment in (tables.table.exp_avg_VKD, tables.table.exp_avg_sq_VKD):
            moment.fill_(1e-3)
        rows = tables.prepare([ids_BT])
        if ahead:
            tables.catch_up_ahead(rows)
        tables.begin(rows)
        found.append(tables.fetch(0).raw_UJD.detach())
    assert torch.equal(*found)
