"""The one way to open a model, from a run, a checkpoint, a folder or the Hub, with all that belongs to it.

That is its tokenizer, the frequencies of its tokens, and the place of its results. Configurations and the
headers of weights are checked before anything is allocated; no code of a folder runs; nothing is unpickled.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import RepositoryNotFoundError, StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tide_lm.data import tokenizers
from tide_lm.data.frequency import FrequencyBins
from tide_lm.data.shards import Manifest
from tide_lm.model import TideConfig, TideForCausalLM
from tide_lm.model.loading import check_place, open_store
from tide_lm.run import checkpoint
from tide_lm.run.devices import check_device
from tide_lm.run.directory import (
    RunDirectory,
    check_exists,
    check_results,
    hint_for,
    name_of,
    owning_run,
    place_of_results,
    write_result,
)
from tide_lm.run.settings import RunConfig
from tide_lm.spec.config import ModelConfig, Place, Residence
from tide_lm.store.format import StoreError


class LacksError(ValueError):
    """A model lacks what is asked of it, such as a memory or the frequencies of its tokens."""


@dataclass(frozen=True)
class OpenedModel:
    """A model with its tokenizer; its weights and the frequencies of its tokens are read at the first use.

    `owner` is the run that trained it, and `run` the folder whose results/ it fills: usually the same.
    `sequence` and `data` describe its training, `step` and `tokens` its checkpoint, where they are known.
    A run that has not ended opens as its newest checkpoint, and `newest` is the step of that one.
    """

    name: str
    path: str
    run: Path
    config: PreTrainedConfig
    load: Callable[[], PreTrainedModel]
    tokenizer: PreTrainedTokenizerBase
    read_frequencies: Callable[[], FrequencyBins | None]
    owner: Path | None = None
    sequence: int | None = None
    data: Path | None = None
    step: int | None = None
    tokens: int | None = None
    newest: int | None = None
    device: str | None = None

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model with its weights, checked to be causal and to give finite logits."""
        device = torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # for the engine's graphs and kernel
        model = self.load().eval().to(device)
        ids_2T = torch.tensor([[0, 1, 0, 1], [0, 1, 0, 0]], device=model.device)  # they end differently
        with torch.no_grad():
            one, other = (model(ids_T[None], use_cache=False).logits[0, :-1].float() for ids_T in ids_2T)
        if not (one.isfinite().all() and other.isfinite().all()):
            raise ValueError(
                f"{self.name} gives logits that are not finite: its weights are damaged, or overflow"
            )
        rounding = 1e-5 if model.dtype == torch.float32 else 1e-2
        if (one - other).abs().max() > rounding * one.abs().max():
            raise ValueError(f"{self.name} sees the tokens that follow: give a causal language model")
        return model

    @property
    def vocabulary(self) -> int:
        return self.config.get_text_config().vocab_size

    @property
    def shape(self) -> ModelConfig:
        if not isinstance(self.config, LlamaConfig):
            raise LacksError(f"{self.name} is no Llama, and only that architecture is counted")
        return ModelConfig.from_values(self.config.to_dict())

    @cached_property
    def frequencies(self) -> FrequencyBins | None:
        return self.read_frequencies()

    @property
    def bins(self) -> FrequencyBins:
        if self.frequencies is None:
            missing = f" (its data, {self.data.absolute()}, are not here)" if self.data else ""
            raise LacksError(
                f"{self.name} has no token frequencies{missing}: give --counts, prepared data or a file "
                "of counts"
            )
        return self.frequencies

    @property
    def model_with_memory(self) -> TideForCausalLM:
        """The model; a ValueError if it has no memory."""
        self.check_memory()
        return self.model

    @property
    def has_memory(self) -> bool:
        return isinstance(self.config, TideConfig) and self.config.num_memory_blocks > 0

    @property
    def trained_rows(self) -> torch.Tensor | None:
        """Each token's row as trained, V x J x D; None in a packed model, and in one without memory."""
        weight = getattr(self.model.model.memory, "weight", None) if self.has_memory else None
        return None if weight is None else weight[: self.vocabulary]

    def check_memory(self) -> None:
        if not self.has_memory:
            raise LacksError(f"{self.name} has no memory, which this needs: give a TIDE model")

    def write(self, what: str, result: dict[str, Any], command: str | None = None) -> Path:
        """Write a result that says whose it is; a checkpoint's does not replace the run's.

        `command` makes it, if that is not the one that runs.
        """
        try:
            json.dumps(result, allow_nan=False)
        except ValueError as error:
            raise ValueError(f"{what} of {self.name} is not finite: its weights are damaged") from error
        whose = {"model": self.path, "step": self.step, "tokens": self.tokens}
        return write_result(self.run, self.result(what).stem, {"subject": whose, **result}, command=command)

    def result(self, what: str) -> Path:
        """Return the path of a result."""
        name = what if self.step is None else f"{what}-{self.step:08d}"
        return self.run / "results" / f"{name}.json"


