"""The study at the optimum: each arm at its own best rate, at 20 tokens for each parameter of the layers.

`python -m studies.optimum prepare SHARED` encodes the old and the new text without the test split, and
`python -m studies.optimum run NAME ...` trains runs by name, such as "base, 0.004". Processes side by side
share them out. Each run leaves one JSON file, and `collect` puts these into one, a line each.
"""

import gc
import json
import math
import re
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from studies import test_split
from studies.data import VALIDATION, Both
from studies.plan import GAIN, NARROW, RATE, SCALE, SIZES, VALUES, Run
from tide_lm.data import sources
from tide_lm.data.prepare import Settings, prepare_corpus
from tide_lm.data.shards import Manifest, TokenSplit
from tide_lm.run import files
from tide_lm.run.provenance import write_record
from tide_lm.run.settings import RunConfig
from tide_lm.spec import presets
from tide_lm.spec.estimate import count_parameters

TOKENS_PER_PARAMETER = 20

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
    "pairs one hash": Arm("pair-rows", "pairs by one hash", 8, _IN_VALUES),
    "pairs in three": Arm("pair-rows-of-three", "3 V rows of pairs, 2 blocks a row", 4, _IN_VALUES),
    "pairs in seven": Arm("pair-rows-of-seven", "7 V rows of pairs, 1 block a row", 2, _IN_VALUES),
    "pairs by three hashes": Arm("pair-rows-by-three-hashes", "pairs by three hashes", 8, _IN_VALUES),
    "scalars": Arm("scalars", "scalars", 8, _IN_VALUES),
    "narrow gate": Arm("narrow-gate", "narrow gate, pairs", 8, _IN_VALUES),
    "row gates": Arm("row-gates", "gates for rows, convolution, pairs", 8, _IN_VALUES),
}
_NAME = re.compile(r"(?P<arm>[^,]+), (?P<rate>[\d.e-]+)(?P<more>(, \w+ [\w.]+)*)")


def layer_parameters(size: str) -> int:
    """The parameters of the base's layers."""
    model = presets.get(f"base-{size}").model
    return count_parameters(model).backbone - (model.vocab_size + 1) * model.hidden_size


