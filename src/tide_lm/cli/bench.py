"""`tide-lm bench`: how fast this machine trains, generates, and reads a store."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from tide_lm.cli.help import Command
from tide_lm.cli.options import AsJson, Device, one_of, usage_errors
from tide_lm.cli.output import number, print_json, print_next, print_table
from tide_lm.cli.progress import tidy_end, working
from tide_lm.run.files import check_writable
from tide_lm.run.provenance import provenance
from tide_lm.spec.config import Place

app = typer.Typer(
    help="Time what this machine does, on made-up data.\n\nExample: tide-lm bench store tide-8e-small",
    no_args_is_help=True,
)
PRESETS = ["base-1b", "tide-8e-1b", "tide-24e-1b"]
Columns = dict[str, tuple[str, str]]  # by key of a record: the title, and how the number is shown
TRAINED: Columns = {
    "tokens_per_s": ("tokens/s", ",.0f"),
    "mfu": ("MFU", ".1%"),
    "step_ms": ("ms per step", ",.1f"),
    "peak_gb": ("peak GB", ".1f"),
}
_TIMED = (
    "Presets to time. PRESET+values has rows in attention's values too, and PRESET+pairs rows for pairs of "
    "tokens."
)
DECODED: Columns = {
    "ms_per_token": ("ms/token", ".3f"),
    "tokens_per_s": ("tokens/s", ",.1f"),
    "gb_per_s": ("GB/s", ",.0f"),
    "of_floor": ("of floor", ".0%"),
    "over_base": ("over base", "+.1%"),
    "first_token_ms": ("first ms", ".1f"),
    "vram_gb": ("GB", ".2f"),
}


@app.command("train", cls=Command)
def train(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"{_TIMED} PRESET:IDS has a vocabulary of IDS ids.", show_default=" ".join(PRESETS)
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per step.")] = 8,
    sequence: Annotated[int, typer.Option(min=2, help="Tokens per sequence.")] = 2048,
    steps: Annotated[int, typer.Option(min=1, help="Steps to time, after 20 to warm up.")] = 40,
    peers: Annotated[
        bool, typer.Option("--peers", help="Also time each PRESET without IDS in a plain compiled loop.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Time training: tokens per second, MFU, peak memory and the parts of a step.

    Example: tide-lm bench train base-tiny tide-4e-tiny --batch 2 --sequence 128
    """
    from tide_lm.bench.wanted import shape_of

    wanted = models or PRESETS
    with usage_errors():
        for model in wanted:
            shape_of(model)

    def work(log: Callable[[str], None]) -> dict[str, Any]:
        from tide_lm.bench.train import measure_all

        return measure_all(wanted, batch, sequence, steps, peers, log)

    result, following = _measured(work), f"tide-lm estimate {wanted[-1].partition(':')[0].partition('+')[0]}"
    if as_json:
        print_json(result)
        print_next(following)
        return
    title = f"Training, {batch} x {sequence:,} tokens per step"
    print_table(title, ["model", "ids", *_titles(TRAINED)], map(_trained, result["runs"]))
    timed = [run for run in result["runs"] if "parts_ms" in run]
    parts = list(dict.fromkeys(part for run in timed for part in run["parts_ms"]))
    rows = [
        (*_model(run), *(number(run["parts_ms"].get(part, 0), ",.1f") for part in parts)) for run in timed
    ]
    print_table("Parts of a step, ms", ["model", "ids", *parts], rows)
    print_next(following)


