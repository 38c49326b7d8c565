"""One more token for each of several sequences; on a GPU a step is captured as a graph."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from tide_lm.model.memory import MemorySource
from tide_lm.serve.cache import SlotCache
from tide_lm.serve.sampling import Sampling
from tide_lm.serve.stacking import JointProducts, why_apart

_SHORTEST = 256  # positions that are looked at
_COMPILED = 64  # functions of one source: each engine has its own
_GROUPED = "tide_grouped"  # attention, as transformers is told


class Forward(ABC):
    """A step from the tokens at the cache's places to the next ones, which it leaves there.

    If it `waits`, tokens have to be known to the host before a step, which looks their rows up for it.
    """

    waits = False

    def __init__(self, model: PreTrainedModel, cache: SlotCache) -> None:
        self.model, self.cache = model, cache
        self.memory: MemorySource | None = getattr(model.model, "memory", None)
        self.pool = torch.cuda.graph_pool_handle() if cache.ids_B.is_cuda else None  # of all captured steps

    @abstractmethod
    def look_up(self, ids: list[int]) -> None:
        """Put the rows of these tokens, which are those of the cache, where the next step finds them."""

    @abstractmethod
    def step(self, sampling: Sampling, generator: torch.Generator) -> None: ...

    def fetch_rows(self, into_BKD: torch.Tensor) -> None:
        """Have the host look up the rows of the cache's tokens."""
        assert self.memory is not None
        into_BKD.copy_(self.memory.rows_of(self.cache.ids_B, into_BKD.dtype))

    def reach(self, longest: int) -> int:
        """How many positions a step looks at, if the longest sequence has so many."""
        reach = _SHORTEST
        while reach < longest:
            reach *= 2
        return min(reach, self.cache.length)


class ModelForward(Forward):
    """A step by the model's forward, compiled on a GPU; not `tuned`, with its own products and attention."""

    def __init__(self, model: PreTrainedModel, cache: SlotCache, tuned: bool = True) -> None:
        super().__init__(model, cache)
        if self.memory is not None and not self.memory.on_device:
            self.waits = True
            K, D = model.config.num_memory_blocks, model.config.hidden_size
            self._rows_BKD = cache.layers[0].new_zeros(len(cache.ids_B), K, D)
        self._run = self._logits
        self._for_a_step: list[Callable[[], AbstractContextManager[None]]] = []
        if tuned:
            self._for_a_step.append(partial(_grouped_heads, model.config))
        if cache.ids_B.is_cuda:
            # Which takes a minute to make a model's own products faster, and does little for ours.
            search: dict[str, Any] | None = None if tuned else {"coordinate_descent_tuning": True}
            self._run = torch.compile(self._logits, fullgraph=True, options=search)
            if tuned and why_apart(model) is None:
                self._for_a_step.append(JointProducts(model).used)

    def look_up(self, ids: list[int]) -> None:
        self.fetch_rows(self._rows_BKD)

    def step(self, sampling: Sampling, generator: torch.Generator) -> None:
        with ExitStack() as stack:
            for change in self._for_a_step:
                stack.enter_context(change())
            logits_BV = self._run()
        self.cache.ids_B.copy_(sampling.pick(logits_BV, generator))
        self.cache.place_B += 1

    def _logits(self) -> torch.Tensor:
        rows = {"memory": (self._rows_BKD, None)} if self.waits else {}
        out = self.model(
            input_ids=self.cache.ids_B[:, None],
            position_ids=self.cache.place_B[:, None],
            attention_mask=self.cache.mask(),
            past_key_values=self.cache,
            **rows,
        )
        return out.logits[:, -1]


def _grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attend from one token: heads that share keys become tokens of one head; no key is repeated."""
    grouped = query.view(len(query), key.shape[1], -1, query.shape[-1])
    out = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=scaling
    )
    return out.reshape(len(query), 1, -1, query.shape[-1]), None


AttentionInterface.register(_GROUPED, _grouped_attention)


@contextmanager
def _grouped_heads(config: PreTrainedConfig) -> Iterator[None]:
    usual, config._attn_implementation = config._attn_implementation, _GROUPED
    try:
        yield
    finally:
        config._attn_implementation = usual


class Decoder:
    """Steps with one kind of sampling."""

    def __init__(self, forward: Forward, sampling: Sampling) -> None:
        self.forward, self.sampling = forward, sampling
        self.generator = torch.Generator(forward.cache.ids_B.device)
        self._steps: dict[int, Callable[[], None]] = {}

    def seed(self, seed: int | None) -> None:
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(int(seed))

    def step(self, longest: int) -> None:
        """The next token of each sequence; `longest` is how many positions the longest has with it."""
        cache = self.forward.cache
        reach = self.forward.reach(longest)
        cache.look_at(reach)
        if reach not in self._steps:
            self._steps[reach] = self._captured() if cache.ids_B.is_cuda else self._step
        self._steps[reach]()

    def _step(self) -> None:
        self.forward.step(self.sampling, self.generator)

    def _captured(self) -> Callable[[], None]:
        """The step as a graph. Tries before it are undone; what they wrote, its first replay writes again."""
        moved = (self.forward.cache.ids_B, self.forward.cache.place_B)
        before, drawn = [tensor.clone() for tensor in moved], self.generator.get_state()

        def restore() -> None:
            for tensor, kept in zip(moved, before, strict=True):
                tensor.copy_(kept)
            self.generator.set_state(drawn)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch._dynamo.config.patch(recompile_limit=_COMPILED):
            for _ in range(2):
                self._step()
                restore()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        with torch.cuda.graph(graph, pool=self.forward.pool):
            self._step()
        restore()
        return graph.replay
