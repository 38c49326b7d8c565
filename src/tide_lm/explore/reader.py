"""The reading of a text: the loss of each token, its weight on memory, and all about one token.

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
from tide_lm.evaluation.perplexity import check_ids, token_losses
from tide_lm.model import TideForCausalLM
from tide_lm.model.opened import OpenedModel
from tide_lm.ops.cross_entropy import chunked_cross_entropy

LIMIT = 4096  # tokens that are read of a text
LONGEST_WINDOW = 512
PREDICTIONS = 8
OTHER = "the other model"
_KEPT = 32  # texts


@dataclass
class ReadText:
    """The numbers of a text, token by token, as far as `done` tokens have been read.

    The first token begins the text and has no loss. `on_memory` is the router's weight that is not on the
    null bank, as a mean over layers.
    """

    ids: list[int]
    texts: list[str]
    deciles: list[int | None]
    left_out: int
    losses: list[float | None]
    on_memory: list[float | None]
    base_losses: list[float | None]
    done: int
    of_text: int  # tokens, without one that begins it

    @property
    def loss(self) -> float | None:
        """The mean so far."""
        return _mean(self.losses)

    @property
    def base_loss(self) -> float | None:
        return _mean(self.base_losses)


def _mean(losses: list[float | None]) -> float | None:
    known = [loss for loss in losses if loss is not None]
    return sum(known) / len(known) if known else None


@dataclass(frozen=True)
class Detail:
    """The effect of memory on one token, by layer, and the tokens that are predicted to follow it.

    `added` is the norm of what memory adds to the state of a layer, `state` that of the state without it. A
    prediction is a token's text and its probability.
    """

    weights: list[list[float]]
    added: list[float]
    state: list[float]
    predictions: dict[str, list[tuple[str, float]]]


class Reader:
    """A reader for several visitors, which keeps the last texts as far as they were read.

    A model serves one visitor at a time, who holds the lock.
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
        self._texts: OrderedDict[str, ReadText] = OrderedDict()

    @property
    def window(self) -> int:
        """Return the tokens per window: as in training where that is known, within what a model allows."""
        configs = [opened.config.get_text_config() for opened in (self.opened, self.base) if opened]
        positions = [getattr(config, "max_position_embeddings", LONGEST_WINDOW) for config in configs]
        return min(self.opened.sequence or LONGEST_WINDOW, LONGEST_WINDOW, *positions)

    def begin(self, typed: str) -> ReadText:
        """Return a text as far as it has been read."""
        with self.lock:
            text = self._texts.pop(typed, None) or self.encoded(typed)
            self._texts[typed] = text
            while len(self._texts) > _KEPT:
                self._texts.popitem(last=False)
        return text

    def read(self, typed: str) -> Iterator[ReadText]:
        """Yield a text as it is read, by half a window."""
        text = self.begin(typed)
        yield text
        while text.done < len(text.ids):
            with self.lock, torch.no_grad():
                if text.done < len(text.ids):  # another visitor may read the same
                    self._read_on(text)
            yield text

    def known(self, typed: str) -> ReadText:
        """Return a text as far as it has been read; one that was dropped for others is read again."""
        text = self.begin(typed)
        if text.done <= 1:
            *_, text = self.read(typed)
        return text

    def encoded(self, typed: str) -> ReadText:
        """Return a text in tokens, none of which has been read."""
        tokenizer = self.opened.tokenizer
        start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        found = self._encode.encode(typed, add_special_tokens=False).ids
        ids = [*([] if start is None else [start]), *found[:LIMIT]]
        if ids:
            check_ids(torch.tensor(ids), self.opened.vocabulary)
        frequencies = self.opened.frequencies
        return ReadText(
            ids=ids,
            texts=tokenizers.texts_in_order(tokenizer, ids),
            deciles=[None if frequencies is None else frequencies.decile(id) for id in ids],
            left_out=max(len(found) - LIMIT, 0),
            losses=[None] * len(ids),
            on_memory=[None] * len(ids),
            base_losses=[None] * len(ids) if self.base else [],
            done=min(len(ids), 1),
            of_text=len(ids) - (start is not None),
        )

    def _first_seen(self, place: int) -> int:
        """Return where the window begins that predicts a token; a window starts at every half of the last."""
        stride = max(self.window // 2, 1)
        return max(-(-(place - self.window) // stride), 0) * stride

    def _read_on(self, text: ReadText) -> None:
        """Read the next window."""
        start = self._first_seen(text.done)
        ids_T = torch.tensor(text.ids[start : start + self.window + 1])
        new, known = slice(text.done, start + len(ids_T)), text.done - start
        if self.opened.has_memory:
            losses, on_memory = _losses_and_memory(self.opened.model_with_memory, ids_T)
            text.on_memory[new] = on_memory[known:]
            text.on_memory[0] = on_memory[0] if start == 0 else text.on_memory[0]
        else:
            losses = _losses(self.opened.model, ids_T)
        text.losses[new] = _finite(losses, self.opened)[known - 1 :]
        if self.base is not None:
            base_losses = _finite(_losses(self.base.model, ids_T), self.base)
            text.base_losses[new] = base_losses[known - 1 :]
        text.done = start + len(ids_T)

    def detail(self, typed: str, place: int, layer: int) -> Detail:
        """Return all about one token, in the window that predicts the next; also without one layer."""
        text = self.begin(typed)
        ids_T = torch.tensor(text.ids[self._first_seen(place + 1) : place + 1])
        with self.lock, torch.no_grad():
            other = {} if self.base is None else {OTHER: _last_logits(self.base.model, ids_T)}
            if not self.opened.has_memory:
                found = None
                predictions = {"this model": _last_logits(self.opened.model, ids_T), **other}
            else:
                model = self.opened.model_with_memory
                found = shares(model, ids_T)
                layers = list(range(len(found.added_L)))
                predictions = {
                    "with memory": found.logits_V,
                    **other,
                    "without memory": _last_logits(model, ids_T, drop_memory_layers=layers),
                    f"without memory in layer {layer}": _last_logits(
                        model, ids_T, drop_memory_layers=[layer]
                    ),
                }
            likeliest = {name: self._likeliest(logits_V) for name, logits_V in predictions.items()}
        if found is None:
            return Detail([], [], [], likeliest)
        return Detail(found.weights_LS.tolist(), found.added_L.tolist(), found.state_L.tolist(), likeliest)

    def _likeliest(self, logits_V: torch.Tensor) -> list[tuple[str, float]]:
        best = logits_V.float().softmax(-1).topk(min(PREDICTIONS, len(logits_V)))
        ids, chances = best.indices.tolist(), best.values.tolist()
        texts = tokenizers.token_texts(self.opened.tokenizer, ids)
        named = [text or f"#{id}" for text, id in zip(texts, ids, strict=True)]  # a model may have more ids
        return list(zip(named, chances, strict=True))


class Shares(NamedTuple):
    """The shares of memory and of the state in the last token, by layer, and the logits of the next.

    `added_L` is the norm of what memory adds to the state, `state_L` that of the state without it.
    """

    weights_LS: torch.Tensor
    added_L: torch.Tensor
    state_L: torch.Tensor
    logits_V: torch.Tensor


def shares(model: TideForCausalLM, ids_T: torch.Tensor) -> Shares:
    """Return the shares of memory in the last token; what joins attention's values is not counted."""
    ids_BT = ids_T[None].to(model.device)
    memory = model.model.memory_for(ids_BT)
    with watching(model.model.layers) as (states, _):
        found = model.model(ids_BT, use_cache=False, memory=memory, output_router_weights=True)
    weights_LS = torch.stack([weights_BTS[0, -1].float() for weights_BTS in found["router_weights"]])
    added_LD = weights_LS[:, :-1] @ memory.of_positions()[-1].float()
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


def _losses_and_memory(model: TideForCausalLM, ids_T: torch.Tensor) -> tuple[list[float], list[float]]:
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
