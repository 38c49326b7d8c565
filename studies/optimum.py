"""The study at the optimum: its arms, and how one run of an arm is named, trained and recorded.

`python -m studies.optimum` has the commands, which are in `optimum_commands.py`. A run has a name, such as
"base, 0.004" or "best, 0.004, beta2 0.99, seed 1, test", and leaves one JSON file.
"""

import gc
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from studies import test_reading, test_split
from studies.data import VALIDATION, Both
from studies.plan import GAIN, NARROW, PAIRS, RATE, SCALE, SIZES, VALUES, Run, preset_of
from tide_lm.data import sources
from tide_lm.data.prepare import Settings, prepare_corpus
from tide_lm.data.shards import Manifest, TokenSplit
from tide_lm.run import files
from tide_lm.run.provenance import write_record
from tide_lm.run.settings import RunConfig
from tide_lm.spec import presets
from tide_lm.spec.estimate import count_parameters, train_flops

TOKENS_PER_PARAMETER = 20
FLOPS = 215e12  # per second, of all processes on one H200 together
SIDE_BY_SIDE = 6  # processes that fill one H200
TABLES_COST = 1.4  # what a run with tables takes, as a multiple of one without
START = 30  # seconds until a run takes its first steps
LOST = 120  # seconds of training at most, if a process is killed

FAST_EMBEDDING = "fast-embedding"
_FFN = "model.intermediate_size"
_FOR_GATE = {_FFN: 536}  # narrower by the gate's two matrices
_UNTIED = {"model.tie_word_embeddings": "false"}
_IN_VALUES = {SCALE: 5.0, VALUES: "true"}
_GEMMA = {GAIN: 1.0, RATE: 1.0}  # a row is multiplied by 16, and so is what a step changes


@dataclass(frozen=True)
class Arm:
    """What is compared: a model, its recipe or extension, K, and settings that differ from the recipe's."""

    model: str
    recipe: str
    k: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    of_recipe: str = "best"


ARMS = {
    "base": Arm("base", "paper", 0, of_recipe="paper"),
    "paper": Arm("tide", "paper", 8, of_recipe="paper"),
    "best": Arm("tide", "best", 8),
    "values x5": Arm("tide", "values x5", 8, {SCALE: 5.0}),
    "gated": Arm("gated", "values x5, gated", 8, {SCALE: 5.0, **_FOR_GATE}),
    "own tables": Arm(NARROW, "values x5", 8, {SCALE: 5.0}),
    "reinjected": Arm("reinjected", "paper", 0, of_recipe="paper"),
    "reinjected in values": Arm("reinjected-and-values", "paper", 0, of_recipe="paper"),
    "fast embedding": Arm(FAST_EMBEDDING, "best", 0),
    "reinjected convolved": Arm("reinjected-and-convolved", "paper", 0, of_recipe="paper"),
    "base untied": Arm("base", "untied", 0, _UNTIED, "paper"),
    "paper untied": Arm("tide", "paper, untied", 8, _UNTIED, "paper"),
    "best untied": Arm("tide", "best, untied", 8, _UNTIED),
    "base doubled": Arm("base", "layers twice as large", 0, {_FFN: 1664}, "paper"),
    "base dense": Arm("base", "as many parameters as TIDE", 0, {_FFN: 11_624}, "paper"),
    "stem": Arm("stem", "best", 8),
    "stem equal": Arm("stem", "best, as much compute", 8, {_FFN: 856}),
    "stem paper": Arm("stem", "paper", 8, of_recipe="paper"),
    "stem published": Arm("stem-published", "as published", 8, of_recipe="paper"),
    "nanochat values": Arm("nanochat-values", "as published", 8, {RATE: 18.75}),
    "nanochat values x5": Arm("nanochat-values", "best", 8),
    "nanochat values small": Arm("nanochat-values", "as published, its own bytes", 2, {RATE: 18.75}),
    "modded values": Arm("modded-values", "as published", 8, {RATE: 75.0}),
    "modded values x5": Arm("modded-values", "best", 8),
    "gemma tables": Arm("gemma-tables", "as published", 8, _GEMMA),
    "gemma tables equal": Arm("gemma-tables", "as much compute", 8, {**_GEMMA, _FFN: 448}),
    "gemma tables best": Arm("gemma-tables", "best, as much compute", 8, {_FFN: 448}),
    "mole": Arm("mole", "as published", 0, of_recipe="paper"),
    "mole equal": Arm("mole-one", "one expert", 0, of_recipe="paper"),
    "pairs": Arm("pairs", "pairs", 8, _IN_VALUES),
    "pairs gated": Arm("gated-pairs", "pairs, gated", 8, _IN_VALUES | _FOR_GATE),
    "pairs and triples": Arm("pairs-and-triples", "pairs and triples", 8, _IN_VALUES),
    "pairs in values": Arm("split", "pairs and triples in values", 8, _IN_VALUES),
    "pairs one hash": Arm("tide", "pairs by one hash", 8, _IN_VALUES | {PAIRS: "true"}),
    "pairs in three": Arm("pair-rows-of-three", "3 V rows of pairs, 2 blocks a row", 4, _IN_VALUES),
    "pairs in seven": Arm("pair-rows-of-seven", "7 V rows of pairs, 1 block a row", 2, _IN_VALUES),
    "pairs by three hashes": Arm("pair-rows-by-three-hashes", "pairs by three hashes", 8, _IN_VALUES),
    "scalars": Arm("scalars", "scalars", 8, _IN_VALUES),
    "narrow gate": Arm("narrow-gate", "narrow gate, pairs", 8, _IN_VALUES),
    "row gates": Arm("row-gates", "gates for rows, convolution, pairs", 8, _IN_VALUES),
}
_NAME = re.compile(r"(?P<arm>[^,]+), (?P<rate>[\d.e-]+)(?P<more>(, \w+ [\w.-]+)*)(?P<test>, test)?")


