"""One run of the study: train, evaluate and diagnose it, and keep all but its weights."""

import gc
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from studies import results
from studies.controls import CONTROLS
from studies.plan import SIZES, Run
from tide_lm.analysis.analyze import OF_MEMORY, Analysis, AnalysisSettings, analyze
from tide_lm.compress.measure import measure
from tide_lm.evaluation import zero_shot
from tide_lm.evaluation.texts import TextSettings, evaluate_checkpoints, evaluate_texts, write_texts
from tide_lm.model import TideForCausalLM
from tide_lm.model.opened import OpenedModel, open_model
from tide_lm.run import files
from tide_lm.run.directory import write_result
from tide_lm.run.settings import RunConfig, compare
from tide_lm.training.trainer import Trainer

BENCHMARK_RECORDS = 1000  # of each task
WORDS = ("zinc", "Fred")  # rare and common, each one token
MAY_DIFFER = ("data.path", "train.dtype", "train.compile")
TEXTS = {  # of the folder with the shared data
    "wikitext": "wikitext/wikitext2_raw_test.txt.xz",
    "pubmed": "pubmed/pubmed_abstracts_test.jsonl.xz",
    "web": "web/c4_sample_test.jsonl.xz",
}


@dataclass(frozen=True)
class Places:
    """Prepared data, the texts and benchmarks to evaluate on, and where runs are made and kept."""

    data: Path
    shared: Path
    scratch: Path
    kept: Path

    def config(self, run: Run) -> RunConfig:
        return run.config(self.data, gpu=torch.cuda.is_available())

    def lock(self, run: Run) -> AbstractContextManager[None]:
        """Keep other processes out of a run."""
        self.scratch.mkdir(parents=True, exist_ok=True)
        return files.locked(self.scratch / f"{run.slug}.lock", f"{run.name} is left to another process")

    def check(self) -> None:
        """Raise ValueError unless the data and all texts and benchmarks are there."""
        for path in (self.data, *(self.shared / text for text in TEXTS.values()), self.shared / "benchmarks"):
            if not path.exists():
                raise ValueError(
                    f"there is no {path}: prepare data with `python -m studies prepare`, and name the folder "
                    f"that holds benchmarks and {', '.join(TEXTS.values())}"
                )

    def done(self, run: Run) -> results.Kept | None:
        """Return a run that is kept; raise ValueError if its settings are not those of the plan."""
        found = results.read(self.kept, run.slug)
        if not found:
            return None
        changes = compare(found[0].config, self.config(run))
        changed = [str(change) for change in changes if change.name not in MAY_DIFFER]
        if changed:
            raise ValueError(
                f"{run.slug} in {self.kept / results.RUNS} has other settings ({'; '.join(changed)}): remove "
                "its line, or name another folder with --kept"
            )
        return found[0]


def run_all(plan: Iterable[Run], places: Places, minutes: float, log: Callable[[str], None]) -> int:
    """Train the runs that are not done while time is left, and return how many remain.

    A run is begun only if there is time for the longest so far that was like it or lighter. Processes side by
    side share the plan out: each takes what no other is at.
    """
    until, left = time.monotonic() + 60 * minutes, 0
    longest: dict[tuple[int, bool], float] = {}
    for run in plan:
        kind = list(SIZES).index(run.size), run.diagnose
        if done := places.done(run):
            longest[kind] = max(longest.get(kind, 0), done.record["seconds"])
            continue
        expected = max((taken for other, taken in longest.items() if other <= kind), default=0)
        started = time.monotonic()
        if started + expected > until:
            left += 1
            continue
        with ExitStack() as held:
            try:
                held.enter_context(places.lock(run))
            except ValueError as busy:
                log(str(busy))
                left += 1
                continue
            if places.done(run):  # by now
                continue
            log(f"{run.name} ...")
            record = run_one(run, places, log)
        longest[kind] = max(longest.get(kind, 0), time.monotonic() - started)
        log(f"{run.name}: loss {record['val_loss']:.4f} after {record['seconds']:.0f} s")
    return left


def side_by_side(processes: int, command: list[str], logs: Path, log: Callable[[str], None]) -> int:
    """Run a command several times at once, and return the worst exit status.

    Each has one thread on the CPU unless OMP_NUM_THREADS says more: threads of several slow each other down.
    """
    logs.mkdir(parents=True, exist_ok=True)
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    workers = []
    for number in range(processes):
        with (logs / f"process-{number}.log").open("ab") as file:
            workers.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment))
    log(f"{processes} processes write to {logs}/process-*.log")

    def pass_on(number: int, _: object) -> None:
        for worker in workers:
            worker.send_signal(number)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        statuses = [worker.wait() for worker in workers]
        return max(status if status >= 0 else 128 - status for status in statuses)
    finally:
        signal.signal(signal.SIGTERM, before)


def run_one(run: Run, places: Places, log: Callable[[str], None]) -> dict[str, Any]:
    """Train and measure a run; its record appears whole, and last."""
    places.check()
    started, folder = time.monotonic(), places.scratch / run.slug
    config = places.config(run)
    build = CONTROLS.get(run.model, TideForCausalLM)
    trainer = Trainer(config, folder, log, resume=True, make_model=build, row_lazy=run.row_lazy)
    validation = trainer.train()
    if trainer.stopped_by:
        raise SystemExit(128 + trainer.stopped_by)
    about = {
        "model": run.model,
        "recipe": run.recipe,
        "size": run.size,
        "k": run.k,
        "seed": run.seed,
        "tokens": config.train.steps * config.train.batch * config.data.sequence,
        "parameters": trainer.model.num_parameters(),
        "val_loss": validation["loss"],
        "loss_by_decile": validation["loss_by_decile"],
    }
    del trainer
    torch.compiler.reset()  # after a few shapes it would compile no more
    gc.collect()
    torch.cuda.empty_cache()
    texts = {name: places.shared / path for name, path in TEXTS.items()}
    settings = TextSettings(texts, window=config.data.sequence, stride=config.data.sequence // 2, batch=64)
    opened = open_model(str(folder))
    write_texts(opened, evaluate_texts(opened, settings))
    if run.diagnose:
        _diagnose(run, opened, settings, places.shared / "benchmarks", log)
    about["seconds"] = time.monotonic() - started
    results.add(places.kept, results.record(folder, about, run.seed))
    shutil.rmtree(folder)
    return about


def _diagnose(
    run: Run, opened: OpenedModel, settings: TextSettings, benchmarks: Path, log: Callable[[str], None]
) -> None:
    """Run the paper's diagnostics that are not there yet."""
    folder, held_out = opened.run, replace(settings, texts={})
    if not opened.result("checkpoints").exists():
        found = evaluate_checkpoints(str(folder), settings)
        write_result(folder, "checkpoints", {"subject": {"model": str(folder)}, **found})
    once = replace(settings, stride=settings.window)  # for what is read for each layer
    for what in Analysis:
        if opened.result(what.value).exists() or (what in OF_MEMORY and run.model != "tide"):
            continue
        started = time.monotonic()
        texts = once if what is Analysis.layer_drop else held_out
        opened.write(what.value, analyze(what, opened, AnalysisSettings(texts, words=WORDS)))
        log(f"{what.value} after {time.monotonic() - started:.0f} s")
    if run.model == "tide" and not opened.result("compression").exists():
        opened.write("compression", measure(opened, once))
    scores = zero_shot.score(opened.model, opened.tokenizer, benchmarks, limit=BENCHMARK_RECORDS)
    opened.write("benchmarks", scores)
