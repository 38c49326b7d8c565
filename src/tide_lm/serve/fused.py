"""The step of one sequence, by one kernel per token."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from transformers import PreTrainedModel

from tide_lm.ops.decode import DecodeKernel, DecodeShape
from tide_lm.serve.cache import SlotCache
from tide_lm.serve.decoder import Forward
from tide_lm.serve.sampling import Sampling
from tide_lm.serve.weights import is_plain, stack_weights, why_opaque

# Their angles depend on the position alone; so do dynamic ones, within the positions that the model knows.
_ROPES = ("default", "linear", "llama3", "yarn", "dynamic")


def why_not(model: PreTrainedModel, batch: int) -> str | None:
    """Return what keeps a model from the kernel, if anything does."""
    config, weight = model.config, model.get_input_embeddings().weight
    if batch != 1:
        return f"{batch} sequences"
    if any(parameter.dtype != torch.bfloat16 for parameter in model.parameters()):
        return "weights that are not bfloat16"
    if config.hidden_act != "silu":
        return f"an activation that is {config.hidden_act}, not silu"
    if config.rope_parameters.get("rope_type", "default") not in _ROPES:
        return f"positions of type {config.rope_parameters['rope_type']}"
    for part in (model.lm_head, model.get_input_embeddings()):
        if not is_plain(part):
            return f"a {type(part).__name__} in the place of the head or the embedding, such as an adapter"
    if reason := why_opaque(model):
        return reason
    is_nvidia = weight.device.type == "cuda" and torch.version.cuda is not None
    if not is_nvidia or torch.cuda.get_device_capability(weight.device) < (9, 0):
        return "a device that is no NVIDIA GPU of compute capability 9.0 or more"
    return shape_of(model).why_not(weight.device)


def shape_of(model: PreTrainedModel) -> DecodeShape:
    config, memory = model.config, getattr(model.model, "memory", None)
    K = getattr(config, "num_memory_blocks", 0)
    packed = None if memory is None else memory.header
    return DecodeShape(
        D=config.hidden_size,
        F=config.intermediate_size,
        H=config.num_attention_heads,
        KV=config.num_key_value_heads,
        HD=model.model.layers[0].self_attn.head_dim,
        L=config.num_hidden_layers,
        V=config.vocab_size,
        K=K,
        PAIR_ROWS=config.memory_pair_rows if K else 0,
        GATES=config.hidden_size // config.head_dim if K and config.memory_values else 0,
        BITS=packed.bits if packed and not packed.ranks else 0,
        ROW_GROUP=packed.group if packed else 32,
    )


def rope_table(model: PreTrainedModel, length: int) -> torch.Tensor:
    """Return for each position the cosines of half a head's numbers, then the sines."""
    like = model.get_input_embeddings().weight.new_zeros(1, dtype=torch.float32)
    cosine, sine = model.model.rotary_emb(like, torch.arange(length, device=like.device)[None])
    half = cosine.shape[-1] // 2
    return torch.cat([cosine[0, :, :half], sine[0, :, :half]], -1).contiguous()


class FusedForward(Forward):
    """A step by one kernel, for models that `why_not` has nothing against."""

    def __init__(
        self, model: PreTrainedModel, cache: SlotCache, changes: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """The cache must be one tensor; for `changes` see DecodeKernel."""
        super().__init__(model, cache)
        assert cache.states_L2BHTd is not None
        rows = None if self.memory is None else self.memory.row_bytes(cache.ids_B)
        self._places = None if rows is None or rows.which is cache.ids_B else rows.which
        self.waits = self.memory is not None and (rows is None or self._places is not None)
        self.kernel = DecodeKernel(
            shape_of(model),
            stack_weights(model),
            cache.states_L2BHTd[:, :, 0],
            rope_table(model, cache.length),
            cache.ids_B,
            cache.previous_B,
            cache.place_B,
            rows,
            model.config.rms_norm_eps,
            getattr(model.config, "memory_value_scale", 1.0),
            changes,
        )

    def look_up(self, ids: list[int], previous: list[int]) -> None:
        if self._places is not None:
            memory = self.model.model.memory
            numbers = memory.numbers(torch.tensor([ids]), torch.tensor([previous]))
            for part, number in enumerate(numbers):
                self._places[part] = memory.rows.place_of(int(number))
        else:
            self.fetch_rows(self.kernel.rows_KD[None])

    def step(self, sampling: Sampling, generator: torch.Generator) -> None:
        self.kernel.decode()
        if sampling.temperature:
            self.cache.ids_B.copy_(sampling.pick(self.kernel.logits_V[None], generator))

    def reach(self, longest: int) -> int:
        return self.cache.length  # the kernel looks at what is there
