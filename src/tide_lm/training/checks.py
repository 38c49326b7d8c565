"""What can be found wrong, or strange, with a run before torch is loaded."""

import json
from pathlib import Path
from typing import Any

from tide_lm.data.shards import Manifest
from tide_lm.run import files
from tide_lm.run.directory import RunDirectory
from tide_lm.run.settings import MANY_EPOCHS, DataSection, ModelSection, RunConfig, compare
from tide_lm.spec.estimate import count_parameters

FOLDERS = ("data.path", "model.start")  # settings that may change: checksums identify the data


def check_run(run: RunDirectory, config: RunConfig, resume: bool, allow_changes: bool) -> None:
    """Check that a run can begin in this folder, or go on there, and that its data fit."""
    run.check_unused()
    check_folder(run, config, resume, allow_changes)
    files.check_writable(run.path)
    check_data(config.data, config.model)


def check_folder(run: RunDirectory, config: RunConfig, resume: bool, allow_changes: bool) -> None:
    """Check that a folder is free, or holds a run with these settings that is to be resumed."""
    run.check_free(resume)
    if (before := run.read_config()) is not None:
        check_changes(run, before, config, allow_changes)


def check_changes(run: RunDirectory, before: dict[str, Any], config: RunConfig, allow_changes: bool) -> None:
    """Refuse settings that differ from those of the run."""
    changes = compare(RunConfig.from_saved(before), config)
    changes = [change for change in changes if change.name not in FOLDERS]
    if fixed := [f"\n  {change}" for change in changes if change.is_fixed]:
        raise ValueError(f"{run.path} has begun, and cannot change{''.join(fixed)}")
    if changes and not allow_changes:
        lines = "".join(f"\n  {change}" for change in changes)
        raise ValueError(
            f"the settings differ from those of {run.path}:{lines}\nput them back, or add --allow-changes"
        )


def check_data(settings: DataSection, model: ModelSection) -> Manifest:
    """Return the manifest of prepared data; an error names what does not fit the model, and the cure."""
    folder = Path(settings.path)
    manifest = Manifest.read(folder)
    if not manifest.tokens("validation"):
        raise ValueError(f"{folder} has no validation split: prepare the data with a larger --validation")
    vocabulary = model.shape().vocab_size
    if manifest.vocab_size > vocabulary:
        raise ValueError(
            f"{folder} was tokenised with {manifest.vocab_size:,} ids, and {model.name} has only "
            f"{vocabulary:,}: "
            + ("" if model.start else f"set model.vocab_size={manifest.vocab_size}, ")
            + "choose a model with more, or prepare the data with a smaller tokenizer"
        )
    own, other = _tokens(folder / "tokenizer"), _tokens(Path(model.start)) if model.start else {}
    if other and len(own.items() & other.items()) < len(own) / 2:  # `open_inputs` compares all of them
        raise ValueError(other_tokenizer(folder, Path(model.start)))
    return manifest


def other_tokenizer(folder: Path, start: Path) -> str:
    return (
        f"{folder} was not prepared with the tokenizer of {start}: prepare the text again with "
        f"--tokenizer {start}"
    )


def _tokens(folder: Path) -> dict[str, int]:
    """Return the tokens of a folder's tokenizer.json, empty if it does not list them by name."""
    try:
        found = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def doubts(config: RunConfig, manifest: Manifest) -> list[str]:
    """Return what of a run might not be meant, each with the setting to change."""
    found, train, shape = [], config.train, config.model.shape()
    tokens, of_step = manifest.tokens("train"), train.batch * config.data.sequence
    epochs = round(train.steps * of_step / max(tokens, 1), 1)
    if epochs > MANY_EPOCHS:
        steps = max(MANY_EPOCHS * tokens // of_step, 1)
        found.append(
            f"the run reads the data {epochs:,} times, and learns little from more than {MANY_EPOCHS}: "
            f"prepare more text, or set train.steps={steps}"
        )
    used, has = manifest.vocab_size, shape.vocab_size
    if used < 0.9 * has and not config.model.start:
        parameters = count_parameters(shape)
        embeddings = shape.hidden_size * (1 if shape.tie_word_embeddings else 2)
        wasted = (has - used) * (embeddings + parameters.tables // has)
        found.append(
            f"the data use {used:,} of the model's {has:,} ids, and {wasted:,} of its {parameters.total:,} "
            f"parameters are for the others: set model.vocab_size={used}"
        )
    return found
