"""`tide-lm estimate`: what a model costs before any of it exists."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tide_lm.cli.options import AsJson
from tide_lm.cli.output import print_json, print_table
from tide_lm.spec import estimate, presets
from tide_lm.spec.config import ModelConfig


def command(
    model: Annotated[
        str, typer.Argument(help="A preset, or the folder or config.json of a Llama or TIDE model.")
    ] = "tide-8e-1b",
    memory_blocks: Annotated[
        int | None, typer.Option("--memory-blocks", "-k", min=0, help="Blocks K instead of the model's.")
    ] = None,
    memory_values: Annotated[
        bool, typer.Option("--memory-values", help="With rows in attention's values, as in the best recipe.")
    ] = False,
    memory_own_block: Annotated[
        bool | None,
        typer.Option(
            "--memory-own-block/--no-memory-own-block", help="With one block a layer, instead of all K."
        ),
    ] = None,
    memory_gate: Annotated[
        bool, typer.Option("--memory-gate", help="With a gate and a matrix for what a layer mixes.")
    ] = False,
    sequence: Annotated[
        int | None, typer.Option("--sequence", min=1, help="Tokens of a training sequence.")
    ] = None,
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="GPUs that share the training.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Parameters, FLOPs, VRAM, SSD and optimiser bytes of a model, for any number of memory blocks."""
    on_disk = bool(model) and Path(model).exists()
    try:
        shape = ModelConfig.from_folder(Path(model)) if on_disk else presets.get(model).model
        blocks = shape.num_memory_blocks if memory_blocks is None else memory_blocks
        own = shape.memory_own_block if memory_own_block is None else memory_own_block
        shape = replace(shape, num_memory_blocks=blocks, memory_own_block=own)
        if (memory_values or memory_gate) and not blocks:
            raise typer.BadParameter("a base model has no rows: leave --memory-values and --memory-gate out")
        shape = replace(
            shape,
            memory_values=shape.memory_values or memory_values,
            memory_gate=shape.memory_gate or memory_gate,
        )
    except ValueError as error:
        hint = "" if on_disk else "; nor is there a folder or file of that name"
        raise typer.BadParameter(f"{error}{hint}") from None
    result = _estimate(model, shape, sequence or shape.max_position_embeddings, gpus)
    if as_json:
        print_json(result)
    else:
        _print(result)


def _estimate(name: str, model: ModelConfig, sequence: int, gpus: int) -> dict[str, Any]:
    parameters = estimate.count_parameters(model)
    resident_adam, table_adam = estimate.adam_bytes(model, gpus)
    return {
        "model": name,
        "memory_blocks": model.num_memory_blocks,
        "memory_values": model.memory_values,
        "memory_own_block": model.memory_own_block,
        "memory_gate": model.memory_gate,
        "parameters": {**asdict(parameters), "resident": parameters.resident, "total": parameters.total},
        "inference": [
            {
                "bits": bits,
                "vram_bytes": estimate.resident_bytes(model, bits),
                "table_bytes": estimate.table_bytes(model, bits),
                "table_bytes_per_token": estimate.row_bytes(model, bits),
            }
            for bits in estimate.PRECISIONS
        ],
        "cache_bytes_per_token": estimate.cache_bytes(model),
        "training": {
            "sequence": sequence,
            "flops_per_token": estimate.train_flops(model, sequence),
            "gpus": gpus,
            "adam_bytes": {"resident": resident_adam, "tables": table_adam},
        },
    }


def _print(result: dict[str, Any]) -> None:
    counts, training = result["parameters"], result["training"]
    ways = ", rows in values" * result["memory_values"] + ", one a layer" * result["memory_own_block"]
    ways += ", gated" * result["memory_gate"]
    print_table(
        f"{result['model']}, K = {result['memory_blocks']}{ways}",
        ["part", "parameters"],
        [(part.replace("_", " "), f"{count:,}") for part, count in counts.items()],
    )
    print_table(
        "Inference with the tables on SSD",
        ["precision", "VRAM", "SSD", "table bytes a token"],
        [
            (
                f"{row['bits']} bit",
                _gigabytes(row["vram_bytes"]),
                _gigabytes(row["table_bytes"]),
                f"{row['table_bytes_per_token']:,}",
            )
            for row in result["inference"]
        ],
    )
    adam, each = training["adam_bytes"], f", on each of {gpus}" if (gpus := training["gpus"]) > 1 else ""
    print_table(
        "Running and training",
        ["what", "cost"],
        [
            ("KV cache, bytes a token in 16 bit", f"{result['cache_bytes_per_token']:,}"),
            (f"FLOPs to train a token, T = {training['sequence']:,}", f"{training['flops_per_token']:.3e}"),
            (f"Adam in float32: weights, gradients, moments{each}", _gigabytes(adam["resident"])),
            (f"Adam in float32: tables and their moments{each}", _gigabytes(adam["tables"])),
        ],
    )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.3f} GB"
