"""What a checkpoint must hold for its config: checked by headers, before anything is allocated."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from tide_lm.model.config import TideConfig
from tide_lm.model.extensions import EXTENSIONS
from tide_lm.model.streamed_tensors import read, weight_files
from tide_lm.spec.config import Place, table_shape
from tide_lm.store.format import StoreError
from tide_lm.store.reader import StoreFile

OF_HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
Shapes = dict[str, tuple[int, ...]]


def memory_tensors(config: TideConfig) -> Shapes:
    """Return the names and shapes of the tensors that a config adds to a Llama's."""
    K, D = config.num_memory_blocks, config.hidden_size
    if not K:
        return {}
    found: Shapes = {}
    if config.memory_store is None:
        found |= {"model.memory.weight": table_shape(config), "model.memory.norm.weight": (K, D)}
    for layer in range(config.num_hidden_layers):
        found[f"model.layers.{layer}.router.weight"] = (K + 1, D)
    for switch in EXTENSIONS:
        if getattr(config, switch):
            found |= extension_tensors(config, switch)
    return found


def extension_tensors(config: TideConfig, switch: str) -> Shapes:
    """Return the names and shapes of the tensors that an extension adds."""
    shapes = EXTENSIONS[switch].tensors(config)
    layers = range(config.num_hidden_layers)
    return {f"model.layers.{layer}.{name}": shape for layer in layers for name, shape in shapes.items()}


def held_tensors(
    model: str, variant: str | None, state_dict: Mapping[str, Any] | None, of_hub: Mapping[str, Any]
) -> Shapes:
    """Return the names and shapes of a checkpoint's tensors, named as in a model with a head."""
    if state_dict is not None:
        found = {name: tuple(tensor.shape) for name, tensor in state_dict.items()}
    else:
        found = {}
        for path in weight_files(model, variant, **of_hub):
            found |= {name: tensor.shape for name, tensor in read(path).items()}
    has_prefix = any(name.startswith("model.") for name in found)
    return found if has_prefix else {f"model.{name}": shape for name, shape in found.items()}


def check_tensors(model: str, config: TideConfig, held: Shapes, any_shape: bool) -> None:
    """Check that the memory's tensors are there, in their shapes, and none of an extension that is off."""
    wanted, switches = memory_tensors(config), EXTENSIONS if config.num_memory_blocks else ()
    of_extensions = {name: switch for switch in switches for name in extension_tensors(config, switch)}
    if missing := sorted(wanted.keys() - of_extensions.keys() - held.keys()):
        raise ValueError(
            f"{model!r} lacks {len(missing)} tensors of the memory, {missing[0]} among them, that "
            f"num_memory_blocks={config.num_memory_blocks} calls for: if it is a Llama, make it a TIDE model "
            "with `tide-lm upcycle`, or open it as the base with num_memory_blocks=0"
        )
    for name, switch in of_extensions.items():
        if (name in wanted) != (name in held):
            raise ValueError(
                f"{model!r} {'holds' if name in held else 'lacks'} {name}, and {switch} is "
                f"{name in wanted}: leave {switch} as it was saved"
            )
    for name, shape in () if any_shape else wanted.items():
        if held[name] != shape:
            raise ValueError(
                f"{model!r} holds {name} of shape {held[name]}, and its config calls for {shape}: give "
                "num_memory_blocks, memory_pair_rows and vocab_size as they were saved"
            )


def check_place(config: TideConfig, model: str, memory: Place | str | None) -> None:
    """Check where rows are wanted: a packed model's may be anywhere, and tables on the device alone."""
    if memory in (Place.cpu, Place.store) and config.memory_store is None:
        why = "is not packed: pack it first, with `tide-lm pack`"
        if not config.num_memory_blocks:
            why = "is a base model, without any memory: leave that out"
        raise ValueError(f"memory cannot be in {str(memory)!r}, as {model!r} {why}")


def open_store(config: TideConfig, model: str, **of_hub: Any) -> StoreFile:
    """Open a packed model's store, which comes from the Hub unless the model is a folder here."""
    assert config.memory_store is not None
    name, fingerprint = config.memory_store["file"], config.memory_store["fingerprint"]
    path = Path(model, of_hub.get("subfolder") or "", name)
    if Path(model).is_dir() and not path.is_file():
        raise StoreError(
            f"{path} is not there, and has the rows of this packed model: copy it again, or pack the model "
            "again with `tide-lm pack`"
        )
    file = StoreFile(Path(cached_file(model, name, **of_hub)))
    rows, blocks, hidden = table_shape(config)
    file.check_model(vocab_size=rows, blocks=blocks, hidden=hidden, fingerprint=fingerprint)
    if config.memory_store.get("header", file.header.checksum) != file.header.checksum:
        raise StoreError(
            f"{file.path} is of another packing of this model, with {file.header.bits} bits: copy the file "
            "that was packed with this folder, or pack the model again with `tide-lm pack`"
        )
    return file
