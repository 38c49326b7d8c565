"""Texts that go on from one prompt, side by side: with memory, without it, and by another model."""

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

from tide_lm.model.opened import OpenedModel
from tide_lm.serve.engine import Engine
from tide_lm.serve.generate import fits_engine
from tide_lm.serve.sampling import Sampling
from tide_lm.serve.text import Text, prompt_ids, stop_ids

LONGEST = 512  # tokens of a prompt and its text, or what a model knows if that is less


@dataclass(frozen=True)
class Column:
    """One of the texts: by a model, with its memory or without it. Two engines are kept for later."""

    name: str
    opened: OpenedModel
    memory: bool = True
    _idle: deque[Engine] = field(default_factory=partial(deque, maxlen=2))

    def engine(self) -> Engine:
        """Return an engine that nobody uses: a generation ends the one before it on its engine."""
        try:
            return self._idle.pop()
        except IndexError:
            return Engine(self.opened.model, self.longest, memory=self.memory)

    @property
    def longest(self) -> int:
        """Return the most tokens of a prompt and its text."""
        return min(LONGEST, self.opened.config.max_position_embeddings)

    def give_back(self, engine: Engine) -> None:
        self._idle.append(engine)


def columns(opened: OpenedModel, name: str, base: OpenedModel | None, other: str | None) -> list[Column]:
    """Return the texts that these models write: none by a model that the engine does not take."""
    found = [Column(f"{name}, with memory" if opened.has_memory else name, opened)]
    if opened.has_memory:
        found.append(Column(f"{name}, without memory", opened, memory=False))
    if base is not None:
        found.append(Column(f"{other}", base))
    return [column for column in found if fits_engine(column.opened.config)]


def write(
    columns: list[Column], prompt: str, most: int, sampling: Sampling, lock: AbstractContextManager[object]
) -> Iterator[tuple[list[Text], bool]]:
    """Yield the texts as they grow, by a token each, and whether all have ended.

    A model serves one visitor at a time, who holds the lock.
    """
    tokenizer = columns[0].opened.tokenizer
    if not (ids := prompt_ids(tokenizer, prompt)):
        raise ValueError("the prompt is empty, and this tokenizer has no token to begin with: type some text")
    if len(ids) + most > (longest := min(column.longest for column in columns)):
        raise ValueError(
            f"the prompt has {len(ids)} tokens and the length is {most}, together more than {longest}: "
            "give a shorter prompt or a smaller length"
        )
    with lock:
        engines = [column.engine() for column in columns]
        stops = [stop_ids(tokenizer, column.opened.model) for column in columns]
    texts = [Text(tokenizer, ids[-1], stop) for stop in stops]
    try:
        running = {
            number: engine.generate([ids], most, sampling, stops[number])
            for number, engine in enumerate(engines)
        }
        while running:
            for number, steps in list(running.items()):
                with lock:
                    step = next(steps, None)
                if step is None:
                    del running[number]
                elif step[0] is not None:
                    texts[number].ids.append(step[0])
            yield texts, not running
    finally:
        for column, engine in zip(columns, engines, strict=True):
            column.give_back(engine)
