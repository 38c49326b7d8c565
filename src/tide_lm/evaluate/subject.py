"""A model to look at, and all that belongs to it: tokenizer, frequency bins, the place of its results."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tide_lm import checkpoint
from tide_lm.data.frequency import FrequencyBins
from tide_lm.model import TideConfig, TideForCausalLM
from tide_lm.runs import RunDirectory


@dataclass(frozen=True)
class Subject:
    """`run` is the folder whose results/ it fills; `sequence` and `data` are of its training, if known."""

    name: str
    run: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    frequencies: FrequencyBins | None
    sequence: int | None = None
    data: Path | None = None
    step: int | None = None
    tokens: int | None = None

    @property
    def bins(self) -> FrequencyBins:
        if self.frequencies is None:
            raise ValueError(
                f"how often each token occurs is not known for {self.name}: give --counts, prepared data or "
                "a file of counts"
            )
        return self.frequencies

    @property
    def tide(self) -> TideForCausalLM:
        """The model, if it has memory."""
        if not isinstance(self.model, TideForCausalLM) or self.model.model.memory is None:
            raise ValueError(f"{self.name} has no memory, which this needs: give a TIDE model")
        return self.model


def open_subject(
    model: str, *, step: int | None = None, counts: Path | None = None, run: Path | None = None
) -> Subject:
    """The model of a run (its export, or the checkpoint at a step), of a folder, or of the Hub.

    Counts are those of the data that the run was trained on, unless they are given.
    """
    owner = owning_run(model)
    if owner is None and step is not None:
        raise ValueError(f"{model} is not a run of tide-lm, and has no checkpoint of step {step}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if owner is None:
        loaded, tokenizer = _load_folder(model)
        frequencies = _frequencies(counts, tokenizer, loaded)
        return Subject(
            Path(model).name,
            run or Path("runs") / Path(model).name,
            loaded.to(device),
            tokenizer,
            frequencies,
        )
    settings = RunDirectory(owner).read_config() or {}
    data = Path(settings["data"]["path"])
    state: dict[str, Any] = {}
    if step is None and _inside(model, owner) == "checkpoints":
        step = int(Path(model).name)
    if step is None and (owner / "export").exists():
        loaded, tokenizer = _load_folder(str(owner / "export"))
    else:
        loaded, state = _load_checkpoint(owner, step)
        tokenizer = AutoTokenizer.from_pretrained(_prepared(data) / "tokenizer")
    if counts is None and data.exists():
        counts = data
    return Subject(
        owner.name,
        run or owner,
        loaded.to(device),
        tokenizer,
        _frequencies(counts, tokenizer, loaded),
        settings["data"]["sequence"],
        data if data.exists() else None,
        state.get("step"),
        state.get("tokens"),
    )


def owning_run(model: str) -> Path | None:
    """The run directory that a path is, or is in as an export or a checkpoint."""
    path = Path(model)
    for folder in (path, path.parent, path.parent.parent):
        try:
            if "train" in json.loads((folder / "config.json").read_text(encoding="utf-8")):
                return folder
        except (OSError, ValueError):
            continue
    return None


def _inside(model: str, run: Path) -> str:
    """`checkpoints` for a checkpoint of the run."""
    return "checkpoints" if Path(model).parent == run / "checkpoints" else ""


def _load_folder(folder: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """No code of the folder runs."""
    try:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto"
        ).eval(), AutoTokenizer.from_pretrained(folder)
    except (OSError, KeyError) as error:
        raise ValueError(
            f"{folder} cannot be opened as a model ({' '.join(str(error).split())[:200]}): give a run, a "
            "folder with config.json, weights and tokenizer, or a name on the Hugging Face Hub"
        ) from error


def _load_checkpoint(run: Path, step: int | None) -> tuple[PreTrainedModel, dict[str, Any]]:
    folder = RunDirectory(run).checkpoints
    found = checkpoint.steps(folder)
    if not found:
        raise ValueError(f"{run} has no checkpoint yet: train it")
    if step is None:
        step = found[-1]
    if step not in found:
        raise ValueError(f"{run} has no checkpoint of step {step}: it has {', '.join(map(str, found))}")
    path = checkpoint.at(folder, step)
    if fault := checkpoint.find_fault(path):
        raise ValueError(f"{path} is damaged ({fault}): choose another step of {', '.join(map(str, found))}")
    config = TideConfig.from_dict(checkpoint.read_state(path)["model"])
    with torch.device("meta"):
        model = TideForCausalLM(config)
    model.to_empty(device="cpu")
    model.tie_weights()
    state = checkpoint.load(path, {f"model.{name}": value.data for name, value in model.named_parameters()})
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffer is not saved
    return model.eval(), state


def _prepared(data: Path) -> Path:
    if not data.exists():
        raise ValueError(f"{data}, the data of the run, is not here: the tokenizer is in it")
    return data


def _frequencies(
    counts: Path | None, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> FrequencyBins | None:
    if counts is None:
        return None
    prepared = counts.is_dir()
    found = (
        FrequencyBins.from_prepared(counts) if prepared else FrequencyBins.from_counts_file(counts, tokenizer)
    )
    return found.extended(model.get_input_embeddings().num_embeddings)
