"""The tokens of a model: found by what they say, with their rows and neighbours."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from tide_lm.analysis import tables
from tide_lm.evaluate.subject import Subject
from tide_lm.model import EmbeddingMemory

FOUND = 100  # at most, of a search


@dataclass(frozen=True)
class Entry:
    """A token. `norms` are of its rows as trained, by table, and of the tables that are there."""

    id: int
    text: str
    count: int | None
    decile: int | None
    norms: dict[str, float]


class Vocabulary:
    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    @cached_property
    def texts(self) -> list[str]:
        """Of each id of the model; those that the tokenizer lacks are empty."""
        ids = range(min(self.subject.vocabulary, len(self.subject.tokenizer)))
        found = self.subject.tokenizer.batch_decode([[id] for id in ids])
        return found + [""] * (self.subject.vocabulary - len(found))

    @cached_property
    def _lowered(self) -> list[str]:
        return [text.lower() for text in self.texts]

    def search(self, words: str) -> tuple[list[int], int]:
        """Ids of tokens that hold the words, the shortest first, or the id `#7`; and how many there are."""
        if words.startswith("#") and words[1:].isdecimal():
            found = [int(words[1:])] if int(words[1:]) < len(self.texts) else []
            return found, len(found)
        wanted = words.lower() if words.strip() else words
        ids = [id for id, text in enumerate(self._lowered) if wanted and wanted in text]
        ids.sort(key=lambda id: (len(self._lowered[id].strip()), self._lowered[id].strip() != wanted.strip()))
        return ids[:FOUND], len(ids)

    @torch.no_grad()
    def entry(self, id: int) -> Entry:
        subject = self.subject
        bins = subject.frequencies
        count, decile = (None, None) if bins is None else (int(bins.counts_V[id]), int(bins.bins_V[id]))
        rows = {"E": subject.model.get_input_embeddings().weight[id]}
        memory = getattr(subject.model.base_model, "memory", None)
        if isinstance(memory, EmbeddingMemory):
            rows |= {f"M{block + 1}": row_D for block, row_D in enumerate(memory.weight[id])}
        norms = {name: float(torch.linalg.vector_norm(row_D.float())) for name, row_D in rows.items()}
        return Entry(id, self.texts[id], count, None if decile == -1 else decile, norms)

    @cached_property
    def _candidates(self) -> torch.Tensor:
        return tables.known_ids(self.subject)

    def neighbours(self, id: int) -> dict[str, Any]:
        """In E and in each block, with Jaccard's index of each block with E (see analysis.tables)."""
        return tables.neighbours_of(self.subject, id, self._candidates)
