"""At home in Hugging Face: a TIDE model's configuration, initialisation, loading and saving."""

import difflib
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import LlamaConfig
from transformers import initialization as init
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel
from transformers.utils import cached_file

from tide_lm import presets, runs
from tide_lm.config import Place, Residence, check_own_blocks
from tide_lm.seeded_init import normal, normal_rows
from tide_lm.store.format import StoreError
from tide_lm.stored_memory import StoredMemory

_SHIM_MODULE = "modeling_tide"
_SHIM = '''\
"""Lets transformers find TIDE with `trust_remote_code=True`. All code is in the package tide-lm."""

try:
    from tide_lm.model import TideConfig, TideForCausalLM, TideModel  # noqa: F401
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] != "tide_lm":
        raise
    raise ModuleNotFoundError("this is a TIDE model, which needs: pip install tide-lm") from error
'''
_AUTO_MAP = {
    "AutoConfig": f"{_SHIM_MODULE}.TideConfig",
    "AutoModel": f"{_SHIM_MODULE}.TideModel",
    "AutoModelForCausalLM": f"{_SHIM_MODULE}.TideForCausalLM",
}

_OF_HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
OF_MEMORY = re.compile(r"\bmemory\.|\.router\.|\.(value|memory)_gate\.")
_SWITCHES = {".value_gate.": "memory_values", ".memory_gate.": "memory_gate"}  # by what they add


@strict
class TideConfig(LlamaConfig):
    """A Llama's configuration with `num_memory_blocks` (K) and the initial gain of the memory's norm.

    K = 0 is the base model, exactly `LlamaForCausalLM`. `memory_dim` is the paper's d_b; it must equal
    `hidden_size`, since memory joins the residual stream with no projection.

    Not in the paper: with `memory_values` row l mod K joins the values of layer l's attention too, times
    `memory_value_scale`, and with `memory_own_block` layer l mixes no other row than that. With `memory_gate`
    what was mixed goes through a gate, a matrix and a norm, after which the null bank decides little.

    `memory_store` is that of a packed model: the `file` beside its weights that holds the rows, and the
    `fingerprint` of the weights that they belong to.
    """

    model_type = "tide"
    base_model_pp_plan = None  # every layer needs the memory, so the layers cannot be a pipeline of stages

    num_memory_blocks: int = 8
    memory_gain_init: int | float = 1.0
    memory_dim: int | None = None
    memory_values: bool = False
    memory_value_scale: int | float = 1.0
    memory_own_block: bool = False
    memory_gate: bool = False
    memory_store: dict | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        own = list(TideConfig.__annotations__)
        for key in kwargs:
            near = difflib.get_close_matches(key, own, n=1, cutoff=0.85)
            near = near or [name for name in own if "_" in key and key in name]
            if near:
                raise ValueError(f"unknown config key {key!r}: did you mean {near[0]!r}?")
        super().__post_init__(**{**kwargs, "auto_map": dict(_AUTO_MAP)})

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> "TideConfig":
        """The configuration of a named model of the paper, such as `tide-8e-1b` or `base-1b`."""
        return cls(**{**presets.get(name).model.to_transformers(), **overrides})

    def validate_architecture(self) -> None:
        super().validate_architecture()
        if self.num_memory_blocks < 0:
            raise ValueError(
                f"num_memory_blocks is {self.num_memory_blocks}: use 1 or more, or 0 for the base"
            )
        for name in ("memory_gain_init", "memory_value_scale"):
            if not math.isfinite(value := getattr(self, name)):
                raise ValueError(f"{name} is {value}: it must be a finite number")
        if self.memory_gate and self.num_memory_blocks and not self.memory_gain_init:
            raise ValueError(
                "memory_gain_init is 0, and with memory_gate nothing would be learned: set it to 0.1, say"
            )
        if self.memory_dim not in (None, self.hidden_size):
            raise ValueError(
                f"memory_dim is {self.memory_dim} and hidden_size is {self.hidden_size}: memory is added to "
                "the residual stream with no projection, so they must be equal; leave memory_dim out"
            )
        values = self.num_key_value_heads * self.head_dim
        if self.num_memory_blocks and self.memory_values and (values < 1 or self.hidden_size % values):
            raise ValueError(
                f"hidden_size is {self.hidden_size}, and {self.num_key_value_heads} key-value heads of "
                f"{self.head_dim} are {values}, which does not divide it: rows do not fit into values; set "
                "memory_values to false"
            )
        if self.memory_own_block:
            check_own_blocks(self.num_memory_blocks, self.num_hidden_layers)
        if self.memory_store is not None:
            _check_store(self.memory_store)

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        runs.write_atomically(Path(save_directory) / f"{_SHIM_MODULE}.py", _SHIM)
        super().save_pretrained(save_directory, *args, **kwargs)  # last: it may upload the folder

    def _get_files_timestamps(self, working_dir: str | os.PathLike) -> dict[str, float]:
        """Of files that need no upload if they are as before: the shim was written a moment ago."""
        found = super()._get_files_timestamps(working_dir)
        return {name: time for name, time in found.items() if name != f"{_SHIM_MODULE}.py"}

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Nothing to do: a saved folder carries the shim, never a copy of this file."""


def shard_like(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of `whole`, if the parameter was sharded from outside; nothing is communicated."""
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


