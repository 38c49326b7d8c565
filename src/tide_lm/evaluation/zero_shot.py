"""Zero-shot scores of a model: which of a record's choices it finds likeliest.

Tokens and metrics are those of lm-eval 0.4.13, and so are the scores of a model in float32. For a model in 16
bits lm-eval computes the softmax in 16 bits; here it is always computed in float32. Shapes: B requests per
batch, T tokens, V vocabulary, L places whose logits are kept.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from tide_lm.evaluation.perplexity import check_ids
from tide_lm.evaluation.tasks import HUB, LAMBADA, TASKS, Item, check, read_items

UNLIMITED = 10**9  # a tokenizer without a length of its own gives more


class Request(NamedTuple):
    """Tokens of a context and of a choice; the last `predicted` of them are the choice's."""

    ids: list[int]
    predicted: int


class Likelihood(NamedTuple):
    """The likelihood of a choice; `greedy` if the model finds each of its tokens the likeliest."""

    log: float
    greedy: bool


def score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str | Path,
    tasks: Sequence[str] = tuple(TASKS),
    *,
    batch: int = 32,
    limit: int | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Return scores between 0 and 1; `source` is a folder or the Hub, `limit` the records per task.

    The average is that of all eight tasks, or None: that of fewer would not be the paper's. The model is left
    in evaluation mode.
    """
    for name, value in (("batch", batch), ("limit", limit)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}: give at least 1")
    read = {name: read_items(source, name, limit) for name in check(source, tasks)}
    model.eval()
    encoder = Encoder(tokenizer, model.config)
    scores: dict[str, dict[str, Any]] = {}
    perplexity = None
    for name, (split, items) in read.items():
        requests = [request for item in items for request in encoder.requests(item)]
        every = iter(likelihoods(model, requests, batch, lambda line: log(f"{name}, {line}")))  # noqa: B023
        found = [list(islice(every, len(item.choices))) for item in items]
        right = sum(_is_right(name, *pair) for pair in zip(items, found, strict=True)) / len(items)
        scores[name] = {
            "score": right,
            "metric": TASKS[name].metric,
            "stderr": math.sqrt(right * (1 - right) / (len(items) - 1)) if len(items) > 1 else None,
            "samples": len(items),
            "split": split,
        }
        if name == LAMBADA:
            perplexity = math.exp(-sum(choice.log for (choice,) in found) / len(found))
    every_task = len(scores) == len(TASKS)
    return {
        "tasks": scores,
        "average": sum(task["score"] for task in scores.values()) / len(TASKS) if every_task else None,
        "lambada_perplexity": perplexity,
        "limit": limit,
        "source": str(source) if source == HUB else Path(source).resolve().name,
        "bos": encoder.tokens("a")[0] == tokenizer.bos_token_id,
        "lm_eval": None,  # version 0.1.0 scored by lm-eval and gave its version
    }


def _is_right(name: str, item: Item, found: Sequence[Likelihood]) -> bool:
    if name == LAMBADA:
        return found[0].greedy
    values = [choice.log for choice in found]
    if TASKS[name].metric == "acc_norm":  # per letter of the choice, without its space
        values = [
            value / len(text) if text else -math.inf for value, text in zip(values, item.choices, strict=True)
        ]
    return values.index(max(values)) == item.right


class Encoder:
    """Encodes as the tokenizer does by itself, with BOS if it adds one.

    `start` stands for an empty context. The model sees `longest` tokens: 2,048 if no config says how many.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
        self.tokenizer = tokenizer
        specials = (tokenizer.bos_token_id, tokenizer.eos_token_id)
        self.start = next((token for token in specials if token is not None), None)
        text = config.get_text_config()
        lengths = [getattr(text, name, None) for name in ("n_positions", "max_position_embeddings", "n_ctx")]
        limit = tokenizer.model_max_length if tokenizer.model_max_length < UNLIMITED else 2048
        self.longest = next((length for length in lengths if length is not None), limit)

    def tokens(self, text: str) -> list[int]:
        first = self.tokenizer.bos_token or self.tokenizer.eos_token
        return self.tokenizer.encode(text, add_special_tokens=not (first and text.startswith(first)))

    def requests(self, item: Item) -> list[Request]:
        """Encode each choice as the tokens of the whole text beyond the context's; keep the last that fit.

        Tokens begin with a space rather than end with it, so spaces that end the context go to the choice.
        """
        context = item.context.rstrip()
        if not context and self.start is None:
            raise ValueError(f"{item} has no context, and the tokenizer no BOS or EOS to begin with: add one")
        before = self.tokens(context) if context else [self.start]
        requests = []
        for choice in item.choices:
            whole = f"{item.context} {choice}"
            if context:
                added = self.tokens(whole)[len(before) :]
            else:
                added = self.tokenizer.encode(whole, add_special_tokens=False)
            if not 1 <= len(added) <= self.longest:
                raise ValueError(
                    f"{choice[:80]!r} adds {len(added)} tokens to its context, and 1 to {self.longest}, the "
                    "model's length, can be scored: leave its record out"
                )
            requests.append(Request([*before, *added][-self.longest - 1 :], len(added)))
        return requests


def likelihoods(
    model: PreTrainedModel,
    requests: Sequence[Request],
    batch: int,
    log: Callable[[str], None] = lambda line: None,
) -> list[Likelihood]:
    """Return likelihoods in the order of the requests; score the longest first, to fail early."""
    order = sorted(range(len(requests)), key=lambda i: -len(requests[i].ids))
    found: dict[int, Likelihood] = {}
    for start in range(0, len(order), batch):
        log(f"{start:,} of {len(order):,} choices")
        part = order[start : start + batch]
        found.update(zip(part, _likelihoods(model, [requests[i] for i in part]), strict=True))
    return [found[i] for i in range(len(requests))]


@torch.no_grad()
def _likelihoods(model: PreTrainedModel, requests: Sequence[Request]) -> list[Likelihood]:
    """Score one batch, padded on the right, which no predicted token sees.

    Logits are asked for from the first predicted place on, and made float32 one request at a time.
    """
    ends = [len(request.ids) for request in requests]
    ids_BT = torch.zeros(len(requests), max(ends), dtype=torch.long)
    for row, request in enumerate(requests):
        ids_BT[row, : ends[row]] = torch.tensor(request.ids)
    check_ids(ids_BT, model.get_input_embeddings().num_embeddings)
    ids_BT = ids_BT.to(model.device)
    first = min(end - request.predicted for end, request in zip(ends, requests, strict=True))
    kept = max(ends) - first
    fewer = "logits_to_keep" in inspect.signature(model.forward).parameters
    options = {"logits_to_keep": kept} if fewer else {}
    logits_BLV = model(ids_BT[:, :-1], use_cache=False, **options).logits[:, -kept:]
    found = []
    for row, (end, request) in enumerate(zip(ends, requests, strict=True)):
        start = end - request.predicted
        logs = logits_BLV[row, start - first : end - first].float().log_softmax(-1)
        targets = ids_BT[row, start:end].to(logs.device)
        greedy = (logs.argmax(-1) == targets).all()
        found.append(torch.stack([logs.gather(1, targets[:, None]).sum(), greedy]))  # of both, one float32
    values = torch.stack(found).tolist()
    if not all(math.isfinite(value) for value, _ in values):
        raise ValueError("a choice's log-likelihood is not finite: the model's weights are damaged")
    return [Likelihood(value, bool(greedy)) for value, greedy in values]
