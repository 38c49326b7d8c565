"""`tide-lm pack`: a model's tables in a store, in few bits, beside what is left of its weights."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tide_lm.cli.options import AsJson, Counts, Model, refuse_others, usage_errors
from tide_lm.cli.output import pairs, print_json, print_table
from tide_lm.cli.progress import working
from tide_lm.run import files
from tide_lm.spec.config import Place, Residence


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
    result = _verify(model) if out is None else _pack(model, out, counts, bits, group, rank, blocks)
    if as_json:
        print_json(result)
    else:
        print_table(result["store"], ["", ""], pairs(result, "store"))


def _verify(model: str) -> dict[str, Any]:
    from tide_lm.compress.pack import verify
    from tide_lm.model.opened import open_model

    with working(f"Reading {model}"):
        file = verify(open_model(model, memory=Residence(Place.store)).model_with_memory)
    return {"store": str(file.path), "rows": file.header.vocab_size, "bytes": file.header.file_bytes}


def _pack(model: str, out: Path, counts: Path | None, *form: Any) -> dict[str, Any]:
    from tide_lm.compress.encode import Form
    from tide_lm.compress.pack import STORE, pack
    from tide_lm.model.opened import open_model

    with usage_errors():
        chosen = Form(*form)
    files.check_free(out)
    opened = open_model(model, counts=counts)
    counts_V = None if opened.frequencies is None else opened.frequencies.counts_V
    with working(f"Packing {model}"):
        header = pack(opened.model_with_memory, out, chosen, counts_V, opened.tokenizer.save_pretrained)
    whole = 2 * header.vocab_size * header.blocks * header.hidden
    return {
        "store": str(out / STORE),
        "bits": header.bits,
        "ranks": list(header.ranks),
        "bytes": header.file_bytes,
        "relative_bytes": header.file_bytes / whole,
        "row_bytes": header.row_bytes,
        "stride": header.stride,
        "padding": header.padding,
    }