def layer_parameters(size: str) -> int:
    """The parameters of the base's layers."""
    model = presets.get(preset_of(size, 0)).model
    return count_parameters(model).backbone - (model.vocab_size + 1) * model.hidden_size


@dataclass(frozen=True)
class Tuned:
    """One run of an arm; `tokens` are for each parameter of the base's layers, and 0 is the size's batch.

    With `test` it reads the test split when it is trained.
    """

    arm: str
    rate: float
    size: str = "6m"
    batch: int = 0
    seed: int = 0
    tokens: float = TOKENS_PER_PARAMETER
    warmup: float = 0.1
    beta2: float = 0.95
    test: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch", self.batch or SIZES[self.size].batch)

    @classmethod
    def named(cls, name: str) -> "Tuned":
        """The run of a name such as "best, 0.004" or "base, 0.004, batch 32, seed 1, test"."""
        found = _NAME.fullmatch(name)
        if found is None or found["arm"] not in ARMS:
            raise ValueError(f"{name!r} names no run: write ARM, RATE with ARM one of {', '.join(ARMS)}")
        kinds: dict[str, Callable[[str], Any]] = {"size": str, "batch": int, "seed": int}
        kinds |= {"tokens": float, "warmup": float, "beta2": float}
        more = dict(part.split(" ") for part in found["more"].split(", ")[1:])
        if unknown := [key for key in more if key not in kinds]:
            raise ValueError(f"{name!r} sets {unknown[0]!r}: set {', '.join(kinds)}")
        values = {key: kinds[key](value) for key, value in more.items()}
        return cls(found["arm"], float(found["rate"]), test=bool(found["test"]), **values)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Tuned":
        """The run that a record is of."""
        same = {key: record[key] for key in ("size", "batch", "seed", "warmup")}
        tokens, beta2 = record["tokens_per_parameter"], record["config"]["optim"]["beta2"]
        return cls(
            record["name"], record["peak_rate"], tokens=tokens, beta2=beta2, test="test" in record, **same
        )

    @property
    def name(self) -> str:
        """Return the arm, the rate, and what is not as usual."""
        usual = {"size": Tuned.size, "batch": SIZES[self.size].batch}
        usual |= {key: getattr(Tuned, key) for key in ("seed", "tokens", "warmup", "beta2")}
        differs = {key: value for key in usual if (value := getattr(self, key)) != usual[key]}
        more = [f"{key} {value if key == 'size' else f'{value:g}'}" for key, value in differs.items()]
        return ", ".join([self.arm, f"{self.rate:g}", *more, *["test"] * self.test])

    @property
    def slug(self) -> str:
        name = f"{self.size} {self.arm} rate {self.rate:g} batch {self.batch} seed {self.seed}"
        name += f" tokens {self.tokens:g} warmup {self.warmup:g} beta2 {self.beta2:g}"
        name += " test" if self.test else ""
        return re.sub(r"[^a-z0-9.]+", "-", name)

    def _run(self, settings: Mapping[str, Any]) -> Run:
        arm = ARMS[self.arm]
        return Run(arm.model, arm.of_recipe, self.size, arm.k, self.seed, settings)

    @property
    def row_lazy(self) -> bool:
        return self._run({}).row_lazy

    @property
    def steps(self) -> int:
        return int(self.tokens * layer_parameters(self.size) / (SIZES[self.size].sequence * self.batch))

    def seconds(self, processes: int = SIDE_BY_SIDE, done: int = 0) -> float:
        """Estimate how long it takes after the steps that are done, one of so many processes on one H200."""
        arm, sequence = ARMS[self.arm], SIZES[self.size].sequence
        settings = {"recipe": arm.of_recipe, "model.preset": preset_of(self.size, arm.k), **arm.settings}
        shape = RunConfig.load(None, [f"{key}={value}" for key, value in settings.items()]).model.shape()
        flops = (self.steps - done) * self.batch * sequence * train_flops(shape, sequence)
        return START + (TABLES_COST if arm.k else 1) * flops * processes / FLOPS

    def text(self, data: Path) -> Path:
        """Return the prepared text: of its own tokenizer, beside the usual one."""
        tokenizer = SIZES[self.size].tokenizer
        return data.with_name(f"{data.name}-{tokenizer}") if tokenizer else data

    def config(self, data: Path, gpu: bool) -> RunConfig:
        arm, steps = ARMS[self.arm], self.steps
        a_step = (self.seconds() - START) / steps
        settings = {
            "optim.max_lr": self.rate,
            "optim.min_lr": self.rate / 10,
            "optim.warmup_lr": self.rate / 100,
            "optim.warmup_steps": int(steps * self.warmup),
            "optim.beta2": self.beta2,
            "train.steps": steps,
            "train.batch": self.batch,
            "train.validate_every": -(-steps // 4),
            "train.checkpoint_every": min(max(int(LOST / a_step), 1), steps),
            "data.verify": "false",
            **arm.settings,
        }
        vocabulary = Manifest.read(data).vocab_size
        if vocabulary > presets.get(preset_of(self.size, 0)).model.vocab_size:
            settings["model.vocab_size"] = vocabulary
        return self._run(settings).config(data, gpu)


def prepare_all(shared: Path, out: Path, tokenizer: str | None) -> Manifest:
    """Encode all text but the test split, which is put beside it as it is.

    A tokenizer is trained on every fourth document of what is encoded.
    """
    untouched = test_split.documents(shared)
    settings = Settings("corpus and more", tokenizer, 32_768, validation=0.0)
    training = test_split.training(shared)
    sample = [sources.Part(part.name, partial(_every_fourth, part)) for part in training]
    held_out = sources.parts(str(shared / "corpus" / VALIDATION))
    manifest = prepare_corpus(Both(training, held_out), sample, settings, out)
    test_reading.write(untouched, out)
    return manifest


def _every_fourth(part: sources.Part) -> Iterator[sources.Document]:
    yield from islice(part.documents(), 0, None, 4)


def train_one(run: Tuned, data: Path, scratch: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """Train a run, and return its record."""
    import torch

    from studies.controls import CONTROLS
    from studies.designs import DESIGNS
    from studies.nulls import NULLS, embedding_as_table
    from studies.rivals import RIVALS
    from tide_lm.model import TideForCausalLM
    from tide_lm.training.trainer import Trainer

    started, folder, arm, data = time.monotonic(), scratch / run.slug, ARMS[run.arm], run.text(data)
    config = run.config(data, torch.cuda.is_available())
    build = (CONTROLS | NULLS | DESIGNS | RIVALS).get(arm.model, TideForCausalLM)
    trainer = Trainer(config, folder, tell, resume=True, make_model=build, row_lazy=run.row_lazy)
    if arm.model == FAST_EMBEDDING:
        weight = trainer.model.model.embed_tokens.weight
        embedding_as_table(trainer.optimizer, weight, config.optim.table_lr_multiple)
    layers = sum(parameter.numel() for parameter in trainer.model.model.layers.parameters())
    tables = trainer.model.model.tables
    tokens = config.train.steps * config.train.batch * config.data.sequence
    record = {
        "name": run.arm,
        "model": arm.model,
        "recipe": arm.recipe,
        "size": run.size,
        "k": arm.k,
        "seed": run.seed,
        "tokens": tokens,
        "tokens_per_parameter": round(tokens / layer_parameters(run.size), 2),
        "passes": round(tokens / len(TokenSplit(data, "train")), 3),
        "peak_rate": run.rate,
        "batch": run.batch,
        "warmup": run.warmup,
        "layer_parameters": layers,
        "parameters": trainer.model.num_parameters(),
        "vocabulary": trainer.model.config.vocab_size,
        "table_bytes": 0 if tables is None else 2 * tables.weight.numel(),  # in 16 bits
    }
    try:
        validation = trainer.train()
    except ValueError as error:
        if not trainer.non_finite:
            raise
        tell(str(error))  # several steps in a row were not finite
        validation = {"loss": None, "loss_by_decile": None}
    if trainer.stopped_by:
        raise SystemExit(128 + trainer.stopped_by)
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line) for line in lines]
    record |= {
        "val_loss": validation["loss"],
        "loss_by_decile": validation["loss_by_decile"],
        "tokens_by_decile": validation.get("tokens_by_decile"),
        "curve": [(m["tokens"], m["validation"]["loss"]) for m in metrics if "validation" in m],
        "seconds": round(time.monotonic() - started, 1),
        "tokens_per_s": metrics[-1]["timing"]["tokens_per_s"] if metrics else None,
        "config": config.to_dict(),
    }
    if run.test:
        record["test"] = test_reading.read(trainer, data) if validation["loss"] else []
    del trainer
    torch.compiler.reset()  # after a few shapes it would compile no more
    gc.collect()
    torch.cuda.empty_cache()
    shutil.rmtree(folder)
    return record


