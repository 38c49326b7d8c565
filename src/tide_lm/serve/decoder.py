"""One more token for each of several sequences; on a GPU a step is captured as a graph."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from tide_lm.serve.cache import SlotCache
from tide_lm.serve.sampling import Sampling
from tide_lm.stored_memory import StoredMemory

_SHORTEST = 256  # positions that are looked at


class Decoder(ABC):
    """Tokens in, tokens out, both in `ids_B`; the cache's places move on by themselves.

    If it `waits`, tokens have to be known to the host before a step, which looks their rows up for it.
    """

    waits = False

    def __init__(self, model: PreTrainedModel, cache: SlotCache, sampling: Sampling) -> None:
        self.model, self.cache, self.sampling = model, cache, sampling
        self.ids_B = torch.zeros_like(cache.place_B)
        self.generator = torch.Generator(cache.place_B.device)
        self._steps: dict[int, Callable[[], None]] = {}

    def seed(self, seed: int | None) -> None:
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(seed)

    @abstractmethod
    def look_up(self, ids: list[int]) -> None:
        """Has the rows of these tokens, which are those in `ids_B`, where the next step finds them."""

    def step(self, longest: int) -> None:
        """The next token of each sequence; `longest` is how many positions the longest has with it."""
        self.cache.reach = reach = self._reach(longest)
        if reach not in self._steps:
            self._steps[reach] = self._captured() if self.ids_B.is_cuda else self._step
        self._steps[reach]()

    @abstractmethod
    def _step(self) -> None: ...

    def _compiled(self) -> Callable[[], None]:
        return self._step

    def _reach(self, longest: int) -> int:
        return min(max(_SHORTEST, 1 << (longest - 1).bit_length()), self.cache.length)

    def _captured(self) -> Callable[[], None]:
        """The step as a graph. Tries before it are undone; what they wrote, its first replay writes again."""
        step, moved = self._compiled(), (self.ids_B, self.cache.place_B)
        before, drawn = [tensor.clone() for tensor in moved], self.generator.get_state()

        def restore() -> None:
            for tensor, kept in zip(moved, before, strict=True):
                tensor.copy_(kept)
            self.generator.set_state(drawn)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
                restore()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.generator)
        with torch.cuda.graph(graph):
            step()
        restore()
        return graph.replay


def rows_from_host(model: PreTrainedModel, ids_B: torch.Tensor, into_BKD: torch.Tensor) -> None:
    """Rows of packed memory that is in the host's memory or in a file."""
    rows_UKD, index_B1 = model.model.memory(ids_B[:, None], into_BKD.dtype)
    into_BKD.copy_(rows_UKD if index_B1 is None else rows_UKD[index_B1.flatten()])


class ModelDecoder(Decoder):
    """By the model's own forward, compiled on a GPU."""

    def __init__(self, model: PreTrainedModel, cache: SlotCache, sampling: Sampling) -> None:
        super().__init__(model, cache, sampling)
        memory = getattr(model.model, "memory", None)
        if isinstance(memory, StoredMemory) and memory.bytes_VR is None:
            self.waits = True
            self._rows_BKD = cache.states_L2BHTd.new_zeros(len(self.ids_B), memory.blocks, memory.hidden)

    def look_up(self, ids: list[int]) -> None:
        rows_from_host(self.model, self.ids_B, self._rows_BKD)

    def _step(self) -> None:
        rows = {"memory": (self._rows_BKD, None)} if self.waits else {}
        place_B = self.cache.place_B
        out = self.model(
            input_ids=self.ids_B[:, None],
            position_ids=place_B[:, None],
            attention_mask=self.cache.mask(),
            past_key_values=self.cache,
            **rows,
        )
        self.ids_B.copy_(self.sampling.pick(out.logits[:, -1], self.generator))
        place_B += 1

    def _compiled(self) -> Callable[[], None]:
        return torch.compile(self._step, fullgraph=True, dynamic=False)
