"""The paper's eight zero-shot tasks: where their records are, and what a model is asked about each record.

Datasets, texts and metrics are those of lm-eval 0.4.13.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from tide_lm.data.sources import json_lines
from tide_lm.run.optional import require
from tide_lm.spec.names import suggestion

HUB = "hub"
LAMBADA = "lambada_openai"
Record = dict[str, Any]


class Item(NamedTuple):
    """A context and the choices that may follow it after a space; `right` is the place of the right one."""

    context: str
    choices: list[str]
    right: int


@dataclass(frozen=True)
class Task:
    """A task: `dataset` is its path and configuration on the Hub, and `item` reads one of its records.

    `splits` are the split to score and then a stand-in.
    """

    title: str
    dataset: tuple[str, str | None]
    metric: str
    splits: tuple[str, ...]
    item: Callable[[Record], Item]


def _arc(record: Record) -> Item:
    return _lettered(f"Question: {record['question']}\nAnswer:", record)


def _lettered(context: str, record: Record) -> Item:
    choices = record["choices"]
    return Item(context, choices["text"], choices["label"].index(record["answerKey"].lstrip()))


def _boolq(record: Record) -> Item:
    context = f"{record['passage']}\nQuestion: {record['question']}?\nAnswer:"
    return Item(context, ["no", "yes"], int(record["label"]))


def _hellaswag(record: Record) -> Item:
    context = f"{record['activity_label']}: {record['ctx_a']} {record['ctx_b'].capitalize()}"
    return Item(_unmarked(context), [_unmarked(ending) for ending in record["endings"]], int(record["label"]))


def _unmarked(text: str) -> str:
    """Remove WikiHow's marks in brackets; the mark of a title becomes the end of a sentence."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _lambada(record: Record) -> Item:
    context, _, word = record["text"].rpartition(" ")
    return Item(context, [word], 0)


def _openbookqa(record: Record) -> Item:
    return _lettered(record["question_stem"], record)


def _piqa(record: Record) -> Item:
    context = f"Question: {record['goal']}\nAnswer:"
    return Item(context, [record["sol1"], record["sol2"]], int(record["label"]))


def _sciq(record: Record) -> Item:
    context = f"{record['support'].lstrip()}\nQuestion: {record['question']}\nAnswer:"
    return Item(context, [*(record[f"distractor{i}"] for i in (1, 2, 3)), record["correct_answer"]], 3)


TASKS = {  # in the order of the paper's columns
    "arc_challenge": Task("ARC-C", ("allenai/ai2_arc", "ARC-Challenge"), "acc_norm", ("test",), _arc),
    "arc_easy": Task("ARC-E", ("allenai/ai2_arc", "ARC-Easy"), "acc_norm", ("test",), _arc),
    "boolq": Task("BoolQ", ("aps/super_glue", "boolq"), "acc", ("validation",), _boolq),
    "hellaswag": Task("HellaSwag", ("Rowan/hellaswag", None), "acc_norm", ("validation",), _hellaswag),
    LAMBADA: Task("LAMBADA", ("EleutherAI/lambada_openai", "default"), "acc", ("test",), _lambada),
    "openbookqa": Task("OBQA", ("allenai/openbookqa", "main"), "acc_norm", ("test",), _openbookqa),
    "piqa": Task("PIQA", ("baber/piqa", None), "acc_norm", ("validation",), _piqa),
    "sciq": Task("SciQ", ("allenai/sciq", None), "acc_norm", ("test", "validation"), _sciq),
}


def check(source: str | Path, tasks: Sequence[str] = tuple(TASKS)) -> list[str]:
    """Check that tasks are known and have records; return them in the order of the paper's columns."""
    choice = f"choose from {', '.join(TASKS)}"
    for name in tasks:
        if name not in TASKS:
            raise ValueError(f"unknown task {name!r}: {suggestion(name, TASKS, choice)}")
    if not tasks:
        raise ValueError(f"no task is named: {choice}")
    chosen = [name for name in TASKS if name in tasks]
    for name in chosen:
        _records(source, name)
    return chosen


def read_items(source: str | Path, name: str, limit: int | None = None) -> tuple[str, list[Item]]:
    """Return the split of a task that is scored, and its first items or all, from a folder or the Hub.

    A folder holds `<task>_<split>.jsonl` or `.jsonl.gz`, with the fields of the dataset on the Hub.
    """
    split, records = _records(source, name)
    items = [_item(name, place, record) for place, record in islice(records, limit)]
    if not items:
        raise ValueError(f"{source} holds no records of {name}, {split}: put them there, one a line")
    return split, items


def _records(source: str | Path, name: str) -> tuple[str, Iterator[tuple[str, Any]]]:
    """Return a split and its records, each with the place that it is from; nothing is read as yet."""
    splits, folder = TASKS[name].splits, Path(source)
    if source == HUB:
        load = require("datasets", "the benchmarks of the Hub").load_dataset
        return splits[0], _from_hub(load, *TASKS[name].dataset, splits[0])
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: give one that holds the benchmarks, or {HUB}")
    for split in splits:
        for ending in ("jsonl", "jsonl.gz"):
            if (path := folder / f"{name}_{split}.{ending}").exists():
                return split, json_lines(path)
    raise ValueError(
        f"{folder} has no {' or '.join(f'{name}_{split}.jsonl' for split in splits)}, plain or .gz: add it, "
        "or name the tasks that are there with --tasks"
    )


def _from_hub(
    load: Callable[..., Any], dataset: str, config: str | None, split: str
) -> Iterator[tuple[str, Any]]:
    try:
        records = load(dataset, config, split=split)
    except Exception as error:  # datasets and the Hub's client all have their own
        cause = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ValueError(
            f"{dataset} cannot be read from the Hub ({cause}): check the connection, or give a folder"
        ) from error
    for row, record in enumerate(records, 1):
        yield f"{dataset}:{row}", record


def _item(name: str, place: str, record: Any) -> Item:
    try:
        item = TASKS[name].item(record)
        if not all(isinstance(text, str) for text in (item.context, *item.choices)):
            raise TypeError("its context or a choice is no text")
        if not 0 <= item.right < len(item.choices):
            raise IndexError(f"the right choice is number {item.right} from 0, of {len(item.choices)}")
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"{place}, {str(record)[:80]!r}, is no record of {name} ({type(error).__name__}: {error}): give "
            f"it the fields of the Hugging Face dataset {TASKS[name].dataset[0]}"
        ) from error
    return item
