"""The engine: prompts in, one list of tokens per step out."""

from collections import deque
from collections.abc import Collection, Generator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from operator import index

import torch
from transformers import PreTrainedModel

from tide_lm.serve.cache import SlotCache
from tide_lm.serve.decoder import Decoder, Forward, ModelForward, dropping_memory
from tide_lm.serve.fused import FusedForward, why_not
from tide_lm.serve.sampling import Sampling, whole_number
from tide_lm.serve.step import LayerForward
from tide_lm.serve.weights import why_opaque

Tokens = list[int | None]  # of one step: of each sequence, None after its end
_KEPT_DECODERS = 4


class Engine:
    """Generates with a Llama or TIDE model on its device: up to `batch` sequences of `length` tokens at once.

    Caches are allocated once. One generation runs at a time, on one CUDA stream: a new one ends the one
    before it. One sequence is decoded by a single kernel where possible, unless `fused` is False;
    `why_not_fused` says what keeps a model from it. Without `memory`, layers get none of it.

    The engine puts the model into `eval` mode and moves its weights together. If its weights are replaced
    later, make another engine.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        model: PreTrainedModel,
        length: int | None = None,
        batch: int = 1,
        fused: bool = True,
        memory: bool = True,
    ) -> None:
        _check_model(model)
        config = model.config
        if batch > 1 and config.rope_parameters.get("rope_type") == "longrope":  # by the longest of them
            raise ValueError(f"batch is {batch}: with positions of type longrope it must be 1")
        longest = config.max_position_embeddings
        self.length = longest if length is None else length
        if not 2 <= self.length <= longest:
            raise ValueError(f"length is {length}: this model knows 2 to {longest} positions")
        if batch < 1:
            raise ValueError(f"batch is {batch}: it must be at least 1")
        self.model, self.batch, self.memory = model.eval(), batch, memory
        rotary = model.model.rotary_emb
        if rotary.inv_freq.dtype != torch.float32:  # as after model.to(torch.bfloat16): positions would blur
            model.model.rotary_emb = type(rotary)(config).to(model.device)
        self.vocabulary = config.vocab_size
        self.why_not_fused = why_not(model, batch) if fused and memory else "fused or memory is False"
        self.forward = self._forward()
        self.cache = self.forward.cache
        self._weights = _places(model)
        self._decoders: dict[Sampling, Decoder] = {}
        self._generations = 0

    def _forward(self) -> Forward:
        like = self.model.get_input_embeddings().weight
        cache = partial(SlotCache, self.model.config, self.batch, self.length, like)
        if self.why_not_fused is None:
            try:
                return FusedForward(self.model, cache(together=True))
            except ValueError as error:  # of a compiler that is not there, or too old
                self.why_not_fused = str(error)
        rope = self.model.config.rope_parameters.get("rope_type")
        if self.model.device.type == "cuda" and rope == "dynamic":  # which asks for the longest position
            raise ValueError(
                "positions of type dynamic do not compile: on a GPU they need the kernel for one sequence "
                f"(what keeps it from that: {self.why_not_fused})"
            )
        if why_opaque(self.model) is None:
            return LayerForward(self.model, cache(), self.memory)
        return ModelForward(self.model, cache(), self.memory)

    def generate(
        self,
        prompts: Iterable[Iterable[int]],
        max_new_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: Collection[int] = (),
    ) -> Generator[Tokens]:
        """Yield the next tokens, one list per step; a sequence ends with the first token of `stop`."""
        try:
            lists = [[index(token) for token in prompt] for prompt in prompts]
        except TypeError:
            raise ValueError("prompts must be a list of lists of token ids, such as [[5, 6, 7]]") from None
        try:
            ends = frozenset(map(index, stop))
        except TypeError:
            raise ValueError(f"stop is {stop!r}: it must be a list of token ids, such as [2]") from None
        most = None if max_new_tokens is None else whole_number("max_new_tokens", max_new_tokens)
        if not isinstance(sampling, Sampling | None):
            raise ValueError(f"sampling is {sampling!r}: give a Sampling, such as Sampling(temperature=0.8)")
        self._check(lists, most)
        if _places(self.model) != self._weights:
            raise ValueError("the model's weights were moved or replaced: make a new Engine")
        most = self.length - max(map(len, lists)) if most is None else most
        return self._run(lists, most, sampling or Sampling(), ends)

    def _run(
        self, prompts: list[list[int]], most: int, sampling: Sampling, stop: frozenset[int]
    ) -> Generator[Tokens]:
        self._generations += 1
        mine, decoder, waits = self._generations, self.decoder(sampling), self.forward.waits
        self._prefill(prompts, decoder)
        under_way, longest = deque([_Sent(self.cache.ids_B)]), max(map(len, prompts))
        lengths = iter(range(longest + 1, longest + most))

        previous = [prompt[-1] for prompt in prompts] + [0] * (self.batch - len(prompts))

        @torch.no_grad()
        def begin(ids: list[int]) -> None:
            nonlocal previous
            if length := next(lengths, None):
                if waits:
                    self.forward.look_up(ids, previous)
                    previous = ids
                decoder.step(length)
                under_way.append(_Sent(self.cache.ids_B))

        ended = [False] * len(prompts)
        while under_way:
            if mine != self._generations:
                raise ValueError("this generation has ended: another was begun on its engine")
            if not waits:
                begin([])  # while the last token is on its way
            ids = under_way.popleft().wait()
            tokens = [None if done else token for token, done in zip(ids, ended, strict=False)]
            ended = [done or token in stop for token, done in zip(ids, ended, strict=False)]
            if waits and not all(ended):
                begin(ids)
            yield tokens
            if all(ended):
                return

    def decoder(self, sampling: Sampling) -> Decoder:
        """Return the decoder for this sampling; those of the last few kinds are kept."""
        kind = replace(sampling, seed=None)
        decoder = self._decoders.pop(kind, None) or Decoder(self.forward, kind)
        self._decoders[kind] = decoder
        if len(self._decoders) > _KEPT_DECODERS:
            del self._decoders[next(iter(self._decoders))]
        decoder.seed(sampling.seed)
        return decoder

    @torch.no_grad()
    def _prefill(self, prompts: list[list[int]], decoder: Decoder) -> None:
        """Read the prompts, padded on the right, where no token of a prompt attends to."""
        lengths = torch.tensor([len(prompt) for prompt in prompts] + [1] * (self.batch - len(prompts)))
        ids_BT = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long)
        for row, prompt in zip(ids_BT, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        cache, device = self.cache, self.cache.place_B.device
        cache.place_B.copy_(lengths)
        dropped = {} if self.memory else dropping_memory(self.model)
        filled = self.model.model(input_ids=ids_BT.to(device), use_cache=True, **dropped)
        cache.keep(filled.past_key_values)
        last_B = cache.place_B[: len(prompts)] - 1
        last_BD = filled.last_hidden_state[torch.arange(len(prompts), device=device), last_B]
        picked = decoder.sampling.pick(self.model.lm_head(last_BD), decoder.generator)
        cache.ids_B.zero_()
        cache.ids_B[: len(prompts)] = picked
        cache.previous_B.zero_()
        cache.previous_B[: len(prompts)] = ids_BT[torch.arange(len(prompts)), last_B.cpu()].to(device)

    def _check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int | None) -> None:
        if not 1 <= len(prompts) <= self.batch:
            raise ValueError(f"there are {len(prompts)} prompts: this engine takes 1 to {self.batch} at once")
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}: it must be at least 1")
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {number} is empty: give it at least one token, such as the first")
            if outside := [token for token in prompt if not 0 <= token < self.vocabulary]:
                raise ValueError(
                    f"token id {outside[0]} of prompt {number} is outside the vocabulary of "
                    f"{self.vocabulary}: use the tokenizer that this model was trained with"
                )
            if len(prompt) + (max_new_tokens or 1) > self.length:
                known = self.model.config.max_position_embeddings
                larger = f"give the engine a larger length, up to the model's {known}"
                raise ValueError(
                    f"prompt {number} has {len(prompt)} tokens, which with {max_new_tokens or 1} new are "
                    f"more than the cache's {self.length}: ask for fewer, or "
                    + (larger if self.length < known else "give a shorter prompt; the model knows no more")
                )


def _check_model(model: PreTrainedModel) -> None:
    """Check that the model is a Llama or TIDE model with sdpa attention, on one device."""
    if not isinstance(model, PreTrainedModel) or not hasattr(model, "lm_head"):
        raise ValueError(
            f"this is a {type(model).__name__}: give a causal model of transformers, as PEFT has in "
            "get_base_model()"
        )
    if model.config.model_type not in ("llama", "tide"):
        raise ValueError(f"this is a model of type {model.config.model_type!r}: give a Llama or a TIDE model")
    if (attention := model.config._attn_implementation) != "sdpa":
        raise ValueError(f"attention is {attention!r}: load the model with attn_implementation='sdpa'")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise ValueError(f"weights are on {', '.join(sorted(map(str, devices)))}: put them on one device")
    if model.device.type == "cuda" and model.device.index != torch.cuda.current_device():
        raise ValueError(f"the model is on {model.device}: call torch.cuda.set_device with that first")


def _places(model: PreTrainedModel) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]


class _Sent:
    """Tokens that are being copied to the host."""

    def __init__(self, ids_B: torch.Tensor) -> None:
        self._ids = ids_B.to("cpu", non_blocking=True, copy=True)  # from a GPU, into pinned memory
        self._arrived = torch.cuda.Event() if ids_B.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> list[int]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._ids.tolist()
