"""A TIDE run and its base, both tiny and trained for a moment, to look into."""

import json

import pytest

from tide_lm.run.settings import RunConfig
from tide_lm.training.trainer import Trainer


@pytest.fixture(scope="session")
def base_run(prepared, tmp_path_factory):
    run = tmp_path_factory.mktemp("explored") / "base"
    settings = [
        f"data.path={json.dumps(str(prepared))}",
        "data.sequence=32",
        "model.preset=base-tiny",
        "train.steps=2",
        "train.batch=4",
        "train.validation_sequences=4",
        "optim.warmup_steps=0",
        "train.tensorboard=false",
    ]
    Trainer(RunConfig.load(None, settings), run, lambda line: None).train()
    return run
