"""TIDE as the difference from vLLM's Llama: rows are looked up once per step and passed to every layer.

Shapes: N tokens per step, P rows of a token, R numbers of a row, K blocks, D hidden, d per head.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models import llama
from vllm.model_executor.models.utils import extract_layer_index
from vllm.sequence import IntermediateTensors

from tide_lm import ops
from tide_lm.interop.vllm_previous import PreviousTokens
from tide_lm.model.config import TideConfig
from tide_lm.model.loading import check_place, memory_tensors, open_store
from tide_lm.model.memory import taking_turns
from tide_lm.model.pairs import pair_numbers
from tide_lm.model.stored import StoredMemory
from tide_lm.model.tide import MemoryNorm
from tide_lm.spec.config import Place, Residence, table_shape

_OPTIONS = ("tide_memory", "tide_memory_cache_bytes")
_ROWS, _PREVIOUS = "tide_lm::vllm_rows", "tide_lm::vllm_previous"


def residence_of(vllm_config: VllmConfig) -> Residence:
    """Read where rows are from `--additional-config`."""
    given = vllm_config.additional_config
    given = given if isinstance(given, dict) else {}
    if unknown := [name for name in given if name.startswith("tide") and name not in _OPTIONS]:
        raise ValueError(f"additional_config has {unknown[0]!r}: there are {', '.join(_OPTIONS)}")
    try:
        return Residence(
            given.get(_OPTIONS[0], Place.device), given.get(_OPTIONS[1], Residence().cache_bytes)
        )
    except ValueError as error:  # which begins with memory or memory_cache_bytes
        raise ValueError(f"tide_{error}") from None


class Memory(nn.Module):
    """Looks up a step's rows in tables on the device or the host, or in a store.

    Tables on the device are split by tokens among the GPUs of a model; otherwise each process has all rows.
    """

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config: TideConfig = vllm_config.model_config.hf_config
        self.name, self.residence = prefix, residence_of(vllm_config)
        self.blocks, self.hidden = config.num_memory_blocks, config.hidden_size
        self.pair_rows, self.tokens = config.memory_pair_rows, config.vocab_size
        self.previous = PreviousTokens(vllm_config) if self.pair_rows else None
        self.stored: StoredMemory | None = None
        self.table: VocabParallelEmbedding | None = None
        if config.memory_store is not None:
            self.stored = StoredMemory(self.pair_rows).eval()
            model, device = vllm_config.model_config, torch.device(vllm_config.device_config.device)
            of_hub = {} if model.revision is None else {"revision": model.revision}
            self.stored.open(open_store(config, model.model, **of_hub), self.residence, device)
        else:
            self.norm = MemoryNorm(self.blocks, self.hidden, config.rms_norm_eps)
            if self.residence.place == Place.device:
                rows, blocks, hidden = table_shape(config)
                self.table = VocabParallelEmbedding(rows, blocks * hidden)
        if self.previous is not None:
            _split_graphs(vllm_config, prefix, self, _PREVIOUS)
        if self.table is None:
            _split_graphs(vllm_config, prefix, self, _ROWS)

    def forward(self, ids_N: torch.Tensor, positions_N: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        previous_N = torch.zeros_like(ids_N)
        if self.previous is not None:
            torch.ops.tide_lm.vllm_previous(ids_N, positions_N, previous_N, self.name)
        if self.table is None:
            rows_NKD = like.new_empty(len(ids_N), self.blocks, self.hidden)
            torch.ops.tide_lm.vllm_rows(ids_N, previous_N, rows_NKD, self.name)
            return rows_NKD
        numbers = [ids_N]
        if self.pair_rows:
            numbers.append(self.tokens + pair_numbers(ids_N, previous_N, self.pair_rows).to(ids_N.dtype))
        raw_NPR = self.table(torch.stack(numbers, 1))
        return self.norm(taking_turns(raw_NPR.unflatten(-1, (-1, self.hidden))))


@torch.library.custom_op(_ROWS, mutates_args=["rows_NKD"])
def _rows(ids_N: torch.Tensor, previous_N: torch.Tensor, rows_NKD: torch.Tensor, memory: str) -> None:
    """Look packed rows up outside of all graphs, since the host may have to do it."""
    stored = get_forward_context().no_compile_layers[memory].stored
    rows_NKD.copy_(stored(ids_N[None], rows_NKD.dtype, previous_N[None]).of_positions())


@torch.library.custom_op(_PREVIOUS, mutates_args=["previous_N"])
def _previous(ids_N: torch.Tensor, positions_N: torch.Tensor, previous_N: torch.Tensor, memory: str) -> None:
    """Find the tokens before these, outside of all graphs, which do not know where vLLM keeps them."""
    previous = get_forward_context().no_compile_layers[memory].previous
    previous_N.copy_(previous.before(ids_N, positions_N))


@_rows.register_fake
@_previous.register_fake
def _(*_: object) -> None: ...


def _split_graphs(vllm_config: VllmConfig, prefix: str, memory: Memory, op: str) -> None:
    """Split graphs at an operation; a graph of a whole step would hold it."""
    compilation = vllm_config.compilation_config
    compilation.static_forward_context[prefix] = memory
    if compilation.splitting_ops is not None and op not in compilation.splitting_ops:
        compilation.splitting_ops.append(op)
    if compilation.cudagraph_mode is not None and compilation.cudagraph_mode.has_full_cudagraphs():
        pieces = compilation.splitting_ops_contain_attention()  # which no graph of a piece may hold either
        compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE if pieces else CUDAGraphMode.NONE


class TideAttention(llama.LlamaAttention):
    """Attention that adds a row of the token to its values, gated per head (see model/values.py)."""

    def __init__(self, config: TideConfig, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        gates = config.hidden_size // self.head_dim if config.memory_values else 0
        self.scale = 2 * config.memory_value_scale
        self.value_gate = _replicated(config.hidden_size, gates) if gates else None
        # Key heads of this process: with more processes than heads, some have the same.
        processes, heads = get_tensor_model_parallel_world_size(), self.total_num_kv_heads
        self.first_head = get_tensor_model_parallel_rank() * heads // processes

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, row_ND: torch.Tensor | None = None
    ) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        if self.value_gate is not None and row_ND is not None:
            gate_NG = self.scale * torch.sigmoid(self.value_gate(hidden_states))
            added = gate_NG.unsqueeze(-1) * row_ND.unflatten(-1, (-1, self.head_dim))
            heads = added.unflatten(1, (-1, self.total_num_kv_heads)).sum(1)
            own = heads[:, self.first_head : self.first_head + self.num_kv_heads]
            v = v + own.flatten(1).to(v.dtype)
        q, k = self.rotary_emb(positions, q, k)
        output, _ = self.o_proj(self.attn(q, k, v))
        return output


class TideDecoderLayer(llama.LlamaDecoderLayer):
    """`h = h~ + FFN(n~) + sum_k alpha_k M_k(v)`; vLLM's layers leave the last addition to the next norm."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(vllm_config, prefix, attn_layer_type=TideAttention, **kwargs)
        config: TideConfig = vllm_config.model_config.hf_config
        K = config.num_memory_blocks
        self.block = extract_layer_index(prefix) % K
        self.router = _replicated(config.hidden_size, K + 1)

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        rows_NKD: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual, hidden_states = hidden_states, self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        attended = self.self_attn(positions, hidden_states, rows_NKD[:, self.block])
        n, h = self.post_attention_layernorm(attended, residual)
        update, logits_1NS = self.mlp(n), self.router(n)[None]
        return ops.memory_mix(update[None], logits_1NS, rows_NKD.contiguous())[0], h


