"""The tokens of a model: found by what they say, with their rows and neighbours."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from tide_lm.analysis import tables
from tide_lm.data import tokenizers
from tide_lm.model.opened import OpenedModel

FOUND = 100  # at most, of a search
_LONGEST_ID = 9  # characters, with its sign


def numbered(words: str) -> int | None:
    """Return the id that `#7` names."""
    named = words.startswith("#") and words[1:].isdecimal() and len(words) <= _LONGEST_ID
    return int(words[1:]) if named else None


@dataclass(frozen=True)
class Entry:
    """A token. `norms` has the norms of its rows as trained, by table; a packed model has E's alone."""

    id: int
    text: str
    count: int | None
    decile: int | None
    norms: dict[str, float]


@dataclass(frozen=True)
class Neighbours:
    """The nearest tokens in E and in each block so far, and the Jaccard index of each block's with E's."""

    searched: int
    candidates: int
    texts: list[list[str]]
    jaccard: list[float]


class Vocabulary:
    def __init__(self, opened: OpenedModel) -> None:
        self.opened = opened

    @cached_property
    def texts(self) -> list[str]:
        """Return the text of each id of the model; an id that the tokenizer lacks has an empty one."""
        tokenizer = self.opened.tokenizer
        known = min(self.opened.vocabulary, tokenizers.vocab_size(tokenizer))
        return tokenizers.token_texts(tokenizer, range(known)) + [""] * (self.opened.vocabulary - known)

    @cached_property
    def _lowered(self) -> list[str]:
        return [text.lower() for text in self.texts]

    def search(self, words: str) -> tuple[list[int], int]:
        """Return ids of tokens that hold the words, the shortest first, or the id `#7`, and their number."""
        if (id := numbered(words)) is not None:
            found = [id] if id < len(self.texts) else []
            return found, len(found)
        wanted = words.lower()
        ids = [id for id, text in enumerate(self._lowered) if wanted and wanted in text]
        ids.sort(key=lambda id: len(self._lowered[id].strip()))
        return ids[:FOUND], len(ids)

    @torch.no_grad()
    def entry(self, id: int) -> Entry:
        opened, bins = self.opened, self.opened.frequencies
        rows = [opened.model.get_input_embeddings().weight[id]]
        if (tables_VKD := opened.trained_rows) is not None:
            rows += tables_VKD[id]
        norms = [float(torch.linalg.vector_norm(row_D.float())) for row_D in rows]
        named = tables.names(opened.config) if len(norms) > 1 else ["E"]
        return Entry(
            id,
            self.texts[id],
            None if bins is None else int(bins.counts_V[id]),
            None if bins is None else bins.decile(id),
            dict(zip(named, norms, strict=True)),
        )

    @cached_property
    def _candidates(self) -> torch.Tensor:
        return tables.known_ids(self.opened)

    @torch.no_grad()
    def neighbours(self, id: int) -> Iterator[Neighbours]:
        """Yield neighbours as they are found."""
        candidates = self._candidates
        for searched, found in tables.nearest_so_far(
            self.opened.model_with_memory, torch.tensor([id]), candidates
        ):
            base, *blocks = found[:, 0].tolist()
            texts = [[self.texts[id] for id in ids] for ids in (base, *blocks)]
            yield Neighbours(searched, len(candidates), texts, [tables.jaccard(base, ids) for ids in blocks])