@torch.no_grad()
def draw_table(weight_RKD: torch.Tensor, tokens: Sequence[int], seed: int, std: float) -> None:
    """Draws each row from the seed and its token, a few at a time so that no second table ever exists."""
    if isinstance(weight_RKD, DTensor):
        own = shard_like(weight_RKD, torch.tensor(tokens))
        assert isinstance(own, DTensor)
        tokens, weight_RKD = own.to_local().tolist(), weight_RKD.to_local()
    for start in range(0, len(tokens), 1024):
        some = tokens[start : start + 1024]
        drawn = normal_rows(seed, "model.memory.weight", some, tuple(weight_RKD.shape[1:]))
        weight_RKD[start : start + len(some)] = torch.from_numpy(drawn) * std


def _check_store(store: dict[str, Any]) -> None:
    """A name without a folder, and the hexadecimal digits of a sum."""
    if store.keys() != {"file", "fingerprint"} or not all(isinstance(value, str) for value in store.values()):
        raise ValueError(f"memory_store is {store!r:.200}: it must have a file and a fingerprint, both text")
    if not re.fullmatch(r"[^./\\][^/\\]*", store["file"]):
        raise ValueError(f"memory_store names the file {store['file']!r}: it must be one beside config.json")


def check_place(config: TideConfig, model: str, memory: Place | str | None) -> None:
    """That rows can be there: those of a packed model anywhere, and tables on the device alone."""
    if memory in (Place.cpu, Place.store) and config.memory_store is None:
        lacks = "has its tables among its weights: pack it first, with `tide-lm pack`"
        if not config.num_memory_blocks:
            lacks = "is a base model, without any memory: leave that out"
        raise ValueError(f"memory is to be in {str(memory)!r}, and {model!r} {lacks}")


def store_path(config: TideConfig, model: str, **of_hub: Any) -> Path:
    """A packed model's store, which comes from the Hub unless the model is a folder here."""
    assert config.memory_store is not None
    name = config.memory_store["file"]
    path = Path(model, of_hub.get("subfolder") or "", name)
    if Path(model).is_dir() and not path.is_file():
        raise StoreError(
            f"{path} is not there, and has the rows of this packed model: copy it again, or pack the model "
            "again with `tide-lm pack`"
        )
    return Path(cached_file(model, name, **of_hub))


