"""Convert between text and tokens: prompts, the tokens that end a text, and text as it grows."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from tide_lm.serve.sampling import Sampling


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Return a prompt's ids, after the token that documents of the training data begin with."""
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return [*([] if first is None else [first]), *tokenizer.encode(prompt, add_special_tokens=False)]


def stop_ids(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> frozenset[int]:
    """Return the ids that end a document, or begin the next."""
    of_model = model.generation_config.eos_token_id
    ends = of_model if isinstance(of_model, list) else [of_model]
    return frozenset(
        token for token in (*ends, tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None
    )


class Text:
    """A text that grows by tokens; `take` returns what is new, except for incomplete characters.

    It is decoded with the token before it, since some tokenizers drop a text's first space.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, before: int, stop: frozenset[int]) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.ids: list[int] = []
        self._before, self._taken = before, 0
        self._skipped = len(self._decode([before]))

    def __str__(self) -> str:
        ids = [token for token in self.ids if token not in self.stop]
        return self._decode([self._before, *ids])[self._skipped :]

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def take(self, last: bool = False) -> str:
        text = str(self)
        whole = text if last else text.rstrip("\ufffd")
        new, self._taken = whole[self._taken :], max(self._taken, len(whole))
        return new


class _Streamer(BaseStreamer):
    """Calls `on_token` with each token after the prompt."""

    def __init__(self, on_token: Callable[[int], None]) -> None:
        self._on_token, self._is_prompt = on_token, True

    def put(self, value: torch.Tensor) -> None:
        if not self._is_prompt:
            self._on_token(int(value))
        self._is_prompt = False

    def end(self) -> None:
        pass


def generate_plainly(
    model: PreTrainedModel,
    prompt: list[int],
    max_new_tokens: int,
    sampling: Sampling,
    stop: frozenset[int],
    on_token: Callable[[int], None],
    **options: Any,
) -> None:
    """Generate with transformers, for what the engine does not take; `on_token` gets each token.

    `options` go to the model's forward.
    """
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and len(prompt) + max_new_tokens > longest:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, which with {max_new_tokens} new are more than the "
            f"{longest} that this model knows: ask for fewer, or give a shorter prompt"
        )
    drawn: dict[str, Any] = {"do_sample": bool(sampling.temperature)}
    if sampling.temperature:
        drawn |= {"temperature": sampling.temperature, "top_k": sampling.top_k or 0}
        drawn["top_p"] = 1.0 if sampling.top_p is None else sampling.top_p
        if sampling.seed is not None:
            torch.manual_seed(int(sampling.seed))
    ids_BT = torch.tensor([prompt], device=model.device)
    model.generate(
        ids_BT,
        attention_mask=torch.ones_like(ids_BT),
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(stop) or None,
        pad_token_id=next(iter(sorted(stop)), 0),
        streamer=_Streamer(on_token),
        **drawn,
        **options,
    )
