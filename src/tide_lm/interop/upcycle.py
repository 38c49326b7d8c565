"""Write a Llama's folder as a TIDE model that computes the same, and back.

Weights are copied a piece at a time, and tables are drawn a piece at a time. The gains of the memory begin at
0, so that it adds nothing; training moves them first, and then tables and routers.

Shapes: U some tokens, K blocks, D hidden.
"""

import copy
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download, split_state_dict_into_shards_factory
from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from tide_lm.model import TideForCausalLM, streamed_tensors
from tide_lm.model.config import TideConfig
from tide_lm.model.initialisation import draw_table, normal
from tide_lm.model.loading import memory_tensors
from tide_lm.model.opened import naming, open_config
from tide_lm.model.streamed_tensors import DTYPES, INDEX, Streamed, weight_files
from tide_lm.run import files
from tide_lm.run.model_card import titled

_SHARD = 5_000_000_000  # bytes of a file, unless one tensor has more
_BESIDE = [  # what belongs to a model besides its weights and config.json
    *("generation_config.json", "tokenizer*.json", "tokenizer*.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.*"),
    *("LICENSE*", "NOTICE*", "USE_POLICY*"),
]

Begin = Callable[[int], Callable[[int], None]]


@dataclass(frozen=True)
class Written:
    """The numbers of parameters that were written, in all and in tables."""

    parameters: int
    tables: int


@dataclass(frozen=True)
class Source:
    """A model's folder: its configuration, and its tensors, of which only headers are read."""

    name: str
    folder: Path
    config: PreTrainedConfig
    tensors: dict[str, Streamed]

    @cached_property
    def is_tied(self) -> bool:
        """Tell whether the head is the embedding: transformers does not tie a head that a file has."""
        head, embedding = (self.tensors.get(f"{name}.weight") for name in ("lm_head", "model.embed_tokens"))
        if head is None or embedding is None or not self.config.tie_word_embeddings:
            return self.config.tie_word_embeddings
        return head.dtype == embedding.dtype and all(map(torch.equal, head.pieces(), embedding.pieces()))


def open_source(model: str) -> Source:
    """Open a folder here, or a name on the Hub."""
    with naming(model):
        here = Path(model).is_dir()
        wanted = ["config.json", "model*.safetensors", "model*.index.json", *_BESIDE]
        folder = Path(model) if here else Path(snapshot_download(model, allow_patterns=wanted))
    config = open_config(str(folder), model)
    if config.model_type not in ("llama", "tide"):
        raise ValueError(f"{model} is a model of type {config.model_type!r}: give a Llama or a TIDE model")
    if getattr(config, "quantization_config", None):
        raise ValueError(f"{model} is quantised: give the model that it was made from")
    if config.attention_bias or config.mlp_bias:
        raise ValueError(f"{model} has biases, which TIDE models do not: give a Llama without")
    kind = config.architectures or ["nothing"]
    if kind[0] not in ("LlamaForCausalLM", "TideForCausalLM"):
        raise ValueError(f"{model} has the architecture {kind[0]}: give one with a language-modelling head")
    tensors: dict[str, Streamed] = {}
    for path in weight_files(folder):
        tensors |= streamed_tensors.read(path)
    return Source(model, folder, config, tensors)


def upcycle(
    source: Source,
    out: Path,
    memory: Mapping[str, Any],
    seed: int,
    begin: Begin = lambda total: lambda written: None,
) -> Written:
    """Write a TIDE model with the `memory` of these settings, whole or not at all.

    For progress, `begin` is called with the bytes to write, and what it returns with the bytes of each write.
    """
    if getattr(source.config, "num_memory_blocks", 0):
        raise ValueError(f"{source.name} is a TIDE model already, with K = {source.config.num_memory_blocks}")
    values = {**source.config.to_dict(), **memory, "memory_gain_init": 0.0}
    for name in ("model_type", "auto_map", "transformers_version"):
        values.pop(name, None)
    values["tie_word_embeddings"] = source.is_tied
    try:
        config = TideConfig.from_dict(values | {"architectures": ["TideForCausalLM"]})
    except StrictDataclassError as error:
        raise ValueError(f"{source.name} cannot have this memory: {error.__cause__ or error}") from error
    shapes = _shapes(source.name, TideForCausalLM, config)
    added = memory_tensors(config)
    tensors = _checked(source, {name: shape for name, shape in shapes.items() if name not in added})
    embedding = tensors["model.embed_tokens.weight"]
    made = {
        name: _made(name, shapes[name], embedding.dtype, config, seed) for name in shapes if name in added
    }
    return _write(source, out, tensors | made, config, begin, _card(source, config))


