"""`tide-lm generate`: text that goes on from a prompt."""

import shlex
import sys
import time
from typing import Annotated

import typer

from tide_lm.cli.opening import check_residence, say_checkpoint, tide_run
from tide_lm.cli.options import AsJson, Device, Memory, Model, print_reads, usage_errors
from tide_lm.cli.output import print_json, print_next
from tide_lm.cli.progress import working
from tide_lm.run.directory import check_exists


def command(
    model: Model,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="The text to go on from; `-` reads it from stdin.", metavar="PROMPT"),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the most likely token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw from the K most likely tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Draw from the most likely tokens of this probability.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Draw the same tokens again.")] = None,
    memory: Memory = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Generate text: the prompt, and what follows as it comes; with several, each when it has ended.

    Example: tide-lm generate runs/mine "The tide comes in" --temperature 0.8 --seed 1
    """
    given = _given(model, prompts)
    drawn = {"--top-k": top_k, "--top-p": top_p, "--seed": seed}
    if not temperature and (unused := [name for name, value in drawn.items() if value is not None]):
        raise typer.BadParameter(f"{unused[0]} does nothing at temperature 0: give --temperature as well")
    model = tide_run(model)
    check_exists(model)
    check_residence(model, memory)
    from tide_lm.model.opened import open_model
    from tide_lm.serve import Sampling
    from tide_lm.serve.generate import fits_engine, generate

    with usage_errors():
        sampling = Sampling(temperature, top_k, top_p, seed)
    opened = open_model(model, memory=memory, device=device)
    say_checkpoint(opened)
    with working(f"Loading {model}"):
        if opened.model.device.type == "cuda" and fits_engine(opened.config):
            opened.model.bfloat16()
    waiting, first = dict.fromkeys(range(len(given)), ""), 0.0

    def show(number: int, text: str, ended: bool) -> None:
        nonlocal first
        if not as_json and len(given) == 1:
            if not first:
                typer.secho(given[number], bold=True, nl=False)
            typer.echo(text, nl=ended)
        first = first or time.monotonic()
        waiting[number] += text
        if ended and not as_json and len(given) > 1:
            typer.echo(f"Prompt {number + 1} of {len(given)}:")
            typer.secho(given[number], bold=True, nl=False)
            typer.echo(f"{waiting[number]}\n")

    started = time.monotonic()
    texts = generate(opened.model, opened.tokenizer, given, max_new_tokens, sampling, show)
    seconds, tokens = time.monotonic() - started, sum(len(text.ids) for text in texts)
    print_reads(opened)
    if as_json:
        generations = [
            {"prompt": prompt, "text": str(text), "tokens": len(text.ids)}
            for prompt, text in zip(given, texts, strict=True)
        ]
        rates = {"seconds": seconds, "first_token_s": first - started, "tokens_per_s": tokens / seconds}
        print_json({"generations": generations, **rates})
    else:
        rate = f"{tokens / seconds:,.1f} per second, the first after {first - started:.1f} s"
        typer.echo(f"{tokens:,} tokens in {seconds:.1f} s, {rate}", err=True)
    can_be_served = opened.tokens is None  # as no checkpoint is
    print_next(f"tide-lm {'serve' if can_be_served else 'evaluate'} {shlex.quote(model)}")


def _given(model: str, prompts: list[str] | None) -> list[str]:
    """Return the prompts, which must be UTF-8; without any, or with `-`, what stdin has."""
    has_stdin = "-" in (prompts or ()) or not (prompts or sys.stdin.isatty())
    text = sys.stdin.read().removesuffix("\n") if has_stdin else ""
    if not (prompts or text):
        example = f'tide-lm generate {shlex.quote(model)} "The tide comes in"'
        raise typer.BadParameter(f"there is no prompt: give one, as in {example}, or send one to stdin")
    given = [text if prompt == "-" else prompt for prompt in prompts or ["-"]]
    for prompt in given:
        if prompt != prompt.encode(errors="replace").decode():  # other bytes of stdin or the shell
            raise typer.BadParameter(f"the prompt {prompt[:40]!a} is not UTF-8: give text in that encoding")
    return given
