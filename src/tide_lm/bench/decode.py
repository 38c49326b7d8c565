"""Time generation with random weights: the engine, and what others have for the same model."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from tide_lm.bench import timing
from tide_lm.bench.store import random_store
from tide_lm.bench.wanted import shape_of
from tide_lm.model import TideConfig, TideForCausalLM
from tide_lm.serve.decoder import ModelForward
from tide_lm.serve.engine import Engine
from tide_lm.serve.sampling import Sampling
from tide_lm.spec.config import ModelConfig, Place, Residence
from tide_lm.store.reader import StoreFile

BITS = 4  # of packed rows
_PEER_TOKENS = 128


def bandwidth(device: torch.device) -> float:
    """Return the bytes per second that a device reads at its best."""
    words = torch.ones(1 << (28 if device.type == "cuda" else 22), dtype=torch.int64, device=device)
    return words.nbytes / min(timing.seconds(words.sum) for _ in range(50))  # clocks take some time to rise


def measure_all(
    names: Sequence[str],
    places: Sequence[Place],
    batches: Sequence[int],
    context: tuple[int, int],
    peers: bool = False,
    log: Callable[[str], None] = lambda line: None,
    device: str | None = None,
) -> dict[str, Any]:
    """Time each preset at each batch size; batch sizes after the first use only the first place.

    A record is compared with the base of its batch size, and with the time to read its weights once.
    """
    on = timing.device(device)
    read = bandwidth(on)
    found: list[dict[str, Any]] = []
    for number, batch in enumerate(dict.fromkeys(batches)):
        for name in dict.fromkeys(names):
            for place in dict.fromkeys(places[:1] if number else places):
                if place is Place.device or shape_of(name).num_memory_blocks:
                    log(f"{name}, batch {batch}, rows on {place}")
                    found += measure(name, place, batch, context, peers and not found, on)
    bases = {run["batch"]: run["ms_per_token"] for run in found if not run["k"] and "weight_bytes" in run}
    for run in found:
        if run["batch"] in bases:
            run["over_base"] = run["ms_per_token"] / bases[run["batch"]] - 1
        if "weight_bytes" in run:
            run["gb_per_s"] = run["weight_bytes"] / run["ms_per_token"] / 1e6
            run["floor_ms"] = 1e3 * run["weight_bytes"] / read
            run["of_floor"] = 1e9 * run["gb_per_s"] / read
    return {"floor_ms": found[0]["floor_ms"], "bandwidth_tb_s": read / 1e12, "runs": found}


def measure(
    preset: str, memory: Place, batch: int, context: tuple[int, int], peers: bool, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Yield the engine's record, and those of its peers; sequences grow from one length to the other."""
    shape = shape_of(preset)
    start, end = context
    about = {"preset": preset, "k": shape.num_memory_blocks, "memory": str(memory), "batch": batch}
    about["context"] = list(context)
    with random_model(shape, Residence(memory), device) as model:
        prompts = torch.randint(
            shape.vocab_size, (batch, start), generator=torch.Generator().manual_seed(0)
        ).tolist()
        engine = Engine(model, end, batch)
        kind = "engine, one kernel" if engine.why_not_fused is None else "engine"
        yield about | {"by": kind, "weight_bytes": _weight_bytes(model)} | _timed(engine, prompts)
        if peers and engine.why_not_fused is None:
            plain = Engine(model, end, batch, fused=False)
            plain.forward = ModelForward(model, plain.cache, tune=True)
            yield about | {"by": "compiled, static cache"} | _timed(plain, prompts)
            del plain
        del engine
        tokens = min(_PEER_TOKENS, end - start)
        for name, generate in _peers(model, prompts, tokens).items() if peers else ():
            generate()
            taken = min(timing.seconds(generate) for _ in range(2)) / tokens
            yield about | {"by": name, "ms_per_token": 1e3 * taken, "tokens_per_s": batch / taken}


def _timed(engine: Engine, prompts: list[list[int]]) -> dict[str, Any]:
    """Time a generation to the end of the cache, after a first one, which compiles and captures."""
    tokens = engine.length - len(prompts[0])
    list(engine.generate(prompts, tokens))
    timing.forget_peak()
    first, rest = [], []
    for _ in range(3):
        began = time.perf_counter()
        steps = engine.generate(prompts, tokens)
        next(steps)
        first.append(time.perf_counter() - began)
        rest.append(timing.seconds(lambda: list(steps)) / (tokens - 1))  # noqa: B023
    return {
        "ms_per_token": 1e3 * statistics.median(rest),
        "tokens_per_s": len(prompts) / statistics.median(rest),
        "first_token_ms": 1e3 * statistics.median(first),
        "vram_gb": timing.peak_gb(),
    }


