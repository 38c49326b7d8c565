"""The configuration of a TIDE model: a Llama's, with what the memory adds."""

import difflib
import math
import os
import re
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig

from tide_lm.run import files
from tide_lm.run.optional import ELSEWHERE
from tide_lm.run.settings import ModelSection
from tide_lm.spec import recipes
from tide_lm.spec.config import REMOVED, check_memory, check_removed
from tide_lm.spec.recipes import Recipe

_SHIM_MODULE = "modeling_tide"


_SHIM = f'''\
"""Lets transformers find TIDE with `trust_remote_code=True`. All code is in the package tide-lm."""

try:
    from tide_lm.model import TideConfig, TideForCausalLM, TideModel  # noqa: F401
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] != "tide_lm":
        raise
    raise ModuleNotFoundError("this is a TIDE model, which needs tide-lm: {ELSEWHERE}") from error
'''


_AUTO_MAP = {
    "AutoConfig": f"{_SHIM_MODULE}.TideConfig",
    "AutoModel": f"{_SHIM_MODULE}.TideModel",
    "AutoModelForCausalLM": f"{_SHIM_MODULE}.TideForCausalLM",
}


@strict
class TideConfig(LlamaConfig):
    """A Llama's configuration with `num_memory_blocks` (K) and the initial gain of the memory's norm.

    K = 0 is the base model, exactly `LlamaForCausalLM`.

    Extensions that are not in the paper: with `memory_values` the row of block l mod K also joins the values
    of layer l's attention, times `memory_value_scale`. With `memory_pair_rows` the tables have so many rows
    more, which pairs of tokens share, and half of a position's blocks are from there.

    A packed model has a `memory_store`: the `file` beside its weights that holds the rows, and the
    `fingerprint` of the weights that they belong to.
    """

    model_type = "tide"
    base_model_pp_plan = None  # every layer needs the memory, so the layers cannot be a pipeline of stages

    num_memory_blocks: int = 8
    memory_gain_init: int | float = 1.0
    memory_values: bool = False
    memory_value_scale: int | float = 1.0
    memory_pair_rows: int = 0
    memory_store: dict | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        own = list(TideConfig.__annotations__)
        for key in kwargs:
            near = difflib.get_close_matches(key, own, n=1, cutoff=0.85)
            near = near or [name for name in own if "_" in key and key in name]
            if near:
                raise ValueError(f"unknown config key {key!r}: did you mean {near[0]!r}?")
        width = kwargs.pop("memory_dim", None)  # the paper's d_b, which version 0.1.0 wrote
        if width not in (None, self.hidden_size):
            raise ValueError(
                f"memory_dim is {width} and hidden_size is {self.hidden_size}: memory is added to the "
                "residual stream with no projection, so they must be equal; leave memory_dim out"
            )
        check_removed(kwargs)
        for key in REMOVED:
            kwargs.pop(key, None)
        super().__post_init__(**{**kwargs, "auto_map": dict(_AUTO_MAP)})

    @classmethod
    def from_preset(cls, name: str, recipe: Recipe = recipes.DEFAULT, **overrides: Any) -> "TideConfig":
        """Return what `tide-lm train` makes of a named model, such as `tide-8e-1b` or `base-1b`.

        With `recipe="paper"` it is the paper's model: gains begin at 1, and attention's values have no rows.
        """
        if "num_memory_blocks" in overrides:
            raise ValueError(
                f"{name!r} says how many tables there are: name another preset for more or fewer"
            )
        return cls(**{**ModelSection.of_preset(name, recipe).to_transformers(), **overrides})

    def validate_architecture(self) -> None:
        super().validate_architecture()
        if self.num_hidden_layers < 1:
            raise ValueError(f"num_hidden_layers is {self.num_hidden_layers}: use 1 or more")
        if self.num_memory_blocks < 0:
            raise ValueError(
                f"num_memory_blocks is {self.num_memory_blocks}: use 1 or more, or 0 for the base"
            )
        if not 0 <= self.memory_pair_rows < 2**31:
            raise ValueError(f"memory_pair_rows is {self.memory_pair_rows}: it must be from 0 to 2^31 - 1")
        for name in ("memory_gain_init", "memory_value_scale"):
            if not math.isfinite(value := getattr(self, name)):
                raise ValueError(f"{name} is {value}: it must be a finite number")
        if self.memory_value_scale < 0:
            raise ValueError(f"memory_value_scale is {self.memory_value_scale}: it must be 0 or more")
        check_memory(self)
        if self.memory_store is not None:
            _check_store(self.memory_store)

    def to_json_file(self, json_file_path: str | os.PathLike, use_diff: bool = True) -> None:
        """Write the shim beside config.json, before `save_pretrained` looks for new files to upload."""
        files.write_atomically(Path(json_file_path).with_name(f"{_SHIM_MODULE}.py"), _SHIM)
        super().to_json_file(json_file_path, use_diff)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Do nothing: a saved folder carries the shim, never a copy of this file."""


def _check_store(store: dict[str, Any]) -> None:
    """Check that the file is one beside config.json."""
    keys = store.keys() - {"header"}
    if keys != {"file", "fingerprint"} or not all(isinstance(value, str) for value in store.values()):
        raise ValueError(f"memory_store is {store!r:.200}: it must have a file and a fingerprint, both text")
    if not re.fullmatch(r"[^./\\][^/\\]*", store["file"]):
        raise ValueError(f"memory_store names the file {store['file']!r}: it must be one beside config.json")
