"""Initialisation, loading and saving of TIDE models, as transformers does it."""

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel
from transformers.utils import cached_file

from tide_lm.model.config import TideConfig
from tide_lm.model.initialisation import normal, resize_rows, shard_like
from tide_lm.model.stored import StoredMemory
from tide_lm.run import files
from tide_lm.spec.config import Place, Residence
from tide_lm.store.format import StoreError

_OF_HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
OF_MEMORY = re.compile(r"\bmemory\.|\.router\.|\.(value|memory)_gate\.")
_SWITCHES = {".value_gate.": "memory_values", ".memory_gate.": "memory_gate"}  # by what they add


def check_place(config: TideConfig, model: str, memory: Place | str | None) -> None:
    """Check where rows are wanted: a packed model's may be anywhere, and tables on the device alone."""
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
        """Draw each matrix from torch's seed and its name, so that models of one seed share it."""
        if draw := getattr(module, "draw", None):  # the memory's own
            draw(self.config)
            return
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

    def post_init(self) -> None:
        super().post_init()
        if self.config.memory_values:  # rows and their gates are for all heads, which no GPUs can share
            self._tp_plan = {name: how for name, how in self.tp_plan.items() if "self_attn" not in name}

    @property
    def tables(self) -> Any:
        """The memory as it is trained."""
        if isinstance(memory := self.base_model.memory, StoredMemory):
            raise ValueError(
                "this model is packed, and has no tables: take the model that it was packed from"
            )
        return memory

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
        """Load as transformers does, but a checkpoint that lacks memory is an error, not random tables.

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
        """Save as transformers does, with the store of a packed model."""
        stored = self.base_model.memory
        if isinstance(stored, StoredMemory) and is_main_process:
            assert self.config.memory_store is not None
            if stored.file is None:
                raise ValueError("this packed model has no rows to save: open it with from_pretrained")
            copy = Path(save_directory) / self.config.memory_store["file"]
            stored.file.check_name()
            if not (copy.exists() and copy.samefile(stored.file.path)):
                copy.parent.mkdir(parents=True, exist_ok=True)
                files.copy_atomically(stored.file.path, copy)
        # last: it may upload the folder
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)

    def _get_files_timestamps(self, working_dir: str | os.PathLike) -> dict[str, float]:
        """Leave out the store, which was written a moment ago: files that are as before need no upload."""
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
        """Count as transformers does; tables are embeddings too, and a look-up costs no FLOPs."""
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
            resize_rows(memory.weight, embeddings.num_embeddings, self.config.initializer_range)
        return embeddings