def measure_store(
    preset: str,
    cache_bytes: int,
    ids: Sequence[int],
    counts_V: np.ndarray | None,
    device: str | None = None,
) -> dict[str, Any]:
    """Count how many rows of given tokens the cache has, and time a step with them and without.

    `device` steps are of the same packed rows on the device, and wait for each token as well.
    """
    shape = shape_of(preset)
    found: dict[str, Any] = {"preset": preset, "cache_bytes": cache_bytes, "tokens": len(ids)}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rows.tide"
        random_store(path, shape, BITS, counts_V)
        for place in (Place.device, Place.store):
            with random_model(shape, Residence(place, cache_bytes), timing.device(device), path) as model:
                times, missed = _forced(model, ids)
            if place is Place.device:
                found["device_ms"] = 1e3 * statistics.median(times)
                continue
            hit_times = [time for time, miss in zip(times, missed, strict=True) if not miss]
            miss_times = [time for time, miss in zip(times, missed, strict=True) if miss]
            found["hit_rate"] = len(hit_times) / len(times)
            found["hit_ms"] = 1e3 * statistics.median(hit_times) if hit_times else None
            found["miss_ms"] = 1e3 * statistics.median(miss_times) if miss_times else None
    return found


def _forced(model: PreTrainedModel, ids: Sequence[int]) -> tuple[list[float], list[bool]]:
    """Return the seconds of a step for each given token, and whether its row had to be read."""
    engine = Engine(model)
    generation = engine.generate([[ids[0]]])
    next(generation)  # which leaves a decoder that is set up
    generation.close()
    decoder, counters = engine.decoder(Sampling()), getattr(model.model.memory, "counters", None)
    times, missed = [], []
    with torch.no_grad():
        for number, (previous, token) in enumerate(pairwise([0, *ids])):
            length = 1 + number % (engine.length - 1)
            engine.cache.place_B.fill_(length - 1)
            before = counters.misses if counters else 0
            engine.cache.previous_B.fill_(previous)
            engine.cache.ids_B.fill_(token)
            began = time.perf_counter()
            if engine.forward.waits:
                engine.forward.look_up([token], [previous])
            decoder.step(length)
            engine.cache.ids_B.tolist()
            times.append(time.perf_counter() - began)
            missed.append(bool(counters and counters.misses > before))
    return times, missed


@contextmanager
def random_model(
    shape: ModelConfig, residence: Residence, device: torch.device, store: Path | None = None
) -> Iterator[TideForCausalLM]:
    """Make a model of random weights in bfloat16; it is packed if its rows are not on the device."""
    packed = store is not None or residence.place is not Place.device
    gc.collect()  # a model that was measured before would count in the peak of this one
    kept = {"memory_store": {"file": "rows.tide", "fingerprint": "0" * 64}} if packed else {}
    torch.manual_seed(0)
    config = TideConfig(**shape.to_transformers(), **kept)
    model = timing.random_weights(TideForCausalLM, config, torch.bfloat16, device).eval()
    try:
        if not packed:
            yield model
            return
        with TemporaryDirectory() as folder:
            if store is None:
                store = Path(folder) / "rows.tide"
                random_store(store, shape, BITS)
            model.model.memory.open(StoreFile(store), residence, device)
            yield model
    finally:
        del model
        gc.collect()
        if torch.cuda.is_available():
            torch.compiler.reset()
            torch.cuda.empty_cache()


def _peers(model: TideForCausalLM, prompts: list[list[int]], tokens: int) -> dict[str, Callable[[], Any]]:
    ids_BT = torch.tensor(prompts, device=model.device)
    given: dict[str, Any] = {"attention_mask": torch.ones_like(ids_BT), "do_sample": False, "pad_token_id": 0}
    given |= {"max_new_tokens": tokens, "min_new_tokens": tokens}
    return {
        "transformers": lambda: model.generate(ids_BT, **given),
        "transformers, static cache": lambda: model.generate(ids_BT, cache_implementation="static", **given),
    }


def _weight_bytes(model: TideForCausalLM) -> int:
    """Count the bytes that each token needs: no tables, and one row of an embedding that is no head."""
    tables = {id(parameter) for name, parameter in model.named_parameters() if ".memory." in name}
    if model.lm_head.weight is not model.model.embed_tokens.weight:
        tables.add(id(model.model.embed_tokens.weight))
    return sum(parameter.nbytes for parameter in model.parameters() if id(parameter) not in tables)
