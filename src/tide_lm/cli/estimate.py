"""`tide-lm estimate`: what a model costs before any of it exists."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tide_lm.cli.options import AsJson, usage_errors
from tide_lm.cli.output import pairs, print_json, print_next, print_table
from tide_lm.run.directory import RunDirectory, hint_for, owning_run
from tide_lm.run.settings import RunConfig
from tide_lm.spec import presets
from tide_lm.spec.config import ModelConfig
from tide_lm.spec.estimate import summary


def command(
    model: Annotated[
        str,
        typer.Argument(help="A preset, a run, or the folder or config.json of a Llama or TIDE model."),
    ] = "tide-8e-1b",
    memory_blocks: Annotated[
        int | None, typer.Option("--memory-blocks", "-k", min=0, help="Blocks K instead of the model's.")
    ] = None,
    memory_values: Annotated[
        bool,
        typer.Option("--memory-values", help="Count rows in attention's values too, as in the best recipe."),
    ] = False,
    memory_pairs: Annotated[
        bool, typer.Option("--memory-pairs", help="Count as many rows for pairs of tokens as for tokens.")
    ] = False,
    sequence: Annotated[int | None, typer.Option(min=1, help="Tokens per training sequence.")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs that share the training.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Estimate parameters, FLOPs, VRAM, SSD and optimiser bytes of a model, for any number of blocks.

    Example: tide-lm estimate base-1b --memory-blocks 8 --gpus 8
    """
    with usage_errors():
        shape = _shape(model)
        blocks = shape.num_memory_blocks if memory_blocks is None else memory_blocks
        if (memory_values or memory_pairs) and not blocks:
            option = "--memory-values" if memory_values else "--memory-pairs"
            raise ValueError(f"a base model has no rows: leave {option} out")
        in_values = shape.memory_values or memory_values
        pairs = shape.memory_pair_rows or (shape.vocab_size if memory_pairs else 0)
        shape = replace(
            shape, num_memory_blocks=blocks, memory_values=in_values, memory_pair_rows=pairs if blocks else 0
        )
    result = {"model": model, **summary(shape, sequence or shape.max_position_embeddings, gpus)}
    print_json(result) if as_json else _print(result)
    print_next(_following(model))


def _following(model: str) -> str:
    if not Path(model).exists():
        return f"tide-lm train --run runs/{model} --set model.preset={model} --set data.path=data/mine"
    if owning_run(model)[0] == Path(model):
        return f"tide-lm train --resume --run {shlex.quote(model)}"
    folder = Path(model).parent if Path(model).is_file() else Path(model)
    return f"tide-lm train --from {shlex.quote(str(folder))} --run runs/more --set data.path=data/mine"


def _shape(model: str) -> ModelConfig:
    if "/" in model and not Path(model).exists():
        raise ValueError(
            f"{model!r} is no preset, nor is there a folder or file of that name: "
            + hint_for(model, "see tide-lm presets")
        )
    if not model or not Path(model).exists():
        return presets.get(model).model
    if owning_run(model)[0] == Path(model):
        return RunConfig.from_saved(RunDirectory(Path(model)).read_config() or {}).model.shape()
    return ModelConfig.from_folder(Path(model))


def _print(result: dict[str, Any]) -> None:
    ways = ", rows in values" * result["memory_values"]
    ways += ", rows for pairs of tokens" * bool(result["memory_pair_rows"])
    title = f"{result['model']}, K = {result['memory_blocks']}{ways}"
    print_table(title, ["part", "parameters"], pairs(result["parameters"]))
    rows = []
    for row in result["inference"]:
        vram, ssd = _gigabytes(row["vram_bytes"]), _gigabytes(row["table_bytes"])
        rows.append((f"{row['bits']} bit", vram, ssd, f"{row['table_bytes_per_token']:,}"))
    columns = ["precision", "VRAM", "SSD", "table bytes per token"]
    print_table("Inference with the tables on SSD", columns, rows)
    training = result["training"]
    adam, each = training["adam_bytes"], f", on each of {gpus}" if (gpus := training["gpus"]) > 1 else ""
    flops = f"FLOPs to train on one token, T = {training['sequence']:,}"
    costs = [
        ("KV cache, bytes per token in 16 bit", f"{result['cache_bytes_per_token']:,}"),
        (flops, f"{training['flops_per_token']:.3e}"),
        (f"Adam in float32: weights, gradients, moments{each}", _gigabytes(adam["resident"])),
        (f"Adam in float32: tables and their moments{each}", _gigabytes(adam["tables"])),
    ]
    print_table("Running and training", ["what", "cost"], costs)


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.3f} GB"
