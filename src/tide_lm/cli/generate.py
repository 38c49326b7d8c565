"""`tide-lm generate`: text that goes on from a prompt."""

import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tide_lm.cli.options import AsJson, Memory, Model, print_reads
from tide_lm.cli.output import print_json
from tide_lm.cli.progress import working

if TYPE_CHECKING:
    from tide_lm.model.opened import OpenedModel
    from tide_lm.serve import Sampling


def command(
    model: Model,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="What to go on from; `-` reads it from stdin.", metavar="PROMPT"),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="At most so many.")] = 128,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0, help="0 takes the most likely token.")
    ] = 0.0,
    top_k: Annotated[int | None, typer.Option("--top-k", min=1, help="Draw from so many tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option("--top-p", min=0, max=1, help="Draw from tokens with this share.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="The same tokens again.")] = None,
    memory: Memory = None,
    as_json: AsJson = False,
) -> None:
    """Generate text. One prompt's is written as it comes, of several each when it has ended."""
    from tide_lm.model.opened import open_model
    from tide_lm.serve import Sampling

    texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts or ["-"]]
    try:
        for text in texts:
            if not _is_unicode(text):
                raise ValueError(f"the prompt {text[:40]!a} is not UTF-8: give text in that encoding")
        sampling = Sampling(temperature, top_k, top_p, seed)
        given = {"--top-k": top_k, "--top-p": top_p, "--seed": seed}
        if not temperature and (unused := [name for name, value in given.items() if value is not None]):
            raise ValueError(f"{unused[0]} does nothing at temperature 0: give --temperature as well")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    opened = open_model(model, memory=memory)
    with working(f"Loading {model}"):
        _ = opened.model
    started = time.monotonic()
    generations, first = _generate(opened, texts, max_new_tokens, sampling, streamed=not as_json)
    seconds, tokens = time.monotonic() - started, sum(one["tokens"] for one in generations)
    print_reads(opened)
    if as_json:
        rates = {"seconds": seconds, "first_token_s": first - started, "tokens_per_s": tokens / seconds}
        print_json({"generations": generations, **rates})
    else:
        rate = f"{tokens / seconds:,.1f} a second, the first after {first - started:.1f} s"
        typer.echo(f"{tokens:,} tokens in {seconds:.1f} s, {rate}", err=True)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # what stdin and the shell give for other bytes
        return False
    return True


def _generate(
    opened: "OpenedModel", prompts: list[str], max_new_tokens: int, sampling: "Sampling", streamed: bool
) -> tuple[list[dict[str, Any]], float]:
    """Texts, and when the first token came: on a GPU by the engine, and by transformers elsewhere."""
    import torch

    from tide_lm.serve import Engine
    from tide_lm.serve.text import Text, generate_plainly, prompt_ids, stop_ids

    model, tokenizer = opened.model, opened.tokenizer
    ids, stop = [prompt_ids(tokenizer, prompt) for prompt in prompts], stop_ids(tokenizer, model)
    for prompt, given in zip(prompts, ids, strict=True):
        if not given:
            raise ValueError(f"the prompt {prompt!r} has no tokens, and this tokenizer none to begin with")
    made = [Text(tokenizer, given[-1], stop) for given in ids]
    first = 0.0

    def put(number: int, token: int) -> None:
        nonlocal first
        first = first or time.monotonic()
        made[number].ids.append(token)
        if streamed and len(prompts) == 1:
            typer.echo(made[number].take(), nl=False)

    def end(number: int) -> None:
        if streamed:
            text = made[number]
            typer.echo(text.take(last=True) if len(prompts) == 1 else f"{prompts[number]}{text}\n")

    quantised = getattr(model.config, "quantization_config", None) is not None
    if model.device.type == "cuda" and opened.config.model_type in ("llama", "tide") and not quantised:
        for parameter in model.parameters():  # and not the frequencies of positions
            parameter.data = parameter.data.to(torch.bfloat16)
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
        for number, text in enumerate(made):
            if text.ids[-1] not in stop:
                end(number)
    else:
        for number, tokens in enumerate(ids):
            generate_plainly(model, tokens, max_new_tokens, sampling, stop, partial(put, number))
            end(number)
    generations = [
        {"prompt": prompt, "text": str(text), "tokens": len(text.ids)}
        for prompt, text in zip(prompts, made, strict=True)
    ]
    return generations, first
