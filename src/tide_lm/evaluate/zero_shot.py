"""The paper's eight zero-shot tasks without lm-eval: only torch, transformers and a folder of records.

Texts, tokens and metrics are those of lm-eval 0.4.13, and so are the scores of a model in float32. For a
model in 16 bits lm-eval computes the softmax in 16 bits; here it is always computed in float32. Shapes: B
requests per batch, T tokens, V vocabulary, L places whose logits are kept.
"""

import inspect
import math
import re
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from tide_lm.data.sources import json_lines
from tide_lm.evaluate.perplexity import check_ids
from tide_lm.evaluate.tasks import LAMBADA, TASKS, average, find_records, in_order, task_result

Record = dict[str, Any]
UNLIMITED = 10**9  # a tokenizer without a length of its own gives more


class Item(NamedTuple):
    """A context and the choices that may follow it after a space; `right` is the place of the right one."""

    context: str
    choices: list[str]
    right: int


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
    folder: Path,
    tasks: Sequence[str] = tuple(TASKS),
    *,
    batch: int = 32,
    limit: int | None = None,
) -> dict[str, Any]:
    """Return what `tasks.run` returns for a folder; `limit` is the number of records per task.

    The model is left in evaluation mode.
    """
    for name, value in (("batch", batch), ("limit", limit)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}: give at least 1")
    files = {name: find_records(folder, name) for name in in_order(tasks)}
    model.eval()
    encoder = Encoder(tokenizer, model.config)
    scores = {}
    perplexity = None
    for name, (split, path) in files.items():
        items = read_items(name, path, limit)
        requests = [request for item in items for request in encoder.requests(item)]
        every = iter(likelihoods(model, requests, batch))
        found = [list(islice(every, len(item.choices))) for item in items]
        right = sum(_is_right(name, *pair) for pair in zip(items, found, strict=True))
        scores[name] = task_result(name, right / len(items), len(items), split)
        if name == LAMBADA:
            perplexity = math.exp(-sum(choice.log for (choice,) in found) / len(found))
    return {
        "tasks": scores,
        "average": average(scores),
        "lambada_perplexity": perplexity,
        "limit": limit,
        "source": folder.resolve().name,
        "bos": encoder.tokens("a")[0] == tokenizer.bos_token_id,
        "lm_eval": None,
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


def read_items(name: str, path: Path, limit: int | None = None) -> list[Item]:
    """Read the first records of a file, or all of them."""
    items = [_item(name, place, record) for place, record in islice(json_lines(path), limit)]
    if not items:
        raise ValueError(f"{path} holds no records: put those of {name} there, one a line")
    return items


def _item(name: str, place: str, record: Any) -> Item:
    try:
        item = ITEMS[name](record)
        if not all(isinstance(text, str) for text in (item.context, *item.choices)):
            raise TypeError("its context or a choice is no text")
        if not 0 <= item.right < len(item.choices):
            raise IndexError(f"the right choice is number {item.right} from 0, of {len(item.choices)}")
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"{place}, {str(record)[:80]!r}, is no record of {name} ({type(error).__name__}: {error}): give "
            f"it the fields of the Hugging Face dataset that lm-eval's {TASKS[name].definition} reads"
        ) from error
    return item


def _arc(record: Record) -> Item:
    return _lettered(f"Question: {record['question']}\nAnswer:", record)


def _lettered(context: str, record: Record) -> Item:
    choices = record["choices"]
    return Item(context, choices["text"], choices["label"].index(record["answerKey"].lstrip()))


def _boolq(record: Record) -> Item:
    context = f"{record['passage']}\nQuestion: {record['question']}?\nAnswer:"
    return Item(context, ["no", "yes"], int(record["label"]))


def _hellaswag(record: Record) -> Item:
    context = f"{record['activity_label']}: {record['ctx_a']} {record['ctx_b'].capitalize()}"
    return Item(_unmarked(context), [_unmarked(ending) for ending in record["endings"]], int(record["label"]))


def _unmarked(text: str) -> str:
    """Remove WikiHow's marks in brackets; the mark of a title becomes the end of a sentence."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _lambada(record: Record) -> Item:
    context, _, word = record["text"].rpartition(" ")
    return Item(context, [word], 0)


def _openbookqa(record: Record) -> Item:
    return _lettered(record["question_stem"], record)


def _piqa(record: Record) -> Item:
    context = f"Question: {record['goal']}\nAnswer:"
    return Item(context, [record["sol1"], record["sol2"]], int(record["label"]))


def _sciq(record: Record) -> Item:
    context = f"{record['support'].lstrip()}\nQuestion: {record['question']}\nAnswer:"
    return Item(context, [*(record[f"distractor{i}"] for i in (1, 2, 3)), record["correct_answer"]], 3)


ITEMS: dict[str, Callable[[Record], Item]] = {
    "arc_challenge": _arc,
    "arc_easy": _arc,
    "boolq": _boolq,
    "hellaswag": _hellaswag,
    LAMBADA: _lambada,
    "openbookqa": _openbookqa,
    "piqa": _piqa,
    "sciq": _sciq,
}


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


def likelihoods(model: PreTrainedModel, requests: Sequence[Request], batch: int) -> list[Likelihood]:
    """Return likelihoods in the order of the requests; score the longest first, to fail early."""
    order = sorted(range(len(requests)), key=lambda i: -len(requests[i].ids))
    found: dict[int, Likelihood] = {}
    for start in range(0, len(order), batch):
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
