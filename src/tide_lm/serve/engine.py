"""Prompts in, tokens out, one list a step."""

from collections import deque
from collections.abc import Collection, Generator, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from tide_lm.serve.cache import SlotCache
from tide_lm.serve.decoder import Decoder, ModelDecoder
from tide_lm.serve.fused import FusedDecoder, stack_weights, why_not
from tide_lm.serve.sampling import Sampling

Tokens = list[int | None]  # of one step: of each sequence, None after its end


class Engine:
    """Generates with a model on its device: up to `batch` sequences at once, of up to `length` tokens.

    Caches are made once. One generation runs at a time, and one that is left early needs no clean-up. One
    sequence is decoded by a single kernel where that can be (`why_not_fused` tells), unless not `fused`.
    """

    def __init__(
        self, model: PreTrainedModel, length: int | None = None, batch: int = 1, fused: bool = True
    ) -> None:
        config = model.config.get_text_config()
        longest = config.max_position_embeddings
        self.length = longest if length is None else length
        if not 2 <= self.length <= longest:
            raise ValueError(f"length is {length}: this model knows 2 to {longest} positions")
        if batch < 1:
            raise ValueError(f"batch is {batch}: it must be at least 1")
        self.model, self.batch = model.eval(), batch
        self.vocabulary = config.vocab_size
        self.cache = SlotCache(config, batch, self.length, model.get_input_embeddings().weight)
        self.why_not_fused = why_not(model, batch) if fused else "it was not wanted"
        self._weights = None if self.why_not_fused else stack_weights(model)
        self._decoders: dict[Sampling, Decoder] = {}
        self._busy = False

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: Collection[int] = (),
    ) -> Generator[Tokens]:
        """The next tokens, as they come; a sequence ends with a token of `stop`, which is told too."""
        self._check(prompts, max_new_tokens)
        longest = max(map(len, prompts))
        most = self.length - longest if max_new_tokens is None else max_new_tokens
        return self._run([list(prompt) for prompt in prompts], most, sampling or Sampling(), frozenset(stop))

    @torch.no_grad()
    def _run(
        self, prompts: list[list[int]], most: int, sampling: Sampling, stop: frozenset[int]
    ) -> Generator[Tokens]:
        if self._busy:
            raise ValueError("this engine is generating: end that generation, or make another engine")
        self._busy = True
        try:
            decoder = self.decoder(sampling)
            self._prefill(prompts, decoder)
            under_way, longest = deque([_Sent(decoder.ids_B)]), max(map(len, prompts))
            lengths = iter(range(longest + 1, longest + most))

            def begin() -> None:
                if length := next(lengths, None):
                    decoder.step(length)
                    under_way.append(_Sent(decoder.ids_B))

            ended = [False] * len(prompts)
            while under_way:
                if not decoder.waits:
                    begin()  # before the token before it is known
                ids = under_way.popleft().wait()
                if decoder.waits:
                    decoder.look_up(ids)
                    begin()
                yield [None if done else token for token, done in zip(ids, ended, strict=False)]
                ended = [done or token in stop for token, done in zip(ids, ended, strict=False)]
                if all(ended):
                    return
        finally:
            self._busy = False

    def decoder(self, sampling: Sampling) -> Decoder:
        kind = replace(sampling, seed=None)  # what a captured step depends on
        if kind not in self._decoders:
            if self._weights is None:
                self._decoders[kind] = ModelDecoder(self.model, self.cache, kind)
            else:
                self._decoders[kind] = FusedDecoder(self.model, self._weights, self.cache, kind)
        self._decoders[kind].seed(sampling.seed)
        return self._decoders[kind]

    def _prefill(self, prompts: list[list[int]], decoder: Decoder) -> None:
        """Prompts are filled up on the right, with what no token before it sees."""
        lengths = torch.tensor([len(prompt) for prompt in prompts] + [1] * (self.batch - len(prompts)))
        ids_BT = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long)
        for row, prompt in zip(ids_BT, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        cache, device = self.cache, self.cache.place_B.device
        cache.place_B.copy_(lengths)
        filled = self.model.model(input_ids=ids_BT.to(device), use_cache=True)
        cache.keep(filled.past_key_values)
        last_B = cache.place_B[: len(prompts)] - 1
        last_BD = filled.last_hidden_state[torch.arange(len(prompts), device=device), last_B]
        picked = decoder.sampling.pick(self.model.lm_head(last_BD), decoder.generator)
        decoder.ids_B.zero_()
        decoder.ids_B[: len(prompts)] = picked

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
                raise ValueError(
                    f"prompt {number} has {len(prompt)} tokens, which with {max_new_tokens or 1} new are "
                    f"more than the cache's {self.length}: ask for fewer, or give the engine a larger length"
                )


class _Sent:
    """Tokens on their way to the host."""

    def __init__(self, ids_B: torch.Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if ids_B.device.type != "cuda":
            self._ids = ids_B.clone()
            return
        self._ids = torch.empty(ids_B.shape, dtype=ids_B.dtype, pin_memory=True)
        self._ids.copy_(ids_B, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def wait(self) -> list[int]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._ids.tolist()
