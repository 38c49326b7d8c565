"""`tide-lm pack`: a model's tables in a store, in few bits, beside what is left of its weights."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from tide_lm import api
from tide_lm.cli.opening import check_counts, check_memory, check_packed, tide_run
from tide_lm.cli.options import AsJson, Counts, Model, refuse_others, usage_errors
from tide_lm.cli.output import pairs, print_json, print_next, print_table
from tide_lm.cli.progress import working
from tide_lm.run import files
from tide_lm.run.directory import check_exists
from tide_lm.spec.config import Place, Residence
from tide_lm.spec.form import Form


def command(
    context: typer.Context,
    model: Model,
    out: Annotated[Path | None, typer.Option(help="The folder to write.")] = None,
    bits: Annotated[int, typer.Option(help="Bits per number: 16, 8, 4, 3 or 2.")] = 4,
    group: Annotated[int, typer.Option(help="Numbers that share a scale.")] = 32,
    rank: Annotated[float, typer.Option(help="The share of the full rank to keep, at most 1.")] = 1.0,
    blocks: Annotated[
        str, typer.Option(help="A lower rank of each block (even), or one of all blocks (joint).")
    ] = "even",
    counts: Counts = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check every row of a packed MODEL; write nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Put a trained model's tables into a store, to be read from there row by row, or check one.

    Example: tide-lm pack runs/mine --out mine-4bit --bits 4
    """
    if verify == (out is not None):
        raise typer.BadParameter("give --out, a folder to write, or --verify, and not both")
    if verify:
        refuse_others(context, {"model", "verify", "as_json"}, "--verify")
    model = tide_run(model)
    check_exists(model)
    if out is None:
        check_packed(model)
        result = _verify(model)
    else:
        with usage_errors():
            Form(bits, group, rank, blocks)  # type: ignore[arg-type]
        check_memory(model, "pack")
        check_counts(counts)
        files.check_free(out)
        with working(f"Packing {model}"):
            result = api.pack(model, out, bits=bits, group=group, rank=rank, blocks=blocks, counts=counts)
    if as_json:
        print_json(result)
    elif out is None:
        typer.echo(
            f"{model} is whole: {result['tensors']:,} tensors and {result['rows']:,} rows are as they were "
            "packed, by their checksums, and the store was made for this model"
        )
    else:
        shown = {name: value for name, value in result.items() if value != []}
        print_table(result["store"], ["", ""], pairs(shown, "store"))
    print_next(f"tide-lm serve {shlex.quote(model if out is None else str(out))}")


def _verify(model: str) -> dict[str, Any]:
    from tide_lm.compress.pack import verify
    from tide_lm.model.opened import open_model
    from tide_lm.store.format import StoreError

    try:
        with working(f"Reading {model}"):
            packed = open_model(model, memory=Residence(Place.store)).model_with_memory
            file = verify(packed)
    except StoreError as error:
        raise ValueError(f"{model} is not whole: {error}") from error
    return {
        "store": str(file.path),
        "rows": file.header.vocab_size,
        "bytes": file.header.file_bytes,
        "tensors": len(packed.state_dict()),
    }
