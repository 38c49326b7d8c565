"""A Llama that trains on as it is, and as a TIDE model, for the same further tokens."""

import json
import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from studies.plan import Run
from tide_lm.run.settings import RunConfig

SHARE = 0.5  # of the training text for the Llama; each way to go on gets as much again


@dataclass(frozen=True)
class Way:
    """A way to train a Llama on: as TIDE or as it is, and which parts are trained.

    `rate` is that of the first learning rate to go on with.
    """

    name: str
    tide: bool = True
    parts: str = "all"
    rate: float = 0.3
    memory: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    seeds: int = 1


GAIN_RATE = "optim.gain_lr_multiple"
WAYS = (
    Way("Llama", tide=False, seeds=3),
    Way("TIDE", seeds=3),
    Way("TIDE, Llama frozen", parts="memory", seeds=3),
    Way("TIDE, gains no faster", settings={GAIN_RATE: 1}),
    Way("TIDE, gains 30 times as fast", settings={GAIN_RATE: 30}),
    Way("TIDE, gains 100 times as fast", settings={GAIN_RATE: 100}),
    Way("TIDE, rows in values times 5", memory={"memory_value_scale": 5.0}),
    Way("Llama, first rate", tide=False, rate=1.0),
    Way("TIDE, first rate", rate=1.0),
    Way("TIDE, Llama frozen, first rate", parts="memory", rate=1.0),
)


@dataclass(frozen=True)
class Plan:
    """The folders, the Llama's size, and K."""

    data: Path
    scratch: Path
    size: str = "small"
    blocks: int = 8

    def llama(self, seed: int) -> RunConfig:
        import torch

        run = Run("base", "paper", self.size, 0, seed, share=SHARE)
        return run.config(self.data, gpu=torch.cuda.is_available())

    def further(self, way: Way, seed: int, start: Path) -> RunConfig:
        """Return the Llama's own settings, at the way's rate and in another order of the text."""
        first = self.llama(seed)
        rate = way.rate * first.optim.max_lr
        settings = {
            "model.start": json.dumps(str(start)),
            "data.path": json.dumps(str(self.data)),
            "data.sequence": first.data.sequence,
            "optim.max_lr": rate,
            "optim.min_lr": rate / 10,
            "optim.warmup_lr": rate / 100,
            "optim.warmup_steps": first.optim.warmup_steps,
            "train.seed": seed + 100,
            "train.parts": way.parts,
            **way.settings,
        }
        same = ("steps", "batch", "log_every", "validate_every", "validation_sequences", "checkpoint_every")
        settings |= {f"train.{name}": getattr(first.train, name) for name in same}
        settings |= {"train.tensorboard": "false", "train.dtype": first.train.dtype}
        settings |= {"train.compile": str(first.train.compile).lower()}
        return RunConfig.load(None, [f"{name}={value}" for name, value in settings.items()])


def compare(plan: Plan, ways: Iterable[Way], processes: int, log: Callable[[str], None]) -> dict[str, Any]:
    """Train what is not there yet, and return the losses of all, by decile too."""
    jobs = [(way, seed) for way in ways for seed in range(way.seeds)]
    seeds = sorted({seed for _, seed in jobs})
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        firsts = list(pool.map(_first, [plan] * len(seeds), seeds))
        log(f"{len(seeds)} Llamas are there")
        found = []
        for record in pool.map(_further, [plan] * len(jobs), *zip(*jobs, strict=True)):
            found.append(record)
            log(f"{record['way']}, seed {record['seed']}: {record['validation']['loss']:.4f}")
    tokens = [first["tokens"] for first in firsts]
    return {"size": plan.size, "k": plan.blocks, "tokens": tokens[0], "first": firsts, "runs": found}


def _first(plan: Plan, seed: int) -> dict[str, Any]:
    config = plan.llama(seed)
    tokens = config.train.steps * config.train.batch * config.data.sequence
    return {"seed": seed, "tokens": tokens, "validation": _train(config, plan.scratch / f"llama-{seed}")}


def _further(plan: Plan, way: Way, seed: int) -> dict[str, Any]:
    from tide_lm.interop.upcycle import open_source, upcycle

    slug = f"on-{way.name.lower().replace(', ', '-').replace(' ', '-')}-{seed}"
    start = plan.scratch / f"llama-{seed}" / "export"
    if way.tide:
        memory = {"num_memory_blocks": plan.blocks, "memory_values": True, **way.memory}
        upcycled = plan.scratch / f"start-{slug}"
        if not upcycled.exists():
            upcycle(open_source(str(start)), upcycled, memory, seed)
        start = upcycled
    validation = _train(plan.further(way, seed, start), plan.scratch / slug)
    return {"way": way.name, "seed": seed, "about": asdict(way), "validation": validation}


def _train(config: RunConfig, run: Path) -> dict[str, Any]:
    import torch

    from tide_lm.training.trainer import Trainer

    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")
    return Trainer(config, run, lambda line: None, resume=True).train()
