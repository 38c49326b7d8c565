"""Texts that go on from prompts: by the engine, or by transformers for models that are no Llamas."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from tide_lm.serve.engine import Engine
from tide_lm.serve.sampling import Sampling
from tide_lm.serve.text import Text, generate_plainly, prompt_ids, stop_ids


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    max_new_tokens: int = 128,
    sampling: Sampling | None = None,
    on_text: Callable[[int, str, bool], None] = lambda number, text, ended: None,
) -> list[Text]:
    """Return the text that follows each prompt. On a GPU, weights in bfloat16 are decoded fastest.

    `on_text` gets a prompt's number, the new part of its text at each token, and whether the text has ended.
    """
    sampling = sampling or Sampling()
    ids, stop = [prompt_ids(tokenizer, prompt) for prompt in prompts], stop_ids(tokenizer, model)
    for prompt, given in zip(prompts, ids, strict=True):
        if not given:
            raise ValueError(f"the prompt {prompt!r} has no tokens, and this tokenizer none to begin with")
    texts = [Text(tokenizer, given[-1], stop) for given in ids]

    def put(number: int, token: int) -> None:
        texts[number].ids.append(token)
        on_text(number, texts[number].take(), False)

    def end(number: int) -> None:
        on_text(number, texts[number].take(last=True), True)

    if not fits_engine(model.config):
        for number, given in enumerate(ids):
            generate_plainly(model, given, max_new_tokens, sampling, stop, partial(put, number))
            end(number)
        return texts
    longest = min(max(map(len, ids)) + max_new_tokens, model.config.max_position_embeddings)
    try:
        engine = Engine(model, max(2, longest), batch=len(prompts))
        for step in engine.generate(ids, max_new_tokens, sampling, stop):
            for number, token in enumerate(step):
                if token is not None:
                    put(number, token)
                if token in stop:
                    end(number)
    except torch.OutOfMemoryError as error:
        many = f"{len(prompts)} prompts at once" if len(prompts) > 1 else f"{longest} tokens"
        raise ValueError(f"there is too little memory for {many}: give fewer ({error})") from None
    for number, text in enumerate(texts):
        if text.ids[-1] not in stop:
            end(number)
    return texts


def fits_engine(config: PreTrainedConfig) -> bool:
    is_quantised = getattr(config, "quantization_config", None) is not None
    return config.model_type in ("llama", "tide") and not is_quantised
