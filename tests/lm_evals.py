"""lm-eval's own scores of the paper's tasks, with records of a folder: what ours are compared with."""

import copy
import json
from pathlib import Path

from tide_lm.evaluation.tasks import TASKS

DEFINITIONS = {
    "arc_challenge": "arc/arc_challenge.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "lambada_openai": "lambada/lambada_openai.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "piqa": "piqa/piqa.yaml",
    "sciq": "sciq/sciq.yaml",
}


def definition(name: str) -> Path:
    import lm_eval.tasks

    return Path(lm_eval.tasks.__file__).parent / DEFINITIONS[name]


def write_tasks(folder: Path, out: Path, tasks) -> list[Path]:
    """Write lm-eval's tasks with the records of a folder, for `lm_eval --include_path OUT`."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name in tasks:
        found = (
            (split, path) for split in TASKS[name].splits for path in folder.glob(f"{name}_{split}.jsonl*")
        )
        split, records = next(found)
        task = {
            "include": str(definition(name)),
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
        path.write_text(json.dumps(task))  # JSON is YAML too
        written.append(path)
    return written


def scores(model, tokenizer, folder: Path, out: Path, limit: int, monkeypatch) -> dict:
    """Return what lm-eval finds, without the network."""
    import datasets.config
    from huggingface_hub import constants
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    for module in (constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)
    manager = TaskManager(include_defaults=False)
    loaded = {}
    for path in write_tasks(folder, out, TASKS):
        loaded[path.stem] = manager.load(str(path))["tasks"][path.stem]
        loaded[path.stem].set_config(key="num_fewshot", value=0)
    subject = HFLM(
        pretrained=model,
        tokenizer=copy.deepcopy(tokenizer),  # lm-eval may give it a token for padding
        backend="causal",
        batch_size=32,
    )
    wanted = {"tasks": loaded, "groups": {}, "group_map": {}}
    return evaluate(subject, wanted, limit=limit, bootstrap_iters=0, log_samples=False)
