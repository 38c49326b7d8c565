"""`tide-lm bench`: how fast this machine trains, generates, and reads a store."""

import json
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Annotated, Any

import typer

from tide_lm.cli.options import AsJson
from tide_lm.cli.output import print_json, print_table
from tide_lm.cli.progress import working
from tide_lm.run import files
from tide_lm.run.provenance import provenance
from tide_lm.spec.config import Place

app = typer.Typer(help="Time what this machine does, on made-up data.", no_args_is_help=True)


Out = Annotated[Path | None, typer.Option("--out", help="A JSON file to write, with versions and machine.")]


@app.command("train")
def train(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="Presets to time; `PRESET:IDS` has a vocabulary of so many ids, and `PRESET+values` rows in "
            "attention's values too.",
            show_default="base-1b tide-8e-1b tide-24e-1b",
        ),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences of a step.")] = 8,
    sequence: Annotated[int, typer.Option("--sequence", min=2, help="Tokens of a sequence.")] = 2048,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to time, after 20 to warm up.")] = 40,
    peers: Annotated[
        bool, typer.Option("--peers", help="Beside each PRESET without IDS, it in a plain compiled loop.")
    ] = False,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Tokens a second, MFU, peak memory and the parts of a training step."""
    from tide_lm.bench.train import measure, shape_of

    try:
        wanted = models or ["base-1b", "tide-8e-1b", "tide-24e-1b"]
        for model in wanted:
            shape_of(model)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    _check(out)
    found: list[dict[str, Any]] = []
    for model in wanted:
        for plain in (False, True) if peers and ":" not in model else (False,):
            with working(f"Timing {model}{', plain' if plain else ''}"):
                found.append(measure(model, batch, sequence, steps, plain))
    result = {"runs": found, "provenance": provenance()}
    _write(out, result)
    if as_json:
        print_json(result)
    else:
        columns = ["model", "ids", "tokens/s", "MFU", "ms a step", "peak GB"]
        print_table(f"Training, {batch} x {sequence:,} tokens a step", columns, map(_row, found))
        timed = [run for run in found if "parts_ms" in run]
        parts = list(dict.fromkeys(part for run in timed for part in run["parts_ms"]))
        print_table("Parts of a step, ms", ["model", "ids", *parts], (_parts(run, parts) for run in timed))


@app.command("decode")
def decode(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Presets to time.", show_default="base-1b tide-8e-1b tide-24e-1b"),
    ] = None,
    memory: Annotated[
        list[Place] | None,
        typer.Option("--memory", show_default="device", help="Where rows are, packed if not on the device."),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(
            "--batch",
            min=1,
            show_default="1",
            help="Sequences at once. Numbers after the first are timed in the first --memory alone.",
        ),
    ] = None,
    context: Annotated[
        tuple[int, int], typer.Option("--context", help="Tokens of the prompt, and at the end.")
    ] = (128, 1152),
    peers: Annotated[
        bool,
        typer.Option("--peers", help="Beside the first, its forward compiled, and transformers' generate."),
    ] = False,
    ids: Annotated[
        Path | None,
        typer.Option(
            "--ids", help="Tokens (.npy) to force through the last preset, from a store on the disk."
        ),
    ] = None,
    counts: Annotated[
        Path | None, typer.Option("--counts", help="With --ids: how often each token occurs (.npy).")
    ] = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Milliseconds a token, beside what reading the weights once takes, first token and memory."""
    from tide_lm.bench.decode import bandwidth, measure, measure_store
    from tide_lm.spec import presets

    wanted = models or ["base-1b", "tide-8e-1b", "tide-24e-1b"]
    try:
        shapes = {name: presets.get(name).model for name in wanted}
        if not 1 <= context[0] < context[1] - 1:
            raise ValueError(
                f"--context is {context[0]} {context[1]}: begin with 1 or more, end with two more at least"
            )
        for name, shape in shapes.items():
            if context[1] > shape.max_position_embeddings:
                known = shape.max_position_embeddings
                raise ValueError(
                    f"--context ends at {context[1]}, and {name} knows {known} positions: lower it"
                )
        places = list(dict.fromkeys(memory or [Place.device]))
        if Place.device not in places and not any(shape.num_memory_blocks for shape in shapes.values()):
            raise ValueError(f"base models have no rows to be in {places[0]}: leave --memory out")
        if ids is not None and not shapes[wanted[-1]].num_memory_blocks:
            raise ValueError(
                f"--ids goes through the last preset, and {wanted[-1]} has no memory: end with another"
            )
        forced = _tokens(ids, counts, shapes[wanted[-1]].vocab_size)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    _check(out)
    _end_on_signals()
    read = bandwidth()
    found: list[dict[str, Any]] = []
    batches = list(dict.fromkeys(batch or [1]))
    for sequences in batches:
        for name, shape in shapes.items():
            for place in places if sequences == batches[0] else places[:1]:
                if place is Place.device or shape.num_memory_blocks:
                    with working(f"Timing {name}, {sequences} at once, rows on {place}"):
                        found += measure(name, place, sequences, context, peers and not found)
    bases = {run["batch"]: run["ms_per_token"] for run in found if not run["k"] and "weight_bytes" in run}
    for run in found:
        if run["batch"] in bases:
            run["over_base"] = run["ms_per_token"] / bases[run["batch"]] - 1
        if "weight_bytes" in run:
            run["gb_per_s"] = run["weight_bytes"] / run["ms_per_token"] / 1e6
            run["floor_ms"] = 1e3 * run["weight_bytes"] / read
            run["of_floor"] = 1e9 * run["gb_per_s"] / read
    result = {
        "floor_ms": found[0]["floor_ms"],
        "bandwidth_tb_s": read / 1e12,
        "runs": found,
        "provenance": provenance(),
    }
    if forced is not None:
        with working(f"Forcing tokens through {wanted[-1]}"):
            result["store"] = measure_store(wanted[-1], 64 << 20, *forced)
    _write(out, result)
    if as_json:
        print_json(result)
        return
    columns = ["model", "by", "rows", "batch", "ms/token", "tokens/s", "GB/s", "of floor", "over base"]
    columns += ["first ms", "GB"]
    title = f"Decoding from {context[0]:,} to {context[1]:,} tokens; {read / 1e12:.2f} TB/s are read"
    print_table(title, columns, map(_decoded, found))
    if forced is not None:
        rows = [
            (name, f"{value:,.3f}") for name, value in result["store"].items() if isinstance(value, float)
        ]
        print_table(f"{wanted[-1]} from a store, {result['store']['tokens']:,} tokens", ["", ""], rows)