@support_torch_compile(
    dynamic_arg_dims={
        "input_ids": {0: "b"},
        "positions": {0: "b"},
        "intermediate_tensors": {0: "b"},
        "inputs_embeds": {0: "b"},
    }
)
class TideModel(llama.LlamaModel):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **kwargs: Any) -> None:
        config: TideConfig = vllm_config.model_config.hf_config
        kind = TideDecoderLayer if config.num_memory_blocks else llama.LlamaDecoderLayer
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=kind)
        self.has_memory = config.num_memory_blocks > 0
        if self.has_memory:
            self.memory = Memory(vllm_config, f"{prefix}.memory")

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors | tuple[torch.Tensor, list[torch.Tensor]]:
        more: dict[str, torch.Tensor] = {}
        if self.has_memory:
            if input_ids is None:
                raise ValueError(
                    "embeddings carry no token identity, which memory needs: send text or tokens"
                )
            more["rows_NKD"] = self.memory(input_ids, positions, self.norm.weight)
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds, **more)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return super().load_weights(_flat_tables(weights))


class TideForCausalLM(llama.LlamaForCausalLM):
    """`TideForCausalLM` for vLLM."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **kwargs: Any) -> None:
        if (stages := vllm_config.parallel_config.pipeline_parallel_size) > 1:
            raise ValueError(
                f"pipeline_parallel_size is {stages}: every layer of a TIDE model needs the token's rows, so "
                "it cannot be split into stages; use tensor_parallel_size"
            )
        model = vllm_config.model_config
        check_place(model.hf_config, model.model, residence_of(vllm_config).place)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.loaded: set[str] = set()

    def _init_model(self, vllm_config: VllmConfig, prefix: str = "", **kwargs: Any) -> TideModel:
        return TideModel(vllm_config=vllm_config, prefix=prefix)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load weights; refuse a checkpoint without memory, which vLLM itself would not miss."""
        loaded = super().load_weights(weights)
        held = {name.replace(".table", "") for name in loaded}
        missing = memory_tensors(self.config).keys() - held
        if missing and not self.loaded:
            raise ValueError(
                f"the checkpoint lacks {min(missing)}, of the memory: copy it again, or upcycle it"
            )
        self.loaded |= loaded
        return loaded


def _replicated(inputs: int, outputs: int) -> ReplicatedLinear:
    return ReplicatedLinear(inputs, outputs, bias=False, return_bias=False)


def _flat_tables(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Flatten all blocks of a token into one row of vLLM's embedding."""
    for name, weight in weights:
        is_table = name == "memory.weight"
        yield ("memory.table.weight", weight.flatten(1)) if is_table else (name, weight)
