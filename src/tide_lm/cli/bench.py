"""`tide-lm bench`: how fast this machine trains, generates, and reads a store."""

import json
import signal
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any

import typer

from tide_lm.cli.options import AsJson, usage_errors
from tide_lm.cli.output import number, print_json, print_table
from tide_lm.cli.progress import working
from tide_lm.run import files
from tide_lm.run.provenance import provenance
from tide_lm.spec.config import Place

app = typer.Typer(help="Time what this machine does, on made-up data.", no_args_is_help=True)
PRESETS = ["base-1b", "tide-8e-1b", "tide-24e-1b"]
Out = Annotated[Path | None, typer.Option(help="A JSON file to write, with versions and machine.")]


@app.command("train")
def train(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="Presets to time; PRESET:IDS has a vocabulary of IDS ids, and PRESET+values has rows in "
            "attention's values too.",
            show_default=" ".join(PRESETS),
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per step.")] = 8,
    sequence: Annotated[int, typer.Option(min=2, help="Tokens per sequence.")] = 2048,
    steps: Annotated[int, typer.Option(min=1, help="Steps to time, after 20 to warm up.")] = 40,
    peers: Annotated[
        bool, typer.Option("--peers", help="Also time each PRESET without IDS in a plain compiled loop.")
    ] = False,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Time training: tokens per second, MFU, peak memory and the parts of a step.

    Example: tide-lm bench train base-tiny tide-4e-tiny --batch 2 --sequence 128
    """
    from tide_lm.bench.train import measure, shape_of

    wanted = models or PRESETS
    with usage_errors():
        for model in wanted:
            shape_of(model)
        _check(out)
    found: list[dict[str, Any]] = []
    for model in wanted:
        for plain in (False, True) if peers and ":" not in model else (False,):
            with working(f"Timing {model}{', plain' if plain else ''}"):
                found.append(measure(model, batch, sequence, steps, plain))
    if not _written({"runs": found}, out, as_json):
        columns = ["model", "ids", "tokens/s", "MFU", "ms per step", "peak GB"]
        print_table(f"Training, {batch} x {sequence:,} tokens per step", columns, map(_trained, found))
        timed = [run for run in found if "parts_ms" in run]
        parts = list(dict.fromkeys(part for run in timed for part in run["parts_ms"]))
        rows = [
            (*_model(run), *(number(run["parts_ms"].get(part, 0), ",.1f") for part in parts)) for run in timed
        ]
        print_table("Parts of a step, ms", ["model", "ids", *parts], rows)


@app.command("decode")
def decode(
    models: Annotated[
        list[str] | None, typer.Argument(help="Presets to time.", show_default=" ".join(PRESETS))
    ] = None,
    memory: Annotated[
        list[Place] | None,
        typer.Option(show_default="device", help="Where rows are; they are packed if not on the device."),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            show_default="1",
            help="Sequences per batch; repeatable. Extra batch sizes use only the first --memory.",
        ),
    ] = None,
    context: Annotated[tuple[int, int], typer.Option(help="Tokens of the prompt, and at the end.")] = (
        128,
        1152,
    ),
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
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Time generation: ms per token beside reading the weights once, the first token, and memory.

    Example: tide-lm bench decode base-tiny tide-4e-tiny --context 8 64 --batch 1 --batch 4
    """
    from tide_lm.bench.decode import check, measure_all, measure_store, read_tokens

    wanted, places, batches = models or PRESETS, memory or [Place.device], batch or [1]
    with usage_errors():
        check(wanted, places, context, through_store=ids is not None)
        if ids is None and counts is not None:
            raise ValueError("--counts goes with --ids, which is not given")
        forced = None if ids is None else read_tokens(ids, counts, wanted[-1])
        _check(out)
    _end_on_signals()
    with working("Timing") as log:
        result = measure_all(wanted, places, batches, context, peers, log)
    if forced is not None:
        with working(f"Forcing tokens through {wanted[-1]}"):
            result["store"] = measure_store(wanted[-1], 64 << 20, *forced)
    if _written(result, out, as_json):
        return
    columns = ["model", "by", "rows", "batch", "ms/token", "tokens/s", "GB/s", "of floor", "over base"]
    columns += ["first ms", "GB"]
    title = (
        f"Decoding from {context[0]:,} to {context[1]:,} tokens; {result['bandwidth_tb_s']:.2f} TB/s are read"
    )
    print_table(title, columns, map(_decoded, result["runs"]))
    if store := result.get("store"):
        rows = [(name, number(value)) for name, value in store.items() if isinstance(value, float)]
        print_table(f"{wanted[-1]} from a store, {store['tokens']:,} tokens", ["", ""], rows)


@app.command("store")
def store(
    model: Annotated[str, typer.Argument(help="The preset whose store is read.")] = "tide-8e-1b",
    decode: Annotated[str, typer.Option(help="The preset that generates.")] = "tide-8e-small",
    bits: Annotated[int, typer.Option(help="Bits per number: 16, 8, 4, 3 or 2.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens whose rows are read.")] = 2048,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to take medians of.")] = 7,
    folder: Annotated[
        Path, typer.Option(help="Where the stores are written, and removed: on the disk to time.")
    ] = Path(),
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Time reading rows from a cold store, beside a memory map and fio, and generation from a warm one.

    Example: tide-lm bench store tide-8e-small --rounds 3
    """
    from tide_lm.bench.store import check, measure

    with usage_errors():
        check(model, decode, bits, tokens)
        _check(out)
    _end_on_signals()
    with working(f"Timing a store of {model}") as log:
        result = measure(model, decode, bits, tokens, rounds, folder, log)
    if _written(result, out, as_json):
        return
    read, generated = result["read"], result["decode"]
    rows = [(name, number(1000 * seconds, ",.1f")) for name, seconds in read["seconds"].items()]
    print_table(f"Rows of {tokens:,} tokens, cold, {read['block']:,} bytes each", ["by", "ms"], rows)
    rows = [(name, number(rate, ",.1f")) for name, rate in generated["tokens_per_s"].items()]
    print_table(f"Generating with {decode}, warm", ["rows from", "tokens/s"], rows)


def _end_on_signals() -> None:
    """End on SIGTERM as on Ctrl-C, so that temporary folders are removed."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def _check(out: Path | None) -> None:
    """Check that a result can be written, before the timing."""
    if out is None:
        return
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder: name a file in it")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written ({error.strerror}): choose another") from None


def _written(result: dict[str, Any], out: Path | None, as_json: bool) -> bool:
    """Write and print the result as JSON where that is asked for; return whether it was printed."""
    result["provenance"] = provenance()
    if out is not None:
        files.write_atomically(out, json.dumps(result, indent=2) + "\n")
    if as_json:
        print_json(result)
    return as_json


def _model(run: dict[str, Any]) -> tuple[str, str]:
    return run["preset"] + (", plain" if run["plain"] else ""), f"{run['vocab']:,}"


def _trained(run: dict[str, Any]) -> tuple[str, ...]:
    if "out_of_memory" in run:
        return *_model(run), "out of memory", "-", "-", "-"
    forms = {"tokens_per_s": ",.0f", "mfu": ".1%", "step_ms": ",.1f", "peak_gb": ".1f"}
    return *_model(run), *(number(run[name], form) for name, form in forms.items())


def _decoded(run: dict[str, Any]) -> tuple[str, ...]:
    forms = {
        "ms_per_token": ".3f",
        "tokens_per_s": ",.1f",
        "gb_per_s": ",.0f",
        "of_floor": ".0%",
        "over_base": "+.1%",
        "first_token_ms": ".1f",
        "vram_gb": ".2f",
    }
    shown = (number(run.get(name), form) for name, form in forms.items())
    return run["preset"], run["by"], run["memory"], str(run["batch"]), *shown