def _tokens(ids: Path | None, counts: Path | None, vocabulary: int) -> tuple[list[int], Any] | None:
    """Tokens to force through, and how often each occurs, if that is given."""
    import numpy as np

    if ids is None:
        if counts is not None:
            raise ValueError("--counts goes with --ids, which is not given")
        return None

    def whole_numbers(option: str, path: Path) -> Any:
        try:
            array = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError):
            array = None
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu" or array.ndim != 1:
            raise ValueError(
                f"{option} {path} is no .npy file of whole numbers in a row: write it with numpy.save"
            )
        return array

    tokens = whole_numbers("--ids", ids)
    if not len(tokens) or not 0 <= tokens.min() <= tokens.max() < vocabulary:
        raise ValueError(f"--ids {ids} must hold token ids from 0 to {vocabulary - 1}, one after the other")
    occurring = None if counts is None else whole_numbers("--counts", counts)
    if occurring is not None and (occurring.shape != (vocabulary,) or occurring.min() < 0):
        raise ValueError(
            f"--counts {counts} must hold {vocabulary} numbers, 0 or more, one for each token id"
        )
    return tokens.tolist(), occurring


def _end_on_signals() -> None:
    """End on SIGTERM as on Ctrl-C, so that temporary folders are removed."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def _decoded(run: dict[str, Any]) -> tuple[str, ...]:
    def shown(name: str, form: str) -> str:
        return "-" if run.get(name) is None else format(run[name], form)

    return (
        run["preset"],
        run["by"],
        run["memory"],
        str(run["batch"]),
        shown("ms_per_token", ".3f"),
        shown("tokens_per_s", ",.1f"),
        shown("gb_per_s", ",.0f"),
        shown("of_floor", ".0%"),
        shown("over_base", "+.1%"),
        shown("first_token_ms", ".1f"),
        shown("vram_gb", ".2f"),
    )


@app.command("store")
def store(
    model: Annotated[str, typer.Argument(help="The preset whose store is read.")] = "tide-8e-1b",
    decode: Annotated[str, typer.Option("--decode", help="The preset that generates.")] = "tide-8e-small",
    bits: Annotated[int, typer.Option("--bits", help="Of a number: 16, 8, 4, 3 or 2.")] = 4,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens whose rows are read.")] = 2048,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="How often; medians are told.")] = 7,
    folder: Annotated[
        Path, typer.Option("--folder", help="Where the stores are written, and removed: on the disk to time.")
    ] = Path(),
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Rows from a cold store, beside a memory map and fio, and generation from a warm one, on the CPU."""
    from tide_lm.bench.store import decode_speed, random_store, read_speed
    from tide_lm.spec import presets
    from tide_lm.store.codec import RowCodec

    try:
        shape, small = presets.get(model).model, presets.get(decode).model
        if not (shape.num_memory_blocks and small.num_memory_blocks):
            raise ValueError("a base model has no store: name presets with memory, such as tide-8e-1b")
        if tokens > shape.vocab_size:
            raise ValueError(f"--tokens is {tokens}, and {model} has {shape.vocab_size}: give fewer")
        RowCodec(1, bits)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    _check(out)
    _end_on_signals()
    with TemporaryDirectory(dir=folder, prefix=".bench-store-") as place:
        with working(f"Writing a store of {model}"):
            header = random_store(Path(place) / "rows.tide", shape, bits)
        with working("Reading it"):
            read = read_speed(Path(place) / "rows.tide", tokens, rounds)
        with working(f"Generating with {decode}"):
            generated = decode_speed(decode, Path(place) / "packed", bits, 64, rounds)
    result = {
        "model": model,
        "bits": bits,
        "store_bytes": header.file_bytes,
        "padding": header.padding,
        "read": read,
        "decode": generated,
        "provenance": provenance(),
    }
    _write(out, result)
    if as_json:
        print_json(result)
        return
    rows = [(name, f"{1000 * seconds:,.1f}") for name, seconds in read["seconds"].items()]
    print_table(f"Rows of {tokens:,} tokens, cold, {read['block']:,} bytes each", ["by", "ms"], rows)
    rows = [(name, f"{rate:,.1f}") for name, rate in generated["tokens_per_s"].items()]
    print_table(f"Generating with {decode}, warm", ["rows from", "tokens/s"], rows)


