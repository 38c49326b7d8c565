"""Tables of the cost of training and generation on a GPU, from results/h200 and by arithmetic."""

from collections.abc import Mapping
from typing import Any

from studies.markdown import table
from tide_lm.spec import estimate, presets

Json = Mapping[str, Any]  # a file of results

GPUS = (1, 8, 64)
_MODELS = {"base-1b": "base", "tide-8e-1b": "TIDE-8E", "tide-24e-1b": "TIDE-24E"}
_ROWS = {"device": "tables, on the GPU", "cpu": "4 bits, in the host's memory (`cpu`)"}
_PEERS = {
    "compiled, static cache": "base, compiled and captured, static cache",
    "transformers": "base, `generate` of transformers",
    "transformers, static cache": "base, `generate`, static cache, compiled",
}


def memory_by_gpus() -> str:
    """Return the memory of weights, gradients and moments on each GPU, by arithmetic."""
    names = [f"{kind}-{size}" for size in ("1b", "3b") for kind in ("base", "tide-8e", "tide-24e")]
    rows = []
    for name in names:
        model = presets.get(name).model
        taken = (sum(estimate.adam_bytes(model, gpus)) / 1e9 for gpus in GPUS)
        rows.append([f"`{name}`", *(f"{gigabytes:.1f}" for gigabytes in taken)])
    heads = [f"{gpus} GPU{'s' if gpus > 1 else ''}, GB each" for gpus in GPUS]
    return table(["model", *heads], rows)


def training(train: Json) -> str:
    """Return the training speed of the 1b models, beside the same models in a plain loop."""
    runs = [run for run in train["runs"] if run["preset"] in _MODELS]
    runs.sort(key=lambda run: run["plain"])
    rows = []
    for run in runs:
        name = run["preset"] + (", plain" if run["plain"] else "")
        if "out_of_memory" in run:
            rows.append([name, "out of memory", "", "", ""])
            continue
        share = f"{_share(train, run):.3f}"
        measured = f"{100 * run['mfu']:.1f} %", f"{run['peak_gb']:.1f}"
        rows.append([name, f"{run['tokens_per_s']:,.0f}", share, *measured])
    return table(["model", "tokens/s", "tokens/s over base-1b's", "MFU", "peak memory, GB"], rows)


def training_in_short(train: Json) -> str:
    """Return the training speed of TIDE over its base's, in a few words."""
    shares = {run["k"]: _share(train, run) for run in train["runs"] if _is_tide_1b(run)}
    return ", ".join(f"{share:.2f} with {k} tables" for k, share in sorted(shares.items()))


def training_memory_in_short(train: Json) -> str:
    """The peak of GPU memory in training, by the number of tables, in a few words."""
    runs = [run for run in train["runs"] if run["preset"] in _MODELS and not run["plain"]]
    peaks = {run["k"]: run["peak_gb"] for run in runs}
    return ", ".join(f"{peak:.0f} GB with {k or 'no'} tables" for k, peak in sorted(peaks.items()))


def _is_tide_1b(run: Json) -> bool:
    return run["preset"] in _MODELS and run["k"] > 0 and not run["plain"]


def _share(train: Json, run: Json) -> float:
    (base,) = (other for other in train["runs"] if other["preset"] == "base-1b" and not other["plain"])
    return run["tokens_per_s"] / base["tokens_per_s"]


def rows_in_values(values: Json) -> str:
    """Return what rows in attention's values cost per training step."""
    rows = [
        [run["preset"].partition("+")[0], where, f"{run['step_ms']:.1f}", f"{run['peak_gb']:.1f}"]
        for where, run in zip(("no", "yes"), (run for run in values["runs"] if run["k"]), strict=True)
    ]
    return table(["model", "rows in values", "ms per step", "peak memory, GB"], rows)


def generation(decode: Json) -> str:
    """Return the speed of one sequence on one GPU, beside other engines for the base."""
    rows = []
    alone = [run for run in decode["runs"] if run["batch"] == 1]
    for run in sorted(alone, key=lambda run: run["by"] in _PEERS):
        name, where = _MODELS[run["preset"]], _ROWS.get(run["memory"]) if run["k"] else ""
        if run["by"] in _PEERS:
            name, where = _PEERS[run["by"]], ""
        if where is not None:
            share = f"{100 * run['of_floor']:.0f} %" if "of_floor" in run else ""
            memory = f"{run['vram_gb']:.2f}" if "vram_gb" in run else ""
            rows.append([name, where, f"{run['ms_per_token']:.3f}", share, memory])
    rows.append(["reading the base's weights once", "", f"{decode['floor_ms']:.3f}", "100 %", ""])
    return table(["model", "rows", "ms per token", "of the GPU's bandwidth", "GPU memory, GB"], rows)


def generation_in_short(decode: Json) -> str:
    """Return the base beside a model with most tables, which are outside the GPU's memory."""
    alone = [run for run in decode["runs"] if run["batch"] == 1 and run["by"].startswith("engine")]
    base = next(run for run in alone if run["preset"] == "base-1b")
    most = next(run for run in alone if (run["preset"], run["memory"]) == ("tide-24e-1b", "cpu"))
    rows = [
        [name, f"{run['ms_per_token']:.3f}", f"{run['vram_gb']:.2f}"]
        for name, run in {"none": base, "24, of 4 bits per number, in the host's memory": most}.items()
    ]
    return table(["tables", "ms per token", "GPU memory, GB"], rows)


def decoding_in_short(decode: Json) -> str:
    """The time per token of the base, of most tables outside the GPU, and of a row in a file."""
    alone = [run for run in decode["runs"] if run["batch"] == 1 and run["by"].startswith("engine")]
    base = next(run for run in alone if run["preset"] == "base-1b")
    most = next(run for run in alone if (run["preset"], run["memory"]) == ("tide-24e-1b", "cpu"))
    without, host, file = base["ms_per_token"], most["ms_per_token"], decode["store"]["miss_ms"]
    return (
        f"{without:.3f} ms per token without tables, {host:.3f} ms with 24 of 4 bits in the host's memory, "
        f"and {file:.3f} ms where the token's rows must be read from a file"
    )


def generation_from_store(decode: Json) -> str:
    """Return the time of a token whose rows are in the store's cache, and of one whose rows are not."""
    store = decode["store"]
    hits = f"{100 * store['hit_rate']:.0f} %"
    misses = f"{100 * (1 - store['hit_rate']):.0f} %"
    rows = [
        [f"in the cache of {store['cache_bytes'] / 2**20:.0f} MiB", hits, f"{store['hit_ms']:.3f}"],
        ["in the store alone", misses, f"{store['miss_ms']:.3f}"],
        ["all on the GPU", "", f"{store['device_ms']:.3f}"],
    ]
    return table(["a token's rows are", "of the tokens", "ms per token"], rows)


def generation_in_batches(decode: Json) -> str:
    """Return the speed of several sequences at once."""
    found = [run for run in decode["runs"] if run["batch"] > 1]
    rows = [[_MODELS[run["preset"]], str(run["batch"]), f"{run['tokens_per_s']:,.0f}"] for run in found]
    return table(["model", "sequences at once", "tokens/s"], rows)