class TidePreTrainedModel(LlamaPreTrainedModel):
    """What `TideModel` and `TideForCausalLM` share."""

    config: TideConfig
    _no_split_modules = ["TideDecoderLayer", "LlamaDecoderLayer", "EmbeddingMemory"]  # noqa: RUF012

    def _init_weights(self, module: nn.Module) -> None:
        """Draws each matrix from torch's seed and its name, so that models of one seed share it."""
        if not isinstance(module, nn.Linear | nn.Embedding) or not (name := self._name_of(module)):
            super()._init_weights(module)
            return
        if module.weight.is_meta or name in self.all_tied_weights_keys:
            return
        drawn = torch.from_numpy(normal(torch.initial_seed(), name, tuple(module.weight.shape)))
        drawn *= self.config.initializer_range
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            drawn[module.padding_idx] = 0
        init.copy_(module.weight, shard_like(module.weight, drawn))
        if isinstance(module, nn.Linear) and module.bias is not None:
            init.zeros_(module.bias)

    def _name_of(self, module: nn.Module) -> str | None:
        """The name of a module's weight in a checkpoint, the same with and without a head."""
        prefix = f"{self.base_model_prefix}." if self.base_model is self else ""
        names = (name for name, candidate in self.named_modules() if candidate is module)
        return next((f"{prefix}{name}.weight" for name in names), None)

    @classmethod
    def from_pretrained(
        cls,
        *args: Any,
        ignore_mismatched_sizes: bool = False,
        output_loading_info: bool = False,
        memory: Place | str | None = None,
        memory_cache_bytes: int = Residence().cache_bytes,
        **kwargs: Any,
    ) -> Any:
        """As in transformers, but a checkpoint that lacks memory is an error, not random tables.

        `memory` says where the rows of a packed model are: on the `"device"`, as are the tables of others, in
        the host's memory (`"cpu"`), or in their file (`"store"`), of which so many bytes stay in memory.
        """
        if memory is not None and memory not in list(Place):
            raise ValueError(f"memory is {memory!r}: it must be one of {', '.join(Place)}")
        if type(memory_cache_bytes) is not int or memory_cache_bytes < 0:
            raise ValueError(f"memory_cache_bytes is {memory_cache_bytes!r}: it must be 0 or more, and whole")
        model, info = super().from_pretrained(
            *args, ignore_mismatched_sizes=True, output_loading_info=True, **kwargs
        )
        missing = sorted(key for key in info["missing_keys"] if OF_MEMORY.search(key))
        only_gates = all("_gate." in key for key in missing)
        for part, switch in _SWITCHES.items():
            beyond = sorted(key for key in info["unexpected_keys"] if part in key)
            gates = [key for key in missing if part in key] if only_gates else []
            if model.config.num_memory_blocks and (gates or beyond):
                raise ValueError(
                    f"{model.name_or_path!r} {'lacks' if gates else 'holds'} {(gates or beyond)[0]}, and "
                    f"{switch} is {getattr(model.config, switch)}: leave {switch} as it was saved"
                )
        if missing:
            raise ValueError(
                f"{model.name_or_path!r} lacks {len(missing)} tensors of the memory, {missing[0]} among "
                f"them, that num_memory_blocks={model.config.num_memory_blocks} calls for: if it is a Llama, "
                "make it a TIDE model with `tide-lm upcycle`, or open it as the base with num_memory_blocks=0"
            )
        if info["mismatched_keys"] and not ignore_mismatched_sizes:
            name, found, wanted = min(info["mismatched_keys"])
            raise ValueError(
                f"{model.name_or_path!r} holds {name} of shape {tuple(found)}, and its config calls for "
                f"{tuple(wanted)}: give num_memory_blocks, memory_own_block and vocab_size as they were saved"
            )
        check_place(model.config, model.name_or_path, memory)
        if isinstance(stored := model.base_model.memory, StoredMemory):
            found = {name: kwargs[name] for name in _OF_HUB if name in kwargs}
            stored.open(
                store_path(model.config, model.name_or_path, **found),
                model.config.memory_store["fingerprint"],
                Residence(Place(memory or "device"), memory_cache_bytes),
                model.base_model.embed_tokens.weight.device,
            )
        return (model, info) if output_loading_info else model

    def save_pretrained(
        self, save_directory: str | os.PathLike, is_main_process: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """As in transformers; the store of a packed model comes along."""
        stored = self.base_model.memory
        if isinstance(stored, StoredMemory) and is_main_process:
            assert self.config.memory_store is not None
            if stored.file is None:
                raise ValueError("this packed model has no rows to save: open it with from_pretrained")
            copy = Path(save_directory) / self.config.memory_store["file"]
            stored.file.check_name()
            if not (copy.exists() and copy.samefile(stored.file.path)):
                copy.parent.mkdir(parents=True, exist_ok=True)
                runs.copy_atomically(stored.file.path, copy)
        # last: it may upload the folder
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)

    def _get_files_timestamps(self, working_dir: str | os.PathLike) -> dict[str, float]:
        """Of files that need no upload if they are as before: the store was written a moment ago."""
        store = (self.config.memory_store or {}).get("file")
        return {
            name: time for name, time in super()._get_files_timestamps(working_dir).items() if name != store
        }

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Nothing to do: a saved folder carries the shim, never a copy of this file."""

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        options = {"use_reentrant": False, **(gradient_checkpointing_kwargs or {})}
        if options["use_reentrant"] is not False and self.config.num_memory_blocks:
            raise ValueError(
                f"use_reentrant={options['use_reentrant']} cannot checkpoint a TIDE model: all layers share "
                "the memory, and re-entrant checkpoints lose the gradient of what is shared; use False"
            )
        super().gradient_checkpointing_enable(options, **kwargs)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """As in transformers; the tables are embeddings too, and what is only looked up costs no FLOPs."""
        count = super().num_parameters(only_trainable, exclude_embeddings)
        table = getattr(self.base_model.memory, "weight", None)
        if not exclude_embeddings or table is None or (only_trainable and not table.requires_grad):
            return count
        return count - table.numel()

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resizes E, the head and every table."""
        if isinstance(self.base_model.memory, StoredMemory):
            raise ValueError("the rows of a packed memory cannot be resized: resize the model, then pack it")
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        memory = self.base_model.memory
        if memory is not None:
            memory.resize(embeddings.num_embeddings, self.config.initializer_range)
        return embeddings
