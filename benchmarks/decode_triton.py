"""How near one persistent Triton kernel comes to the floor: the products of a token alone, without attention.

    python benchmarks/decode_triton.py --json results/h200/decode_triton.json

Each program has its rows of every matrix. What it can of the next matrix is loaded into registers before it
waits for all other programs; a counter in global memory is the barrier. Needs a GPU.
"""

import argparse
import json
from pathlib import Path

import torch
import triton
import triton.language as tl

from tide_lm.bench.decode import bandwidth
from tide_lm.run import files
from tide_lm.run.provenance import provenance
from tide_lm.spec import presets


@triton.jit
def _product(w, rows, K: tl.constexpr, x, y, counter, target, programs, BN: tl.constexpr, BK: tl.constexpr):
    each = tl.cdiv(rows, programs)
    first = tl.program_id(0) * each
    last = tl.minimum(first + each, rows)
    n = first + tl.arange(0, BN)
    k = tl.arange(0, BK)
    inside = (n < last)[:, None] & (k < K)[None, :]
    ahead = tl.load(w + n.to(tl.int64)[:, None] * K + k[None, :], mask=inside, other=0)
    while tl.atomic_add(counter, 0, sem="acquire") < target:
        pass
    total = tl.sum(
        ahead.to(tl.float32) * tl.load(x + k, mask=k < K, other=0, cache_modifier=".cg")[None, :], 1
    )
    for start in tl.static_range(BK, K, BK):
        inside = (n < last)[:, None] & (start + k < K)[None, :]
        tile = tl.load(w + n.to(tl.int64)[:, None] * K + start + k[None, :], mask=inside, other=0)
        more = tl.load(x + start + k, mask=start + k < K, other=0, cache_modifier=".cg")
        total += tl.sum(tile.to(tl.float32) * more[None, :], 1)
    tl.store(y + n, total, mask=n < last)
    for tile_start in range(first + BN, last, BN):
        n = tile_start + tl.arange(0, BN)
        total = tl.zeros((BN,), tl.float32)
        for start in tl.static_range(0, K, BK):
            inside = (n < last)[:, None] & (start + k < K)[None, :]
            tile = tl.load(w + n.to(tl.int64)[:, None] * K + start + k[None, :], mask=inside, other=0)
            more = tl.load(x + start + k, mask=start + k < K, other=0, cache_modifier=".cg")
            total += tl.sum(tile.to(tl.float32) * more[None, :], 1)
        tl.store(y + n, total, mask=n < last)
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release")
    return target + programs


@triton.jit
def token_kernel(
    qkv,
    o,
    up,
    down,
    head,
    x,
    y,
    logits,
    counter,
    begin,
    programs,
    NQ: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    BK: tl.constexpr,
    SMALL: tl.constexpr,
    LARGE: tl.constexpr,
):
    target = tl.load(begin)
    for layer in range(L):
        at = layer.to(tl.int64)
        target = _product(qkv + at * NQ * D, NQ, D, x, y, counter, target, programs, LARGE, BK)
        target = _product(o + at * D * D, D, D, y, x, counter, target, programs, SMALL, BK)
        target = _product(up + at * 2 * F * D, 2 * F, D, x, y, counter, target, programs, LARGE, BK)
        target = _product(down + at * D * F, D, F, y, x, counter, target, programs, SMALL, BK)
    target = _product(head, V, D, x, logits, counter, target, programs, LARGE, BK)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    shape = presets.get("base-1b").model
    D, F, V, L = shape.hidden_size, shape.intermediate_size, shape.vocab_size, shape.num_hidden_layers
    NQ = (shape.num_attention_heads + 2 * shape.num_key_value_heads) * shape.head_dim
    sizes = {"qkv": (L, NQ, D), "o": (L, D, D), "up": (L, 2 * F, D), "down": (L, D, F), "head": (V, D)}
    weights = {
        name: torch.empty(size, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)
        for name, size in sizes.items()
    }
    floor = sum(weight.nbytes for weight in weights.values()) / bandwidth() * 1e3
    programs = torch.cuda.get_device_properties("cuda").multi_processor_count
    x, y = (torch.randn(2 * F, device="cuda") for _ in range(2))
    logits, counter = torch.zeros(V, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    begin, found = torch.zeros_like(counter), []
    for warps in (8, 16):
        for BK, small, large in ((1024, 16, 32), (2048, 16, 32), (512, 16, 64), (1024, 16, 64)):
            record = {"warps": warps, "BK": BK, "rows": [small, large]}

            def token(warps=warps, BK=BK, small=small, large=large):
                token_kernel[(programs,)](
                    *weights.values(), x, y, logits, counter, begin, programs,
                    NQ, D, F, V, L, BK, small, large, num_warps=warps,
                )  # fmt: skip
                begin.copy_(counter)

            try:
                token()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    token()
                times = []
                for _ in range(5):
                    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    start.record()
                    for _ in range(100):
                        graph.replay()
                    end.record()
                    torch.cuda.synchronize()
                    times.append(start.elapsed_time(end) / 100)
                record["ms"] = sorted(times)[2]
            except Exception as error:
                record["error"] = repr(error)[:300]
            print(json.dumps(record), f"floor {floor:.3f} ms", flush=True)
            found.append(record)
    if given.json:
        result = {"floor_ms": floor, "tries": found, "provenance": provenance()}
        files.write_atomically(given.json, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
