"""`tide-lm explore`: a page in the browser to look into a model."""

from pathlib import Path
from typing import Annotated

import typer

from tide_lm.cli.opening import both_runs, say_checkpoint
from tide_lm.cli.options import LOOPBACK, Counts, Device, Memory, check_address
from tide_lm.cli.progress import working
from tide_lm.run.directory import check_exists


def command(
    model: Annotated[
        str, typer.Argument(help="A run, a checkpoint, a folder, a name on the Hub, or a demo.")
    ],
    compare: Annotated[
        str | None, typer.Option(help="Another model of the same tokenizer, to compare losses.")
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(show_default="the run", help="The run whose results are shown."),
    ] = None,
    counts: Counts = None,
    memory: Memory = None,
    device: Device = None,
    host: Annotated[
        str, typer.Option(help="The address to listen at: by default, this machine alone.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port.")] = 7860,
) -> None:
    """Look into a model in the browser: texts by token, the vocabulary, pairs, its results.

    Example: tide-lm explore runs/mine --compare runs/base
    """
    if both := both_runs(model):
        model, compare = both[0], compare or both[1]
    for name in filter(None, (model, compare)):
        check_exists(name)
    if results is not None and not results.is_dir():
        raise ValueError(f"--results {results} is not a folder: give a run, whose results/ are shown")
    check_address(host, port)
    is_local = host in LOOPBACK
    if not is_local:
        can = "can use this page, and start analyses that write results"
        typer.echo(f"warning: whoever reaches {host} {can}", err=True)
    from tide_lm.explore.explorer import Explorer
    from tide_lm.explore.page import build
    from tide_lm.explore.server import serve
    from tide_lm.model.opened import open_model

    opened = open_model(model, counts=counts, memory=memory, device=device, writes=False)
    say_checkpoint(opened)
    base = None if compare is None else open_model(compare, counts=counts, device=device, writes=False)
    explorer = Explorer(opened, base, results or opened.run, counts)
    page = build(explorer)
    with working(f"Loading {opened.name}"):
        explorer.warm_up()
    names = (*LOOPBACK, "[::1]") if is_local else ()  # as browsers write them

    def tell(where: str) -> None:
        typer.echo("Open this address in a browser; Ctrl-C ends the explorer:", err=True)
        typer.echo(where)

    serve(page, host, port, names, tell)