@app.command("decode", cls=Command)
def decode(
    models: Annotated[list[str] | None, typer.Argument(help=_TIMED, show_default=" ".join(PRESETS))] = None,
    memory: Annotated[
        list[str] | None,
        typer.Option(
            parser=one_of(Place),
            metavar="|".join(Place),
            show_default="device",
            help="Where rows are; they are packed if not on the device. May be repeated.",
        ),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            show_default="1",
            help="Sequences per batch; repeatable. Extra batch sizes use only the first --memory.",
        ),
    ] = None,
    context: Annotated[
        tuple[int, int], typer.Option(metavar="FROM TO", help="Tokens of the prompt, and at the end.")
    ] = (128, 1152),
    peers: Annotated[
        bool,
        typer.Option("--peers", help="Also time the first preset compiled and by transformers' generate."),
    ] = False,
    ids: Annotated[
        Path | None,
        typer.Option(help="A file of tokens (.npy) to force through the last preset, from a store on disk."),
    ] = None,
    counts: Annotated[
        Path | None, typer.Option(help="With --ids: how often each token occurs (.npy).")
    ] = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Time generation: ms per token beside reading the weights once, the first token, and memory.

    Example: tide-lm bench decode base-tiny tide-4e-tiny --context 8 64 --batch 1 --batch 4
    """
    from tide_lm.bench.wanted import check_decoding, read_tokens

    wanted, places, batches = models or PRESETS, list(map(Place, memory or [Place.device])), batch or [1]
    with usage_errors():
        check_decoding(wanted, places, context, through_store=ids is not None)
        if ids is None and counts is not None:
            raise ValueError("--counts goes with --ids, which is not given")
        forced = None if ids is None else read_tokens(ids, counts, wanted[-1])

    def work(log: Callable[[str], None]) -> dict[str, Any]:
        from tide_lm.bench.decode import measure_all, measure_store

        result = measure_all(wanted, places, batches, context, peers, log, device)
        if forced is not None:
            log(f"forcing tokens through {wanted[-1]}")
            result["store"] = measure_store(wanted[-1], 64 << 20, *forced, device)
        return result

    result, following = _measured(work), f"tide-lm bench store {_with_memory(wanted)}"
    if as_json:
        print_json(result)
        print_next(following)
        return
    speed = f"{result['bandwidth_tb_s']:.2f} TB/s are read"
    title = f"Decoding from {context[0]:,} to {context[1]:,} tokens; {speed}"
    columns = ["model", "by", "rows", "batch", *_titles(DECODED)]
    rows = [
        (run["preset"], run["by"], run["memory"], run["batch"], *_numbers(run, DECODED))
        for run in result["runs"]
    ]
    print_table(title, columns, rows)
    if store := result.get("store"):
        rows = [(name, number(value)) for name, value in store.items() if isinstance(value, float)]
        print_table(f"{wanted[-1]} from a store, {store['tokens']:,} tokens", ["", ""], rows)
    print_next(following)


@app.command("store", cls=Command)
def store(
    model: Annotated[str, typer.Argument(help="The preset whose store is read.")] = "tide-8e-1b",
    bits: Annotated[int, typer.Option(help="Bits per number: 16, 8, 4, 3 or 2.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens whose rows are read.")] = 2048,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to take medians of.")] = 7,
    folder: Annotated[
        Path, typer.Option(help="Where the store is written, and removed: on the disk to time.")
    ] = Path(),
    as_json: AsJson = False,
) -> None:
    """Time reading rows from a cold store, beside a memory map and fio.

    Example: tide-lm bench store tide-8e-small --rounds 3
    """
    from tide_lm.bench.wanted import check_reading

    with usage_errors():
        check_reading(model, bits, tokens)
    if not folder.is_dir():
        raise ValueError(f"--folder {folder} is not a folder: give one on the disk to time")
    check_writable(folder)

    def work(log: Callable[[str], None]) -> dict[str, Any]:
        from tide_lm.bench.store import measure

        return measure(model, bits, tokens, rounds, folder, log)

    result, following = _measured(work), f"tide-lm bench decode {model} --memory store"
    if as_json:
        print_json(result)
        print_next(following)
        return
    read = result["read"]
    rows = [(name, number(1000 * seconds, ",.1f")) for name, seconds in read["seconds"].items()]
    print_table(f"Rows of {tokens:,} tokens, cold, {read['block']:,} bytes each", ["by", "ms"], rows)
    print_next(following)


def _measured(work: Callable[[Callable[[str], None]], dict[str, Any]]) -> dict[str, Any]:
    """Do the work, and add versions and machine to its result."""
    with tidy_end(), working("Timing") as log:
        return work(log) | {"provenance": provenance()}


def _with_memory(models: list[str]) -> str:
    """Return the last of some presets that has a memory, or else one of that size."""
    found = [model for model in models if not model.startswith("base-")]
    return found[-1] if found else models[-1].replace("base-", "tide-8e-")


def _model(run: dict[str, Any]) -> tuple[str, str]:
    return run["preset"] + (", plain" if run["plain"] else ""), f"{run['vocab']:,}"


def _trained(run: dict[str, Any]) -> tuple[str, ...]:
    if "out_of_memory" in run:
        return *_model(run), "out of memory", *["-"] * (len(TRAINED) - 1)
    return *_model(run), *_numbers(run, TRAINED)


def _titles(columns: Columns) -> list[str]:
    return [title for title, _ in columns.values()]


def _numbers(run: dict[str, Any], columns: Columns) -> list[str]:
    return [number(run.get(key), form) for key, (_, form) in columns.items()]
