"""The time of one token in the decode kernel, phase by phase, and how its constants change it. Needs a GPU.

python benchmarks/decode_phases.py tide-8e-1b --try '{"WARPS": 8}' --try '{"SPLITS": 8}' --json FILE
"""

import argparse
import json
from pathlib import Path

import torch

from tide_lm.bench.decode import random_model
from tide_lm.bench.timing import device
from tide_lm.run import files
from tide_lm.run.provenance import provenance
from tide_lm.serve.cache import SlotCache
from tide_lm.serve.decoder import Decoder
from tide_lm.serve.fused import FusedForward
from tide_lm.serve.sampling import Sampling
from tide_lm.spec import presets
from tide_lm.spec.config import Residence

PHASES = [
    *("projected in", "projected", "attention goes", "attention in", "attended", "merge goes", "merged"),
    *("o in", "o out", "up in", "up out", "down in", "down out"),
]


@torch.no_grad()
def milliseconds(decoder, start=128, end=1152):
    """Return the time of one token, with steps that are captured and not waited for."""
    found = []
    for _ in range(3):
        decoder.forward.cache.place_B.fill_(start)
        decoder.step(end)
        decoder.forward.cache.place_B.fill_(start)
        begin, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(start, end):
            decoder.step(end)
        stop.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(stop) / (end - start))
    return sorted(found)[1]


@torch.no_grad()
def phases(forward, place=640):
    """Return microseconds from the median layer's start to each mark, in the first and the last block."""
    kernel = forward.kernel
    forward.cache.place_B.fill_(place)
    for _ in range(3):
        kernel.decode()
    torch.cuda.synchronize()
    times_LGM = kernel.times.view(-1, kernel.blocks, 16)[:, :, : len(PHASES)].cpu()
    begins_L = times_LGM[:, :, 0].amin(1)
    lasts_L = begins_L[1:] - begins_L[:-1]
    layer = int(lasts_L.argsort()[len(lasts_L) // 2])
    found = {"layer": layer, "lasts": float(lasts_L[layer]) / 1e3, "first lasts": float(lasts_L[0]) / 1e3}
    for mark, name in enumerate(PHASES):
        some = times_LGM[layer, :, mark]
        some = some[some > 0] - begins_L[layer]
        found[name] = [float(some.min()) / 1e3, float(some.max()) / 1e3]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("preset", nargs="?", default="tide-8e-1b")
    parser.add_argument("--try", dest="tries", type=json.loads, action="append", default=[{}])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = []
    with random_model(presets.get(given.preset).model, Residence(), device()) as model:
        cache = SlotCache(model.config, 1, 2048, model.lm_head.weight, together=True)
        for changes in given.tries:
            record = {"changes": changes}
            try:
                record["ms"] = milliseconds(Decoder(FusedForward(model, cache, changes), Sampling()))
                record["phases_us"] = phases(FusedForward(model, cache, changes | {"TIMES": 1}))
            except (RuntimeError, ValueError) as error:
                record["error"] = str(error)[:300]
            print(json.dumps(record), flush=True)
            found.append(record)
    if given.json:
        result = {"preset": given.preset, "tries": found, "provenance": provenance()}
        files.write_atomically(given.json, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
