"""The paper's eight zero-shot tasks, and LAMBADA's perplexity, through lm-eval.

The tasks are lm-eval's own: its definitions are included, not copied. Only the place of their records may
change, from the Hub to a folder of JSON lines. Prompts begin with BOS where the tokenizer itself adds one.
"""

import copy
import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tide_lm.run.optional import require
from tide_lm.run.provenance import installed_version

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HUB = "hub"
LAMBADA = "lambada_openai"


@dataclass(frozen=True)
class Task:
    """A task: `definition` is lm-eval's file, `splits` the split that it scores and then a stand-in."""

    title: str
    definition: str
    metric: str
    splits: tuple[str, ...]


TASKS = {  # in the order of the paper's columns
    "arc_challenge": Task("ARC-C", "arc/arc_challenge.yaml", "acc_norm", ("test",)),
    "arc_easy": Task("ARC-E", "arc/arc_easy.yaml", "acc_norm", ("test",)),
    "boolq": Task("BoolQ", "super_glue/boolq/default.yaml", "acc", ("validation",)),
    "hellaswag": Task("HellaSwag", "hellaswag/hellaswag.yaml", "acc_norm", ("validation",)),
    LAMBADA: Task("LAMBADA", "lambada/lambada_openai.yaml", "acc", ("test",)),
    "openbookqa": Task("OBQA", "openbookqa/openbookqa.yaml", "acc_norm", ("test",)),
    "piqa": Task("PIQA", "piqa/piqa.yaml", "acc_norm", ("validation",)),
    "sciq": Task("SciQ", "sciq/sciq.yaml", "acc_norm", ("test", "validation")),
}


def check(source: str, tasks: Sequence[str] = tuple(TASKS)) -> None:
    """Check names, definitions and records, before a model is loaded."""
    for name in in_order(tasks):
        _definition(name)
        if source != HUB:
            find_records(Path(source), name)


def in_order(tasks: Sequence[str]) -> list[str]:
    """Return the names of tasks in the order of the paper's columns, each once."""
    if not tasks:
        raise ValueError(f"no task is named: choose from {', '.join(TASKS)}")
    for name in tasks:
        if name not in TASKS:
            raise ValueError(f"unknown task {name!r}: choose from {', '.join(TASKS)}")
    return [name for name in TASKS if name in tasks]


def run(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    source: str,
    tasks: Sequence[str] = tuple(TASKS),
    *,
    batch: int = 8,
    limit: int | None = None,
) -> dict[str, Any]:
    """Return scores between 0 and 1; `source` is a folder or the Hub, `limit` the records per task.

    The average is that of all eight tasks, or None.
    """
    check(source, tasks)
    tasks = in_order(tasks)
    with TemporaryDirectory() as folder, _quiet(), nullcontext() if source == HUB else _offline():
        if source == HUB:
            paths = [_definition(name) for name in tasks]
        else:
            paths = write_tasks(Path(source), Path(folder), tasks)
        loaded = _load(tasks, paths, source)
        subject = _lm_eval("models.huggingface").HFLM(
            pretrained=model,
            tokenizer=copy.deepcopy(tokenizer),  # lm-eval may give it a token for padding
            backend="causal",
            batch_size=batch,
        )
        found = _lm_eval("evaluator").evaluate(
            subject,
            {"tasks": loaded, "groups": {}, "group_map": {}},
            limit=limit,
            bootstrap_iters=0,
            log_samples=False,
        )
    scores = {name: _score(name, found) for name in tasks}
    return {
        "tasks": scores,
        "average": average(scores),
        "lambada_perplexity": found["results"][LAMBADA]["perplexity,none"] if LAMBADA in scores else None,
        "limit": limit,
        "source": HUB if source == HUB else Path(source).resolve().name,
        "bos": subject.tok_encode("a")[0] == tokenizer.bos_token_id,
        "lm_eval": installed_version("lm_eval"),
    }