def train_all(
    plan: Sequence[Tuned], data: Path, scratch: Path, kept: Path, until: float, tell: Callable[[str], None]
) -> None:
    """Train what is not kept yet and no other process is at; begin nothing after the time `until`."""
    for run in plan:
        if time.time() <= until:
            train_kept(run, data, scratch, kept, tell)


def train_kept(
    run: Tuned, data: Path, scratch: Path, kept: Path, tell: Callable[[str], None], quiet: bool = False
) -> bool:
    """Train a run unless it is kept, and return whether it is; it is not while another process is at it."""
    scratch.mkdir(parents=True, exist_ok=True)
    done = kept / f"{run.slug}.json"
    with ExitStack() as held:
        try:
            lock = files.locked(scratch / f"{run.slug}.lock", f"{run.name} is left to another process")
            held.enter_context(lock)
        except ValueError as busy:
            if not quiet:
                tell(str(busy))
            return False
        if not done.exists():
            record = train_one(run, data, scratch, tell)
            write_record(done, record, run.seed)
            tell(f"{run.name}: loss {record['val_loss']} after {record['seconds']} s")
    return True


def collect(kept: Path, out: Path) -> int:
    """Put the records of a folder into one file, a line each, and return their number."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(kept.glob("*.json"))]
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    files.write_atomically(out, "".join(lines))
    return len(records)


if __name__ == "__main__":
    from studies.optimum_commands import main

    main()