def strip(
    source: Source, out: Path, anyway: bool = False, begin: Begin = lambda total: lambda written: None
) -> Written:
    """Write a TIDE model's Llama; unless `anyway`, refuse a memory that adds something."""
    if not isinstance(source.config, TideConfig):
        raise ValueError(f"{source.name} is a Llama already, and has nothing to strip")
    if source.config.num_memory_blocks and not anyway:
        if source.config.memory_store is not None:
            raise ValueError(f"{source.name} is packed, and its memory in use: give --anyway to drop it")
        gains = source.tensors.get("model.memory.norm.weight")
        if gains is None or any(piece.any() for piece in gains.pieces()):
            raise ValueError(
                f"the memory of {source.name} is in use (its gains are not 0), so its Llama computes "
                "something else: give --anyway to drop the memory"
            )
    own = {*TideConfig.__annotations__, "model_type", "auto_map", "transformers_version"}
    values = {name: value for name, value in source.config.to_dict().items() if name not in own}
    values |= {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": source.is_tied}
    config = LlamaConfig.from_dict(values)
    kept = _checked(source, _shapes(source.name, LlamaForCausalLM, config))
    return _write(source, out, kept, config, begin, None)


def check_weights(folder: Path) -> None:
    """Check that a folder has all weights that its configuration calls for, and no others."""
    source = open_source(str(folder))
    config = copy.copy(source.config)
    config.tie_word_embeddings = source.is_tied
    kind = TideForCausalLM if isinstance(config, TideConfig) else LlamaForCausalLM
    _checked(source, _shapes(source.name, kind, config))


def _shapes(name: str, kind: type[PreTrainedModel], config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    try:
        with torch.device("meta"):
            model = kind(config)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"no model can be built from the config.json of {name} ({type(error).__name__}: {error}): "
            "correct it"
        ) from error
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _checked(source: Source, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Streamed]:
    """Return a Llama's tensors: all that its configuration calls for, and no others."""
    config = source.config
    of_memory = memory_tensors(config) if isinstance(config, TideConfig) else {}
    left = re.compile(r"rotary_emb\.inv_freq$" + (r"|^lm_head\." if source.is_tied else ""))
    for name, tensor in source.tensors.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"{source.name} holds {name} as {tensor.dtype}: only {', '.join(DTYPES)} are known"
            )
        if name not in shapes and name not in of_memory and not left.search(name):
            raise ValueError(
                f"{source.name} holds {name}, which its config.json does not call for: correct that file, or "
                "copy the model again"
            )
        if name in shapes and tensor.shape != shapes[name]:
            raise ValueError(
                f"{source.name} holds {name} of shape {tensor.shape}, and its config.json says "
                f"{shapes[name]}: correct that file, or copy the model again"
            )
    if missing := [name for name in shapes if name not in source.tensors]:
        raise ValueError(f"{source.name} lacks {missing[0]}, which its config.json calls for: copy it again")
    return {name: source.tensors[name] for name in shapes}


def _made(name: str, shape: tuple[int, ...], named_dtype: str, config: TideConfig, seed: int) -> Streamed:
    """Make a tensor of the memory: tables and routers are drawn, and gains are 0."""
    dtype = DTYPES[named_dtype]

    def pieces() -> Iterator[torch.Tensor]:
        if name == "model.memory.weight":
            for tokens in streamed_tensors.row_ranges(shape):
                rows_UKD = torch.empty(len(tokens), *shape[1:])
                draw_table(rows_UKD, tokens, seed, config.initializer_range)
                yield rows_UKD.to(dtype)
        elif name == "model.memory.norm.weight":
            yield torch.zeros(shape, dtype=dtype)
        else:
            yield (torch.from_numpy(normal(seed, name, shape)) * config.initializer_range).to(dtype)

    return Streamed(named_dtype, shape, pieces)


def _write(
    source: Source,
    out: Path,
    tensors: Mapping[str, Streamed],
    config: PreTrainedConfig,
    begin: Begin,
    card: str | None,
) -> Written:
    split = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=_SHARD,
    )
    with files.claimed(out, "upcycled"), files.write_folder(out) as draft:
        advance = begin(split.metadata["total_size"])
        for file, names in split.filename_to_tensors.items():
            streamed_tensors.write(draft / file, {name: tensors[name] for name in names}, advance)
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            (draft / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        config.save_pretrained(draft)
        for path in (path for pattern in _BESIDE for path in source.folder.glob(pattern)):
            if path.is_file():
                shutil.copyfile(path, draft / path.name)
        if card is not None:
            (draft / "README.md").write_text(card, encoding="utf-8")
    sizes = {name: math.prod(tensor.shape) for name, tensor in tensors.items()}
    return Written(sum(sizes.values()), sizes.get("model.memory.weight", 0))


def _card(source: Source, config: TideConfig) -> str:
    here = Path(source.name).is_dir()
    name = Path(source.name).resolve().name if here else source.name
    text = (
        f"`{name}` as a TIDE model, made with `tide-lm upcycle`. It computes what `{name}` does, to the bit: "
        f"the gains of its memory are 0, and its tables have not been trained. Train it with "
        "`tide-lm train --from`."
    )
    title = f"{name} with {config.num_memory_blocks} memory blocks"
    return titled(title, [text, ""], base=None if here else source.name)
