"""Steps that decode one more token per sequence; on a GPU they are captured as CUDA graphs."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from tide_lm.model.memory import Memory, MemorySource
from tide_lm.serve.cache import SlotCache
from tide_lm.serve.sampling import Sampling

_FEWEST_POSITIONS = 256  # that a step looks at
_COMPILED = 64  # functions of one source: each engine has its own


class Forward(ABC):
    """A step: it reads the last tokens and their positions in the cache, and leaves the next ones there.

    If it `waits`, the host has to know the tokens before the step, to look their rows up.
    """

    waits = False

    def __init__(self, model: PreTrainedModel, cache: SlotCache, memory: bool = True) -> None:
        self.model, self.cache = model, cache
        self.memory: MemorySource | None = getattr(model.model, "memory", None) if memory else None
        self.pool = torch.cuda.graph_pool_handle() if cache.ids_B.is_cuda else None  # of all captured steps

    @abstractmethod
    def look_up(self, ids: list[int], previous: list[int]) -> None:
        """Look up the rows of the cache's tokens, these after those, for the next step."""

    @abstractmethod
    def step(self, sampling: Sampling, generator: torch.Generator) -> None: ...

    def fetch_rows(self, into_BKD: torch.Tensor) -> None:
        """Have the host look up the rows of the cache's tokens."""
        assert self.memory is not None
        ids_B1, previous_B1 = self.cache.ids_B[:, None], self.cache.previous_B[:, None]
        into_BKD.copy_(self.memory(ids_B1, into_BKD.dtype, previous_B1).of_positions())

    def reach(self, longest: int) -> int:
        """Return how many positions a step attends to, if the longest sequence has so many."""
        reach = _FEWEST_POSITIONS
        while reach < longest:
            reach *= 2
        return min(reach, self.cache.length)


def dropping_memory(model: PreTrainedModel) -> dict[str, Any]:
    """Return the arguments of a model's forward that leave its memory out of all layers."""
    has_memory = getattr(model.model, "memory", None) is not None
    return {"drop_memory_layers": range(model.config.num_hidden_layers)} if has_memory else {}


class ModelForward(Forward):
    """A step by the model's own forward; on a GPU it is compiled, and tuned for a minute if wanted."""

    def __init__(
        self, model: PreTrainedModel, cache: SlotCache, memory: bool = True, tune: bool = False
    ) -> None:
        super().__init__(model, cache, memory)
        self._dropped = {} if memory else dropping_memory(model)
        if self.memory is not None and not self.memory.on_device:
            self.waits = True
            K, D = model.config.num_memory_blocks, model.config.hidden_size
            self._rows_BKD = cache.layers[0].new_zeros(len(cache.ids_B), K, D)
        self._run = self._logits
        if cache.ids_B.is_cuda:
            options: dict[str, Any] | None = {"coordinate_descent_tuning": True} if tune else None
            self._run = torch.compile(self._logits, fullgraph=True, options=options)

    def look_up(self, ids: list[int], previous: list[int]) -> None:
        self.fetch_rows(self._rows_BKD)

    def step(self, sampling: Sampling, generator: torch.Generator) -> None:
        picked = sampling.pick(self._run(), generator)
        self.cache.previous_B.copy_(self.cache.ids_B)
        self.cache.ids_B.copy_(picked)
        self.cache.place_B += 1

    def _memory(self) -> Memory | None:
        """Look up the step's rows, unless the host did."""
        if self.memory is None:
            return None
        if self.waits:
            return Memory(self._rows_BKD)
        cache, dtype = self.cache, self.model.get_input_embeddings().weight.dtype
        return self.memory(cache.ids_B[:, None], dtype, cache.previous_B[:, None])

    def _logits(self) -> torch.Tensor:
        memory = self._dropped if self.memory is None else {"memory": self._memory()}
        if self._dropped and self.model.config.memory_pair_rows:
            memory |= {"previous_ids": self.cache.previous_B[:, None]}
        out = self.model(
            input_ids=self.cache.ids_B[:, None],
            position_ids=self.cache.place_B[:, None],
            attention_mask=self.cache.mask(),
            past_key_values=self.cache,
            **memory,
        )
        return out.logits[:, -1]


class Decoder:
    """Runs steps with one kind of sampling."""

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
        """Decode one token per sequence; the longest sequence then has `longest` positions."""
        cache = self.forward.cache
        reach = self.forward.reach(longest)
        cache.look_at(reach)
        if reach not in self._steps:
            self._steps[reach] = self._captured() if cache.ids_B.is_cuda else self._step
        self._steps[reach]()

    def _step(self) -> None:
        self.forward.step(self.sampling, self.generator)

    def _captured(self) -> Callable[[], None]:
        """Capture the step as a graph. Steps that warm up are undone; a replay overwrites what they wrote."""
        cache = self.forward.cache
        moved = (cache.ids_B, cache.previous_B, cache.place_B)
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
