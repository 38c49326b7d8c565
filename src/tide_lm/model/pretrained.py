"""Initialisation, loading and saving of TIDE models, as transformers does it."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

from tide_lm.model import loading
from tide_lm.model.config import TideConfig
from tide_lm.model.initialisation import normal, resize_rows, shard_like
from tide_lm.spec.config import Place, Residence


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
        """The memory as it is trained; None in a base model."""
        memory = self.base_model.memory
        return None if memory is None else memory.tables

    def _name_of(self, module: nn.Module) -> str | None:
        """Return the name of a module's weight in a checkpoint; it is the same with and without a head."""
        prefix = f"{self.base_model_prefix}." if self.base_model is self else ""
        names = (name for name, candidate in self.named_modules() if candidate is module)
        return next((f"{prefix}{name}.weight" for name in names), None)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *args: Any,
        config: Any = None,
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
        residence = Residence(Place.device if memory is None else memory, memory_cache_bytes)
        name = str(pretrained_model_name_or_path)
        of_hub = {key: kwargs[key] for key in loading.OF_HUB if key in kwargs}
        if isinstance(config, PreTrainedConfig) and not isinstance(config, TideConfig):
            raise ValueError(f"a TIDE model needs a TideConfig, and config is a {type(config).__name__}")
        if Path(name, "adapter_config.json").is_file():  # PEFT's: the checks are for the model beneath
            name = json.loads(Path(name, "adapter_config.json").read_text())["base_model_name_or_path"]
        if not isinstance(config, TideConfig):
            # not by from_pretrained, which forgets the token in transformers 5.17
            config = TideConfig.from_dict(TideConfig.get_config_dict(config or name, **of_hub)[0])
            for key in [key for key in kwargs if "dtype" not in key and hasattr(config, key)]:
                setattr(config, key, kwargs.pop(key))
        config.validate()
        loading.check_place(config, name, residence.place)
        held = loading.held_tensors(name, kwargs.get("variant"), kwargs.get("state_dict"), of_hub)
        if type(config).model_type == TideConfig.model_type:  # what derives from it may have other tensors
            loading.check_tensors(name, config, held, any_shape=ignore_mismatched_sizes)
        store = None
        if config.num_memory_blocks and config.memory_store is not None:
            store = loading.open_store(config, name, **of_hub)
        kwargs.pop("force_download", None)  # what was downloaded for the checks is in the cache
        model, info = super().from_pretrained(
            pretrained_model_name_or_path,
            *args,
            config=config,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **kwargs,
        )
        if info["mismatched_keys"] and not ignore_mismatched_sizes:
            tensor, found, wanted = min(info["mismatched_keys"])
            raise ValueError(
                f"{name!r} holds {tensor} of shape {tuple(found)}, and its config calls for {tuple(wanted)}: "
                "give the config that it was saved with"
            )
        if store is not None:
            model.base_model.memory.open(store, residence, model.base_model.embed_tokens.weight.device)
        return (model, info) if output_loading_info else model

    def save_pretrained(
        self, save_directory: str | os.PathLike, is_main_process: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """Save as transformers does, with the store of a packed model."""
        memory = self.base_model.memory  # None in a base model, whatever its config says of a store
        if is_main_process and memory is not None and self.config.memory_store is not None:
            memory.save(Path(save_directory) / self.config.memory_store["file"])
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
        """Do nothing: a saved folder carries the shim, never a copy of this file."""

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
        """Resize E, the head and every table."""
        tables = self.tables  # or an error, of a packed model
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        if tables is not None:
            old = tables.height - tables.pair_rows
            resize_rows(tables.weight, old, embeddings.num_embeddings, self.config.initializer_range)
        return embeddings
