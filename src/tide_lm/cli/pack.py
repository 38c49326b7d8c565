"""`tide-lm pack`: a model's tables in a store, in few bits, beside what is left of its weights."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tide_lm.cli.output import AsJson, print_json, print_table
from tide_lm.cli.progress import working
from tide_lm.cli.texts import Counts, refuse_others
from tide_lm.run import files
from tide_lm.spec.config import Place, Residence


def command(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A run, a checkpoint, a folder or a name on the Hub.")],
    out: Annotated[Path | None, typer.Option("--out", help="The folder to write.")] = None,
    bits: Annotated[int, typer.Option("--bits", help="Of a number: 16, 8, 4, 3 or 2.")] = 4,
    group: Annotated[int, typer.Option("--group", help="Numbers that share a scale.")] = 32,
    rank: Annotated[
        float, typer.Option("--rank", help="The share of the full rank that is kept, at most 1.")
    ] = 1.0,
    blocks: Annotated[
        str, typer.Option("--blocks", help="Ranks of blocks: even, uneven, or one of all, joint.")
    ] = "even",
    weighted: Annotated[
        float, typer.Option("--weighted", help="The power of frequencies that rows count by, for a rank.")
    ] = 0.0,
    counts: Counts = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check every row of a packed MODEL; write nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Put a trained model's tables into a store, to be read from there row by row, or check one."""
    if verify == (out is not None):
        raise typer.BadParameter("give --out, a folder to write, or --verify, and not both")
    if verify:
        refuse_others(context, {"model", "verify", "as_json"}, "--verify")
    result = _verify(model) if out is None else _pack(model, out, counts, bits, group, rank, blocks, weighted)
    if as_json:
        print_json(result)
    else:
        rows = [(name.replace("_", " "), _said(value)) for name, value in result.items() if name != "store"]
        print_table(result["store"], ["", ""], rows)


def _verify(model: str) -> dict[str, Any]:
    from tide_lm.compress.pack import verify
    from tide_lm.model.opened import open_model

    with working(f"Reading {model}"):
        file = verify(open_model(model, memory=Residence(Place.store)).tide)
    return {"store": str(file.path), "rows": file.header.vocab_size, "bytes": file.header.file_bytes}


def _pack(model: str, out: Path, counts: Path | None, *form: Any) -> dict[str, Any]:
    from tide_lm.compress.encode import Form
    from tide_lm.compress.pack import STORE, pack
    from tide_lm.model.opened import open_model

    try:
        chosen = Form(*form)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    files.check_free(out)
    opened = open_model(model, counts=counts)
    if chosen.weighted and opened.frequencies is None:
        raise typer.BadParameter("--weighted needs to know how frequent tokens are: give --counts")
    known = None if opened.frequencies is None else opened.frequencies.counts_V
    with working(f"Packing {model}"):
        header = pack(opened.tide, out, chosen, known, opened.tokenizer.save_pretrained)
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


def _said(value: Any) -> str:
    if isinstance(value, float):
        return f"{100 * value:.1f} %"
    return f"{value:,}" if isinstance(value, int) else str(value)
