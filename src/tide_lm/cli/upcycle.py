"""`tide-lm upcycle`: a Llama's folder in, a TIDE model that computes the same out; and back."""

import math
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tide_lm import api
from tide_lm.cli.options import AsJson, refuse_others
from tide_lm.cli.output import print_json, print_next
from tide_lm.cli.progress import tidy_end, writing_progress
from tide_lm.run import files
from tide_lm.run.directory import check_exists, exported, hint_for
from tide_lm.spec.config import ModelConfig


def command(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A Llama: a folder with safetensors, a run's export, or a name on the Hub.")
    ],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    memory_blocks: Annotated[int, typer.Option("--memory-blocks", "-k", min=1, help="Blocks K.")] = 8,
    memory_values: Annotated[
        bool,
        typer.Option("--memory-values/--no-memory-values", help="Add rows to attention's values too."),
    ] = True,
    memory_value_scale: Annotated[float, typer.Option(help="The factor of rows in values.")] = 1.0,
    memory_pairs: Annotated[
        bool, typer.Option("--memory-pairs", help="Half of the blocks are for pairs of tokens.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="The seed that tables and routers are drawn from.")] = 0,
    strip: Annotated[
        bool,
        typer.Option("--strip", help="Go back: write a TIDE model whose memory adds nothing as a Llama."),
    ] = False,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="With --strip: drop a memory that is in use.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a Llama a TIDE model that computes exactly the same and can be trained on, or go back.

    Example: tide-lm upcycle my-llama --memory-blocks 8 --out my-tide
    """
    if strip:
        refuse_others(context, {"model", "out", "strip", "anyway", "as_json"}, "--strip")
    elif anyway:
        raise typer.BadParameter("--anyway goes with --strip, which is not given")
    if not 0 < memory_value_scale < math.inf:
        raise typer.BadParameter(
            f"--memory-value-scale is {memory_value_scale}: give a number above 0, or --no-memory-values"
        )
    files.check_free(out)
    if "/" not in model and not Path(model).exists():  # on the Hub, Llamas have an owner
        hint = hint_for(model, "give a folder with a Llama, or OWNER/NAME on the Hub")
        raise ValueError(f"there is no {model}: {hint}")
    check_exists(model)
    folder = exported(model)
    if Path(folder).exists():
        ModelConfig.from_folder(Path(folder))  # refuses other models at once
    from tide_lm.interop import upcycle

    with tidy_end(), writing_progress() as begin:
        if strip:
            written = upcycle.strip(upcycle.open_source(folder), out, anyway, begin)
            result = {"folder": str(out), **asdict(written)}
        else:
            result = api.upcycle(
                model,
                out,
                memory_blocks=memory_blocks,
                memory_values=memory_values,
                memory_value_scale=memory_value_scale,
                memory_pairs=memory_pairs,
                seed=seed,
                begin=begin,
            )
    if as_json:
        print_json(result)
    else:
        typer.echo(f"{out}: {result['parameters']:,} parameters, {result['tables']:,} of them in tables")
    if strip:
        print_next(shlex.join(["tide-lm", "generate", str(out), "The"]))
        return
    typer.echo(f"It computes what {model} does. Prepare text for it with --tokenizer {out}.", err=True)
    start = shlex.join(["--from", str(out), "--run", f"runs/{out.name}"])
    print_next(f"tide-lm train {start} --set data.path=DATA --set train.steps=2000")