@dataclass(frozen=True)
class Tuned:
    """One run of an arm; `tokens` are for each parameter of the base's layers, and 0 is the size's batch."""

    arm: str
    rate: float
    size: str = "6m"
    batch: int = 0
    seed: int = 0
    tokens: float = TOKENS_PER_PARAMETER
    warmup: float = 0.1
    beta2: float = 0.95

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch", self.batch or SIZES[self.size].batch)

    @classmethod
    def named(cls, name: str) -> "Tuned":
        """The run of a name such as "best, 0.004" or "base, 0.004, batch 32, seed 1"."""
        found = _NAME.fullmatch(name)
        if found is None or found["arm"] not in ARMS:
            raise ValueError(f"{name!r} names no run: write ARM, RATE with ARM one of {', '.join(ARMS)}")
        kinds: dict[str, Callable[[str], Any]] = {"size": str, "batch": int, "seed": int}
        kinds |= {"tokens": float, "warmup": float, "beta2": float}
        more = dict(part.split(" ") for part in found["more"].split(", ")[1:])
        if unknown := [key for key in more if key not in kinds]:
            raise ValueError(f"{name!r} sets {unknown[0]!r}: set {', '.join(kinds)}")
        return cls(found["arm"], float(found["rate"]), **{k: kinds[k](value) for k, value in more.items()})

    @property
    def slug(self) -> str:
        name = f"{self.size} {self.arm} rate {self.rate:g} batch {self.batch} seed {self.seed}"
        name += f" tokens {self.tokens:g} warmup {self.warmup:g} beta2 {self.beta2:g}"
        return re.sub(r"[^a-z0-9.]+", "-", name)

    def _run(self, settings: Mapping[str, Any]) -> Run:
        arm = ARMS[self.arm]
        return Run(arm.model, arm.of_recipe, self.size, arm.k, self.seed, settings)

    @property
    def row_lazy(self) -> bool:
        return self._run({}).row_lazy

    def config(self, data: Path, gpu: bool) -> RunConfig:
        arm, sequence = ARMS[self.arm], SIZES[self.size].sequence
        steps = int(self.tokens * layer_parameters(self.size) / (sequence * self.batch))
        settings = {
            "optim.max_lr": self.rate,
            "optim.min_lr": self.rate / 10,
            "optim.warmup_lr": self.rate / 100,
            "optim.warmup_steps": int(steps * self.warmup),
            "optim.beta2": self.beta2,
            "train.steps": steps,
            "train.batch": self.batch,
            "train.validate_every": -(-steps // 4),
            "train.checkpoint_every": steps,
            "data.verify": "false",
            **arm.settings,
        }
        vocabulary = Manifest.read(data).vocab_size
        if vocabulary > presets.get(f"base-{self.size}").model.vocab_size:
            settings["model.vocab_size"] = vocabulary
        return self._run(settings).config(data, gpu)


def prepare_all(shared: Path, out: Path, tokenizer: str | None) -> Manifest:
    """Encode all text but the test split; a tokenizer is trained on every fourth document of it."""
    settings = Settings("corpus and more", tokenizer, 32_768, validation=0.0)
    training = test_split.training(shared)
    sample = [sources.Part(part.name, partial(_every_fourth, part)) for part in training]
    held_out = sources.parts(str(shared / "corpus" / VALIDATION))
    return prepare_corpus(Both(training, held_out), sample, settings, out)


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

    started, folder, arm = time.monotonic(), scratch / run.slug, ARMS[run.arm]
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
    scratch.mkdir(parents=True, exist_ok=True)
    for run in plan:
        done = kept / f"{run.slug}.json"
        if done.exists() or time.time() > until:
            continue
        with ExitStack() as held:
            try:
                lock = files.locked(scratch / f"{run.slug}.lock", f"{run.slug} is left to another process")
                held.enter_context(lock)
            except ValueError as busy:
                tell(str(busy))
                continue
            if done.exists():  # by now
                continue
            record = train_one(run, data, scratch, tell)
            write_record(done, record, run.seed)
        tell(f"{run.slug}: loss {record['val_loss']} after {record['seconds']} s")


def collect(kept: Path, out: Path) -> int:
    """Put the records of a folder into one file, a line each, and return their number."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(kept.glob("*.json"))]
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    files.write_atomically(out, "".join(lines))
    return len(records)


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file, one per line, by size, arm, tokens, batch, warm-up, beta2, rate and seed."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return sorted(records, key=_order)


def _order(r: Mapping[str, Any]) -> tuple[Any, ...]:
    schedule = -r["batch"], -r["warmup"], beta2(r), r["peak_rate"]
    return list(SIZES).index(r["size"]), r["name"], r["tokens"], *schedule, r["seed"]


def beta2(record: Mapping[str, Any]) -> float:
    """How long the optimiser remembers squares."""
    return float(record["config"]["optim"]["beta2"])


def best_losses(records: Sequence[Mapping[str, Any]], arm: str, size: str = Tuned.size) -> dict[int, float]:
    """The loss of an arm by its tokens: at the rate and beta2 that are best there, the mean over its seeds.

    A rate at which a seed was not finite does not count.
    """
    usual = arm, size, SIZES[size].batch, Tuned.warmup
    losses = defaultdict[int, dict[tuple[float, float], list[float]]](lambda: defaultdict(list))
    for record in records:
        if (record["name"], record["size"], record["batch"], record["warmup"]) == usual:
            loss = math.inf if record["val_loss"] is None else record["val_loss"]
            losses[record["tokens"]][record["peak_rate"], beta2(record)].append(loss)
    best = {tokens: min(map(fmean, rates.values())) for tokens, rates in sorted(losses.items())}
    return {tokens: loss for tokens, loss in best.items() if math.isfinite(loss)}


def tokens_needed(losses: Mapping[int, float], loss: float) -> float | None:
    """The tokens at which a line through runs, straight over log tokens, comes to a loss.

    It is None if no two neighbouring runs have the loss between them: the line is not drawn any further.
    """
    for (fewer, higher), (more, lower) in pairwise(sorted(losses.items())):
        if lower <= loss <= higher and lower < higher:
            return fewer * (more / fewer) ** ((higher - loss) / (higher - lower))
    return None


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Write all runs as a Markdown table, with validation losses."""
    columns = "size", "arm", "tokens per parameter", "batch", "warm-up", "beta2", "peak rate", "seed"
    columns += "loss", "rarest", "commonest"
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for r in records:
        shown = "not finite | |"
        if r["val_loss"] is not None:
            losses = (r["val_loss"], r["loss_by_decile"][0], r["loss_by_decile"][-1])
            shown = " | ".join(f"{loss:.3f}" for loss in losses)
        lines.append(
            f"| {r['size']} | {r['name']} | {r['tokens_per_parameter']:g} | {r['batch']} | {r['warmup']:g} "
            f"| {beta2(r):g} | {r['peak_rate']:g} | {r['seed']} | {shown} |"
        )
    return "\n".join(lines)


app = typer.Typer(help="The study at the optimum.", no_args_is_help=True, add_completion=False)
_DATA = Annotated[Path, typer.Option("--data", help="Prepared data.")]
_KEPT = Annotated[Path, typer.Option("--kept", help="The folder for a JSON file per run.")]


@app.command()
def prepare(
    shared: Annotated[Path, typer.Argument(help="A folder with the folders corpus and more.")],
    out: _DATA = Path("data/optimum"),
    tokenizer: Annotated[str | None, typer.Option("--tokenizer", help="One that is trained already.")] = None,
) -> None:
    """Encode the text without the test split."""
    made = prepare_all(shared, out, tokenizer)
    tokens = {split: sum(shard.tokens for shard in shards) for split, shards in made.splits.items()}
    typer.echo(f"{out}: {made.vocab_size:,} ids; " + ", ".join(f"{n:,} to {s}" for s, n in tokens.items()))


@app.command()
def run(
    names: Annotated[list[str], typer.Argument(help='Runs in their order, such as "base, 0.004".')],
    data: _DATA = Path("data/optimum"),
    scratch: Annotated[Path, typer.Option("--scratch", help="Where models are trained.")] = Path(
        "runs/optimum"
    ),
    kept: _KEPT = Path("runs/optimum-kept"),
    seconds: Annotated[float, typer.Option("--seconds", help="Begin no run later than that.")] = 1e9,
    processes: Annotated[
        int, typer.Option("--processes", min=1, help="Processes side by side: six fill a large GPU.")
    ] = 1,
) -> None:
    """Train the runs that are not done yet; stopped by a signal, they go on when it is called again."""
    plan, begun = [Tuned.named(name) for name in names], time.time()
    if processes == 1:
        train_all(plan, data, scratch, kept, begun + seconds, typer.echo)
        return
    options = {"--data": data, "--scratch": scratch, "--kept": kept, "--seconds": seconds}
    words = [str(word) for option in options.items() for word in option]
    command = [sys.executable, "-u", "-m", "studies.optimum", "run", *names, *words]
    from studies.runner import side_by_side

    raise typer.Exit(side_by_side(processes, command, scratch, typer.echo))


@app.command(name="collect")
def collect_records(
    out: Annotated[Path, typer.Argument(help="The file to write, one record per line.")],
    kept: _KEPT = Path("runs/optimum-kept"),
) -> None:
    """Put the records of all runs into one file."""
    typer.echo(f"{out}: {collect(kept, out)} runs")


@app.command()
def show(
    records: Annotated[Path, typer.Argument(help="What `collect` wrote.")] = Path(
        "results/study/optimum.jsonl"
    ),
) -> None:
    """Print all runs, and the tokens that each arm saves at the loss of the base with most tokens."""
    found = read(records)
    typer.echo(table(found))
    tokens, loss = list(best_losses(found, "base").items())[-1]
    for arm in ARMS:
        if needed := tokens_needed(best_losses(found, arm), loss):
            typer.echo(
                f"{arm}: {needed:,.0f} tokens for {loss:.4f}; the base's / these: {tokens / needed:.2f}"
            )


if __name__ == "__main__":
    try:
        app()
    except ValueError as error:
        sys.exit(f"Error: {error}")