def _check(out: Path | None) -> None:
    """Check that a result can be written, before the timing."""
    if out is None:
        return
    if out.is_dir():
        raise typer.BadParameter(f"--out {out} is a folder: name a file in it")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        why = f"--out {out} cannot be written ({error.strerror}): choose another"
        raise typer.BadParameter(why) from None


def _write(out: Path | None, result: dict[str, Any]) -> None:
    if out is not None:
        files.write_atomically(out, json.dumps(result, indent=2) + "\n")


def _model(run: dict[str, Any]) -> tuple[str, str]:
    return run["preset"] + (", plain" if run["plain"] else ""), f"{run['vocab']:,}"


def _parts(run: dict[str, Any], parts: list[str]) -> tuple[str, ...]:
    return *_model(run), *(f"{run['parts_ms'].get(part, 0):,.1f}" for part in parts)


def _row(run: dict[str, Any]) -> tuple[str, ...]:
    model = _model(run)
    if "out_of_memory" in run:
        return *model, "out of memory", "-", "-", "-"
    return (
        *model,
        f"{run['tokens_per_s']:,.0f}",
        "-" if run["mfu"] is None else f"{run['mfu']:.1%}",
        f"{run['step_ms']:,.1f}",
        "-" if run["peak_gb"] is None else f"{run['peak_gb']:.1f}",
    )
