"""A text as models read it: of every token the loss and what it draws from memory, and all about one token.

T tokens, K blocks, S = K + 1 slots with the null bank last, L layers, D hidden.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from tide_lm.analysis.collapse import watching
from tide_lm.data import tokenizers
from tide_lm.data.frequency import UNBINNED
from tide_lm.evaluate.perplexity import Windows, check_ids, cut, token_losses
from tide_lm.evaluate.subject import Subject
from tide_lm.model import MemoryGate, TideForCausalLM

LIMIT = 4096  # tokens that are read of a text
LONGEST_WINDOW = 1024
PREDICTIONS = 8
_KEPT = 8  # texts


@dataclass
class Reading:
    """What is known of a text so far: `done` tokens of all. Of the first, which begins it, there is no loss.

    `drawn` is the router's weight that is not on the null bank, the mean over layers.
    """

    ids: list[int]
    texts: list[str]
    deciles: list[int | None]
    left_out: int
    losses: list[float | None]
    drawn: list[float | None]
    compared: list[float | None] = field(default_factory=list)
    done: int = 1

    @property
    def loss(self) -> float | None:
        """The mean so far."""
        known = [loss for loss in self.losses if loss is not None]
        return sum(known) / len(known) if known else None


@dataclass(frozen=True)
class Prediction:
    text: str
    probability: float


@dataclass(frozen=True)
class Detail:
    """What memory does to one token, by layer, and what is predicted to follow it.

    `added` is the norm of what memory adds to the state of a layer, `state` that of the state without it.
    """

    weights: list[list[float]]
    added: list[float]
    state: list[float]
    predictions: dict[str, list[Prediction]]


class Reader:
    """Reads for several visitors, one after the other, and remembers the texts that were read last."""

    def __init__(self, subject: Subject, base: Subject | None = None) -> None:
        if base is not None and tokenizers.fingerprint(base.tokenizer) != tokenizers.fingerprint(
            subject.tokenizer
        ):
            raise ValueError(
                f"{base.name} has another tokenizer than {subject.name}, so that their losses are not of the "
                "same tokens: compare models of one tokenizer"
            )
        self.subject, self.base = subject, base
        self.has_memory = bool(getattr(subject.config, "num_memory_blocks", 0))
        self._encode = tokenizers.plain_backend(subject.tokenizer)
        self._lock = threading.Lock()
        self._read: OrderedDict[str, Reading] = OrderedDict()

    @property
    def window(self) -> int:
        """Of tokens, as in training where that is known."""
        longest = getattr(self.subject.config.get_text_config(), "max_position_embeddings", LONGEST_WINDOW)
        return min(self.subject.sequence or LONGEST_WINDOW, longest)

    def read(self, text: str) -> Iterator[Reading]:
        """The reading as it grows, by half a window; a text that was read lately comes at once."""
        if text in self._read:
            yield self._read[text]
            return
        reading = self._begin(text)
        first = 1
        windows = Windows(self.window, max(self.window // 2, 1), 1)
        for window in cut([np.array(reading.ids)], windows):
            ids_T = torch.from_numpy(window.ids)
            with self._lock, torch.no_grad():
                self._add(reading, ids_T, window.first)
            first += len(window.ids) - window.first
            reading.done = first
            yield reading
        if reading.done == 1:
            yield reading
        self._read[text] = reading
        while len(self._read) > _KEPT:
            self._read.popitem(last=False)

    def known(self, text: str) -> Reading:
        """A text's reading if it was read lately, or its tokens alone."""
        return self._read.get(text) or self._begin(text)

    def _begin(self, text: str) -> Reading:
        tokenizer = self.subject.tokenizer
        start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        found = self._encode.encode(text, add_special_tokens=False).ids
        ids = [*([] if start is None else [start]), *found[:LIMIT]]
        if ids:
            check_ids(torch.tensor(ids), self.subject.vocabulary)
        return Reading(
            ids=ids,
            texts=[tokenizer.decode([id]) for id in ids],
            deciles=[self.decile(id) for id in ids],
            left_out=max(len(found) - LIMIT, 0),
            losses=[None] * len(ids),
            drawn=[None] * len(ids),
            compared=[None] * len(ids) if self.base else [],
        )

    def decile(self, id: int) -> int | None:
        """From 0, the rarest; None if it has none, or frequencies are not known."""
        bins = self.subject.frequencies
        found = UNBINNED if bins is None else int(bins.bins_V[id])
        return None if found == UNBINNED else found

    def _add(self, reading: Reading, ids_T: torch.Tensor, first: int) -> None:
        """Losses of a window's tokens from `first` on, and what they draw."""
        place = slice(reading.done, reading.done + len(ids_T) - first)
        reading.losses[place] = _losses(self.subject.model, ids_T)[first - 1 :]
        if self.base is not None:
            reading.compared[place] = _losses(self.base.model, ids_T)[first - 1 :]
        if self.has_memory:
            drawn = _drawn(self.subject.tide, ids_T)
            reading.drawn[place] = drawn[first:]
            if first == 1:
                reading.drawn[0] = drawn[0]

    def detail(self, reading: Reading, position: int, layer: int) -> Detail:
        """All about the token at a position; predictions also without the memory of one layer."""
        size = self.window
        ids_T = torch.tensor(reading.ids[max(position + 1 - size, 0) : position + 1])
        with self._lock, torch.no_grad():
            if not self.has_memory:
                return Detail([], [], [], {"memory": self._predicted(ids_T)})
            weights_LS, added_L, state_L = shares(self.subject.tide, ids_T)
            layers = range(len(added_L))
            predictions = {
                "with memory": self._predicted(ids_T),
                "without it": self._predicted(ids_T, drop_memory_layers=list(layers)),
                f"without it in layer {layer}": self._predicted(ids_T, drop_memory_layers=[layer]),
            }
        return Detail(weights_LS.tolist(), added_L.tolist(), state_L.tolist(), predictions)

    def _predicted(self, ids_T: torch.Tensor, **options: Any) -> list[Prediction]:
        model = self.subject.model
        logits_V = model(ids_T[None].to(model.device), use_cache=False, **options).logits[0, -1].float()
        best = logits_V.softmax(-1).topk(min(PREDICTIONS, len(logits_V)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [Prediction(self.subject.tokenizer.decode([id]), chance) for id, chance in pairs]


def shares(model: TideForCausalLM, ids_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the last token, by layer: router weights, and the norms of what memory adds and of what it meets."""
    ids_BT = ids_T[None].to(model.device)
    memory = model.model.memory_for(ids_BT)
    gates: list[torch.Tensor] = []
    hooks = [
        gate.register_forward_hook(lambda module, given, out: gates.append(out[0, -1]))
        for gate in model.model.modules()
        if isinstance(gate, MemoryGate)
    ]
    try:
        with watching(model.model.layers) as (states, _):
            found = model.model(ids_BT, use_cache=False, memory=memory, output_router_weights=True)
    finally:
        for hook in hooks:
            hook.remove()
    weights_LS = torch.stack([weights_BTS[0, -1].float() for weights_BTS in found["router_weights"]])
    last = -1 if memory.index_BT is None else int(memory.index_BT[0, -1])
    added_LD = torch.stack(gates).float() if gates else weights_LS[:, :-1] @ memory.rows_UKD[last].float()
    state_LD = torch.stack([state_BTD[0, -1].float() for state_BTD in states])
    norm = torch.linalg.vector_norm
    return weights_LS, norm(added_LD, dim=-1), norm(state_LD - added_LD, dim=-1)


def _losses(model: PreTrainedModel, ids_T: torch.Tensor) -> list[float]:
    """Of all but the first."""
    ids_BT = ids_T[None].to(model.device)
    return token_losses(model, ids_BT[:, :-1], ids_BT[:, 1:])[0].tolist()


def _drawn(model: TideForCausalLM, ids_T: torch.Tensor) -> list[float]:
    ids_BT = ids_T[None].to(model.device)
    weights = model.model(ids_BT, use_cache=False, output_router_weights=True)["router_weights"]
    return (1 - torch.stack([weights_BTS[0, :, -1].float() for weights_BTS in weights]).mean(0)).tolist()