def open_model(
    model: str,
    *,
    step: int | None = None,
    counts: Path | None = None,
    run: Path | None = None,
    memory: Residence | None = None,
    device: str | None = None,
    writes: bool = True,
) -> OpenedModel:
    """Open the model of a run (its export, or the checkpoint at a step), of a folder, or of the Hub.

    Without `counts`, token frequencies come from the run's training data or from a packed model's store.
    Without `device`, it is a GPU, if there is one. With `writes`, check that no other model has its results
    in the same place.
    """
    check_exists(model)
    if device is not None:
        check_device(device)
    owner, inner = owning_run(model)
    step = inner if step is None else step
    name, place = name_of(model), place_of_results(model, run)
    if writes:
        check_results(place, model)
    if owner is None:
        if step is not None:
            raise ValueError(f"{model} is not a run of tide-lm, and has no checkpoint of step {step}")
        config, tokenizer = _open_folder(model)
        frequencies = partial(_frequencies, counts, model, tokenizer, config)
        load = partial(_load_folder, model, config, memory)
        return OpenedModel(name, model, place, config, load, tokenizer, frequencies, device=device)
    settings = RunDirectory(owner).read_config() or {}
    data, export = Path(settings["data"]["path"]), owner / "export"
    state: dict[str, Any] = {}
    if step is None and export.exists():
        config, tokenizer = _open_folder(str(export))
        load = partial(_load_folder, str(export), config, memory)
    elif memory is not None and memory.place != Place.device:
        raise ValueError(
            f"checkpoints are not packed, so --memory {memory.place} is not possible: leave it out"
        )
    elif not data.exists():
        raise ValueError(
            f"{data.absolute()}, the data of the run, is missing, and its tokenizer is needed: restore it"
        )
    else:
        path = _whole_checkpoint(owner, step)
        state = checkpoint.read_state(path)
        config = TideConfig.from_dict(state["model"])
        tokenizer = tokenizers.load(str(data / "tokenizer"))
        RunConfig.from_saved(state["config"])  # names what this version cannot open
        load = partial(_load_checkpoint, path, config)
    if counts is None and data.exists():
        counts = data
    return OpenedModel(
        name=name,
        path=model,
        run=place,
        config=config,
        load=load,
        tokenizer=tokenizer,
        read_frequencies=partial(_frequencies, counts, model, tokenizer, config),
        owner=owner,
        sequence=settings["data"]["sequence"],
        data=data,
        step=state.get("step") if step is not None else None,
        tokens=state.get("tokens"),
        newest=state.get("step") if step is None else None,
        device=device,
    )


def open_config(folder: str, name: str | None = None) -> PreTrainedConfig:
    """Read a model's configuration; no code of its folder runs. Errors give the model's name."""
    with naming(name or folder):
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def _open_folder(folder: str) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    config = open_config(folder)
    with naming(folder):
        if config.is_encoder_decoder:
            raise ValueError(f"{config.model_type} has an encoder too, and is no causal language model")
        return config, tokenizers.load(str(Path(folder).absolute()) if Path(folder).exists() else folder)


def _load_folder(folder: str, config: PreTrainedConfig, memory: Residence | None) -> PreTrainedModel:
    options: dict[str, Any] = {}
    if memory is not None:
        if not isinstance(config, TideConfig):
            raise ValueError(f"{folder}, a {config.model_type}, has no memory: leave --memory out")
        check_place(config, folder, memory.place)
        options = {"memory": memory.place, "memory_cache_bytes": memory.cache_bytes}
    with naming(folder):
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", trust_remote_code=False, use_safetensors=True, **options
        )


@contextmanager
def naming(folder: str) -> Iterator[None]:
    """Name the folder in the errors of what opens it."""
    try:
        yield
    except StoreError:  # which names its file
        raise
    except OSError as error:
        if isinstance(error, RepositoryNotFoundError) or isinstance(error.__cause__, RepositoryNotFoundError):
            raise ValueError(
                f"there is no {folder} here, nor on the Hugging Face Hub (if it is private, log in with "
                f"`hf auth login`): {hint_for(folder)}"
            ) from error
        raise _unopened(folder, error) from error
    except (KeyError, ValueError, SafetensorError, StrictDataclassError) as error:
        raise _unopened(folder, error) from error


def _unopened(folder: str, error: Exception) -> ValueError:
    reason = " ".join(str(error).split())[:200]
    return ValueError(
        f"{folder} cannot be opened as a model ({reason}): give a run, a folder with config.json, weights "
        "and tokenizer, or a name on the Hugging Face Hub"
    )


def _whole_checkpoint(run: Path, step: int | None) -> Path:
    """Return the checkpoint of a step, or the newest."""
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
        others = " or ".join(str(checkpoint.at(folder, other)) for other in found if other != step)
        choice = f"give {others}, or train again" if others else "there is no other, so train again"
        raise checkpoint.DamagedCheckpointError(f"{path} is damaged ({fault}): {choice}")
    return path


def _load_checkpoint(path: Path, config: TideConfig) -> PreTrainedModel:
    with torch.device("meta"):
        model = TideForCausalLM(config)
    model.to_empty(device="cpu")
    model.tie_weights()
    checkpoint.load(path, {f"model.{name}": value.data for name, value in model.named_parameters()})
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffer is not saved
    return model


def _frequencies(
    counts: Path | None, model: str, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig
) -> FrequencyBins | None:
    """Return the frequencies of prepared data or of a file of counts, or those in a packed model's store."""
    if counts is not None:
        if not counts.is_dir():
            found = FrequencyBins.from_counts_file(counts, tokenizer)
        elif Manifest.read(counts).tokenizer_sha256 == tokenizers.fingerprint(tokenizer):
            found = FrequencyBins.from_prepared(counts)
        else:
            raise ValueError(
                f"{counts} was prepared with another tokenizer than the model's: count with the model's"
            )
        return found.extended(config.get_text_config().vocab_size)
    if not isinstance(config, TideConfig) or config.memory_store is None:
        return None
    with naming(model):
        file = open_store(config, model)
    if "counts" not in file.header.sections:
        return None
    counts_V = file.section("counts")[: config.vocab_size]  # rows of pairs have none
    return FrequencyBins.from_counts(counts_V.astype(np.int64), tokenizer)