def write_tasks(folder: Path, out: Path, tasks: Sequence[str] = tuple(TASKS)) -> list[Path]:
    """Write lm-eval's tasks with the records of a folder, for `lm_eval --include_path OUT`.

    `folder` holds `<task>_<split>.jsonl` or `.jsonl.gz`, with the fields of the Hugging Face datasets.
    """
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name in tasks:
        split, records = find_records(folder, name)
        task = {
            "include": str(_definition(name)),
            "task": name,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {
                "data_files": {split: str(records.resolve())},
                "cache_dir": str(out.resolve() / "cache"),
            },
            "training_split": None,
            "validation_split": None,
            "test_split": None,
            f"{split}_split": split,
        }
        path = out / f"{name}.yaml"
        path.write_text(json.dumps(task, indent=2) + "\n", encoding="utf-8")  # JSON is YAML too
        written.append(path)
    return written


def _lm_eval(module: str) -> Any:
    return require(f"lm_eval.{module}", "evaluation on benchmarks", "eval")


def _definition(name: str) -> Path:
    path = Path(_lm_eval("tasks").__file__).parent / TASKS[name].definition
    if not path.exists():
        raise ValueError(
            f"lm-eval {installed_version('lm_eval')} does not define the task {name} at {path}: install "
            "lm-eval 0.4.13"
        )
    return path


def find_records(folder: Path, name: str) -> tuple[str, Path]:
    """Return the split and the file of a task's records."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: give one that holds the benchmarks, or {HUB}")
    splits = TASKS[name].splits
    for split in splits:
        for ending in ("jsonl", "jsonl.gz"):
            path = folder / f"{name}_{split}.{ending}"
            if path.exists():
                return split, path
    raise ValueError(
        f"{folder} has no {' or '.join(f'{name}_{split}.jsonl' for split in splits)}, plain or .gz: add it, "
        "or name the tasks that are there with --tasks"
    )


def _load(tasks: Sequence[str], paths: Sequence[Path], source: str) -> dict[str, Any]:
    """Load lm-eval's tasks with their records, zero-shot."""
    manager = _lm_eval("tasks").TaskManager(include_defaults=False)
    loaded = {}
    for name, path in zip(tasks, paths, strict=True):
        try:
            loaded[name] = manager.load(str(path))["tasks"][name]
        except Exception as error:  # jinja, datasets and the Hub's client all have their own
            cure = (
                "check the connection, or give a folder of records"
                if source == HUB
                else f"compare its fields with those of the Hugging Face dataset in {_definition(name)}"
            )
            cause = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise ValueError(
                f"the records of {name} cannot be read from {source} ({cause}): {cure}"
            ) from error
        loaded[name].set_config(key="num_fewshot", value=0)
    return loaded


def _score(name: str, found: dict[str, Any]) -> dict[str, Any]:
    config = found["configs"][name]
    return task_result(
        name,
        score=found["results"][name][f"{TASKS[name].metric},none"],
        samples=found["n-samples"][name]["effective"],
        split=config.get("test_split") or config["validation_split"],
    )


def task_result(name: str, score: float, samples: int, split: str) -> dict[str, Any]:
    return {
        "score": score,
        "metric": TASKS[name].metric,
        "stderr": math.sqrt(score * (1 - score) / (samples - 1)) if samples > 1 else None,
        "samples": samples,
        "split": split,
    }


def average(scores: dict[str, dict[str, Any]]) -> float | None:
    """Return the average of all eight tasks; that of fewer would not be the paper's."""
    if len(scores) < len(TASKS):
        return None
    return sum(score["score"] for score in scores.values()) / len(TASKS)


@contextmanager
def _quiet() -> Iterator[None]:
    """Show only the errors of lm-eval's log."""
    log = logging.getLogger("lm_eval")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


@contextmanager
def _offline() -> Iterator[None]:
    """Keep Hugging Face's libraries off the network; they have read their environment already."""
    from huggingface_hub import constants

    settings = [constants, require("datasets.config", "evaluation on benchmarks", "eval")]
    before = [module.HF_HUB_OFFLINE for module in settings]
    for module in settings:
        module.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for module, value in zip(settings, before, strict=True):
            module.HF_HUB_OFFLINE = value
