"""A text as models read it: of every token the loss and what it draws from memory, and all about one token.

T tokens, K blocks, S = K + 1 slots with the null bank last, L layers, D hidden, V vocabulary.
"""

import inspect
import math
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from tide_lm.analysis.collapse import watching
from tide_lm.data import tokenizers
from tide_lm.evaluate.perplexity import check_ids, token_losses
from tide_lm.model import TideForCausalLM
from tide_lm.model.gate import MemoryGate
from tide_lm.model.opened import OpenedModel
from tide_lm.ops.cross_entropy import chunked_cross_entropy

LIMIT = 4096  # tokens that are read of a text
LONGEST_WINDOW = 512
PREDICTIONS = 8
_KEPT = 32  # texts


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
    compared: list[float | None]
    done: int
    of_text: int  # tokens, without one that begins it

    @property
    def loss(self) -> float | None:
        """The mean so far."""
        return _mean(self.losses)

    @property
    def compared_loss(self) -> float | None:
        return _mean(self.compared)


def _mean(losses: list[float | None]) -> float | None:
    known = [loss for loss in losses if loss is not None]
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
    """Reads for several visitors, and remembers the texts that were asked for last, as far as they were read.

    A model is used by one at a time: whoever uses it holds the lock.
    """

    def __init__(self, opened: OpenedModel, base: OpenedModel | None = None) -> None:
        if base is not None and tokenizers.fingerprint(base.tokenizer) != tokenizers.fingerprint(
            opened.tokenizer
        ):
            raise ValueError(
                f"{base.name} has another tokenizer than {opened.name}, so that their losses are not of the "
                "same tokens: compare models of one tokenizer"
            )
        self.opened, self.base = opened, base
        self.lock = threading.RLock()
        self._encode = tokenizers.plain_backend(opened.tokenizer)
        self._readings: OrderedDict[str, Reading] = OrderedDict()

    @property
    def window(self) -> int:
        """The tokens of a window: as in training where that is known, and no longer than a model bears."""
        configs = [opened.config.get_text_config() for opened in (self.opened, self.base) if opened]
        positions = [getattr(config, "max_position_embeddings", LONGEST_WINDOW) for config in configs]
        return min(self.opened.sequence or LONGEST_WINDOW, LONGEST_WINDOW, *positions)

    def begin(self, text: str) -> Reading:
        """A text's reading, as far as it has come."""
        with self.lock:
            reading = self._readings.pop(text, None) or self._begin(text)
            self._readings[text] = reading
            while len(self._readings) > _KEPT:
                self._readings.popitem(last=False)
        return reading

    def read(self, text: str) -> Iterator[Reading]:
        """The reading as it grows, by half a window."""
        reading = self.begin(text)
        yield reading
        while reading.done < len(reading.ids):
            with self.lock, torch.no_grad():
                if reading.done < len(reading.ids):  # another visitor may read the same
                    self._read_on(reading)
            yield reading

    def known(self, text: str) -> Reading:
        """A text's reading as far as it has come; read again if it was forgotten for others."""
        reading = self.begin(text)
        if reading.done <= 1:
            *_, reading = self.read(text)
        return reading

    def _begin(self, text: str) -> Reading:
        tokenizer = self.opened.tokenizer
        start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        found = self._encode.encode(text, add_special_tokens=False).ids
        ids = [*([] if start is None else [start]), *found[:LIMIT]]
        if ids:
            check_ids(torch.tensor(ids), self.opened.vocabulary)
        frequencies = self.opened.frequencies
        return Reading(
            ids=ids,
            texts=tokenizers.texts_in_order(tokenizer, ids),
            deciles=[None if frequencies is None else frequencies.decile(id) for id in ids],
            left_out=max(len(found) - LIMIT, 0),
            losses=[None] * len(ids),
            drawn=[None] * len(ids),
            compared=[None] * len(ids) if self.base else [],
            done=min(len(ids), 1),
            of_text=len(ids) - (start is not None),
        )

    def _first_seen(self, place: int) -> int:
        """Where the window begins in which a token is predicted: one starts every half."""
        stride = max(self.window // 2, 1)
        return max(-(-(place - self.window) // stride), 0) * stride

    def _read_on(self, reading: Reading) -> None:
        """The next window."""
        start = self._first_seen(reading.done)
        ids_T = torch.tensor(reading.ids[start : start + self.window + 1])
        new, known = slice(reading.done, start + len(ids_T)), reading.done - start
        if self.opened.has_memory:
            losses, drawn = _losses_and_drawn(self.opened.tide, ids_T)
            reading.drawn[new] = drawn[known:]
            reading.drawn[0] = drawn[0] if start == 0 else reading.drawn[0]
        else:
            losses = _losses(self.opened.model, ids_T)
        reading.losses[new] = _finite(losses, self.opened)[known - 1 :]
        if self.base is not None:
            compared = _finite(_losses(self.base.model, ids_T), self.base)
            reading.compared[new] = compared[known - 1 :]
        reading.done = start + len(ids_T)

    def detail(self, text: str, place: int, layer: int) -> Detail:
        """All about the token at a place, in the window that predicts the next; also without one layer."""
        reading = self.begin(text)
        ids_T = torch.tensor(reading.ids[self._first_seen(place + 1) : place + 1])
        with self.lock, torch.no_grad():
            if not self.opened.has_memory:
                model = self.opened.model
                return Detail([], [], [], {"predicted": self._likeliest(_last_logits(model, ids_T))})
            model, found = self.opened.tide, shares(self.opened.tide, ids_T)
            layers = list(range(len(found.added_L)))
            predictions = {
                "with memory": found.logits_V,
                "without it": _last_logits(model, ids_T, drop_memory_layers=layers),
                f"without it in layer {layer}": _last_logits(model, ids_T, drop_memory_layers=[layer]),
            }
            likeliest = {name: self._likeliest(logits_V) for name, logits_V in predictions.items()}
        return Detail(found.weights_LS.tolist(), found.added_L.tolist(), found.state_L.tolist(), likeliest)

    def _likeliest(self, logits_V: torch.Tensor) -> list[Prediction]:
        best = logits_V.float().softmax(-1).topk(min(PREDICTIONS, len(logits_V)))
        ids, chances = best.indices.tolist(), best.values.tolist()
        texts = tokenizers.token_texts(self.opened.tokenizer, ids)
        named = [text or f"#{id}" for text, id in zip(texts, ids, strict=True)]  # a model may have more ids
        return [Prediction(*pair) for pair in zip(named, chances, strict=True)]


class Shares(NamedTuple):
    weights_LS: torch.Tensor
    added_L: torch.Tensor
    state_L: torch.Tensor
    logits_V: torch.Tensor


def shares(model: TideForCausalLM, ids_T: torch.Tensor) -> Shares:
    """Return, for the last token by layer, router weights and the norms of what memory adds and meets.

    What joins attention's values is not counted. And what is predicted to follow.
    """
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
    added_L, state_L = (torch.linalg.vector_norm(rows, dim=-1) for rows in (added_LD, state_LD - added_LD))
    return Shares(weights_LS, added_L, state_L, model.lm_head(found.last_hidden_state[0, -1]))


def _finite(losses: list[float], opened: OpenedModel) -> list[float]:
    if not all(map(math.isfinite, losses)):
        raise ValueError(f"{opened.name} has a loss on this text that is not finite: its weights are damaged")
    return losses


def _losses(model: PreTrainedModel, ids_T: torch.Tensor) -> list[float]:
    """Return the losses of all tokens but the first."""
    ids_BT = ids_T[None].to(model.device)
    return token_losses(model, ids_BT[:, :-1], ids_BT[:, 1:])[0].tolist()


def _losses_and_drawn(model: TideForCausalLM, ids_T: torch.Tensor) -> tuple[list[float], list[float]]:
    """Return the losses of all tokens but the first, and the weights on memory of all."""
    ids_BT = ids_T[None].to(model.device)
    found = model.model(ids_BT, use_cache=False, output_router_weights=True)
    null_LT = torch.stack([weights_BTS[0, :, -1].float() for weights_BTS in found["router_weights"]])
    hidden_TD = found.last_hidden_state[0, :-1]
    losses_T = chunked_cross_entropy(hidden_TD, model.lm_head.weight, ids_BT[0, 1:]).per_token_N
    return losses_T.tolist(), (1 - null_LT.mean(0)).tolist()


def _last_logits(model: PreTrainedModel, ids_T: torch.Tensor, **options: Any) -> torch.Tensor:
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1
    return model(ids_T[None].to(model.device), use_cache=False, **options).logits[0, -1]
