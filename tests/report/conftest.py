"""Run directories with planted results: every kind, two layers, three blocks."""

import json
import math

import pytest

from tide_lm.run.settings import RunConfig

SCRIPT = "<script>alert(1)</script>"
FAR = "At the beginning of a sentence that is so long, so very long that nobody reads it to its end, she"
TASKS = ("arc_challenge", "arc_easy", "boolq", "hellaswag", "lambada_openai", "openbookqa", "piqa", "sciq")
TEXT = {"source": "wiki.txt", "sha256": "ab" * 32, "bytes": 4000, "window": 128, "stride": 64}
PROVENANCE = {
    "command": f"tide-lm analyze x '{SCRIPT}'",
    "seed": 0,
    "commit": "0123abc",
    "python": "3.12.0",
    "versions": {"torch": "2.11.0"},
    "machine": {"system": "Linux", "cpu": "a CPU", "cores": 2, "gpus": []},
}


def losses(shift: float) -> dict:
    """Nats from 9 on the rarest decile to 4.5 on the commonest, and `shift` less of a gain on common ones."""
    by_decile = [9 - 0.5 * decile + shift * (1 - decile / 20) for decile in range(10)]

    def mean(deciles: range) -> dict:
        return {"loss": math.fsum(by_decile[d] for d in deciles) / len(deciles), "tokens": 100 * len(deciles)}

    return {
        **mean(range(10)),
        "loss_by_decile": by_decile,
        "tokens_by_decile": [100] * 10,
        "rare": mean(range(3)),
        "mid": mean(range(3, 7)),
        "common": mean(range(7, 10)),
        "unbinned": {"loss": None, "tokens": 0},
    }


def _norms(tables: int) -> dict:
    means = [0.5 + 0.05 * decile for decile in range(10)]
    group = {"ids": 10, "mean": 0.6, "deviation": 0.1, "histogram": [2, 5, 3]}
    return {
        "embedding": means,
        "tables": [[value + block / 10 for value in means] for block in range(tables)],
        "spread": {"edges": [0.4, 0.6, 0.8, 1.0], "rare": group, "mid": group, "common": group},
        "growth": [
            {"step": step, "tokens": 1000 * step, "embedding": [m * (1 + step / 1000) for m in means]}
            for step in (10, 20)
        ],
    }


def _updates() -> dict:
    def row(frequency: float) -> dict:
        return {
            "ids": 10,
            "mean_count": 1.0,
            "frequency": frequency,
            "expected_updates": 12_200_000 * -math.expm1(-frequency * 16384),
            "occurrences": 2e11 * frequency,
            "ratio_bound": 1e-4,
        }

    rows = {str(decile): row(10.0 ** (decile - 9) / 2) for decile in range(10)}
    rows |= {"rare": row(1e-8), "mid": row(1e-6), "common": row(1e-3)}
    return {"tokens": 2e11, "batch": 8, "sequence": 2048, "counted_tokens": 1000, "rows": rows}


def _collapse(scale: float) -> dict:
    pairs = [["their", "there"], ["a$b$", SCRIPT]]
    category = {
        "pairs": pairs,
        "skipped": [["knight", "night"]],
        "templates": 150,
        "distance": [[1.0 * scale, 2.0 * scale], [3.0 * scale, 4.0 * scale]],
        "relative": [[0.1, 0.2], [0.3, 0.4]],
        "collapse_set": [[0], []],
        "ffn": {
            "members": [[0], []],
            "input_distance": [[0.25, 9.0], [9.0, 9.0]],
            "slope": [[4.0, 9.0], [9.0, 9.0]],
            "bound": [[1.0, 9.0], [9.0, 9.0]],
            "separation": [[0.5, 9.0], [9.0, 9.0]],
        },
    }
    unknown = {"pairs": [], "skipped": [["1", "2"], ["3", "4"]], "templates": 150}
    return {"delta": 0.1, "categories": {"homophones": category, "numbers": unknown}}


def _routing() -> dict:
    layers = [
        [[(1 - null) / 3] * 3 + [null] for null in (0.1 * layer + 0.05 * decile for decile in range(10))]
        + [None]
        for layer in (1, 2)
    ]
    return {
        "text": "wiki",
        "source": "wiki.txt",
        "window": 128,
        "tokens": [10] * 10 + [0],
        "by_layer": layers,
    }


def _neighbours() -> dict:
    overlap = {"ids": 4, "jaccard": [[0.1, 0.2, 0.3, 0.4]] * 3}
    word = {"id": 7, "neighbours": [[" Fred", SCRIPT, "$x$", "\n\x00"]] * 4, "jaccard": [0.11, 0.25, 0.43]}
    return {
        "neighbours": 10,
        "tables": ["E", "M1", "M2", "M3"],
        "seed": 0,
        "rare": overlap,
        "common": overlap,
        "words": {"asynchronously": word},
    }


def _compression() -> dict:
    """Perplexity 100; 8 bits cost 0.1 %, 4 bits 1 %, ranks what they leave out; rare tokens a tenth of it."""

    def texts(more: float) -> dict:
        return {"wiki": {"perplexity": 100 * (1 + more), **losses(more / 10)}}

    def form(bits: int, more: float, rank: float = 1.0, blocks: str = "even", weighted: float = 0.0) -> dict:
        name = f"{bits} bits" if rank == 1 else f"{bits} bits, rank {rank}, {blocks}, {weighted}"
        if (bits, blocks, weighted) == (16, "even", 0):
            name = f"{bits} bits, rank {rank}"
        share = rank * bits / 16
        settings = {"bits": bits, "rank": rank, "blocks": blocks, "weighted": weighted}
        return {"form": name, **settings, "bytes": 1000, "relative_bytes": share, "texts": texts(more)}

    ranks = [form(16, 1 - rank, rank) for rank in (0.7, 0.5, 0.1)]
    others = [form(16, 0.2, 0.5, "joint"), form(16, 0.1, 0.5, "joint", 0.5), form(8, 0.3, 0.5, "joint", 0.5)]
    bits = [form(8, 0.001), form(4, 0.01), form(2, 0.4)]
    return {"as_trained": texts(0), "forms": [*bits, *ranks, *others]}


def results(blocks: int) -> dict[str, dict]:
    """All results of a run with so many blocks, which is 0 or 3."""
    shift = -0.2 if blocks else 0.0
    found = {
        "validation": {"step": 20, **losses(shift)},
        "perplexity": {
            "texts": {
                "wiki": {
                    **TEXT,
                    "perplexity": 123.4567 + shift,
                    "word_perplexity": 2345.678,
                    "bits_per_byte": 1.25,
                    "words": 700,
                    "provenance": PROVENANCE,
                    **losses(shift / 2),
                }
            }
        },
        "checkpoints": {
            "points": [
                {"step": s, "tokens": 1000 * s, "perplexity": {"wiki": 900 / s + shift}} for s in (10, 20)
            ],
            "texts": {"wiki": TEXT},
        },
        "benchmarks": {
            "tasks": {
                name: {
                    "score": 0.3 + place / 100,
                    "metric": "acc",
                    "stderr": 0.01,
                    "samples": 50,
                    "split": "test",
                }
                for place, name in enumerate(TASKS)
            },
            "average": 0.335,
            "lambada_perplexity": 98.765,
            "limit": None,
            "source": "hub",
        },
        "norms": _norms(blocks),
        "updates": _updates(),
        "collapse": _collapse(2.0 if blocks else 1.0),
        "gradients": {"embedding_input": [1.0] * 10, "embedding_head": [2.0] * 10},
        "footprint": {
            "blocks": blocks,
            "rows": [
                {"blocks": k, "bits": bits, "vram_bytes": 10**9 * bits // 8, "ssd_bytes": 10**8 * k * bits}
                for k in (0, 3, 24)
                for bits in (16, 8, 4)
            ],
        },
    }
    if blocks:
        found["gradients"] |= {"tables": [[0.5] * 10] * blocks, "amplification": [1.5] * 10}
        found |= {
            "routing": _routing(),
            "layer-drop": {
                "window": 8,
                "stride": 4,
                "texts": {
                    "wiki": {
                        "full": 100.0,
                        "without_layer": [2100.0, 101.0],
                        "change": [20.0, 0.01],
                        "without_any": 3000.0,
                    }
                },
            },
            "distances": {
                "tables": ["E", "M1", "M2", "M3"],
                "ids": 9,
                "distance": [[0, 0.7, 0.8, 0.9], [0.7, 0, 0.4, 0.5], [0.8, 0.4, 0, 0.6], [0.9, 0.5, 0.6, 0]],
            },
            "neighbours": _neighbours(),
            "words": {
                "against": "base",
                "least": 5,
                "words": 611,
                "better": 579,
                "largest": [
                    {
                        "word": "learnt",
                        "times": 7,
                        "gain": 5.25,
                        "sentence": f"{FAR} had *learnt* it. {SCRIPT}",
                    }
                ],
            },
            "compression": _compression(),
        }
    return found


@pytest.fixture(scope="session")
def plant():
    """Writes a run directory with planted results, all or `only` some, and returns its path."""

    def make(path, blocks: int = 3, without: tuple[str, ...] = (), only: tuple[str, ...] | None = None):
        preset = f"tide-{blocks}e-tiny" if blocks else "base-tiny"
        settings = ["train.steps=100", "optim.warmup_steps=1", "train.record_gradients=true"]
        config = RunConfig.load(None, [f"model.preset={preset}", *settings])
        (path / "results").mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(config.to_dict()))
        lines = [{"step": step, "tokens": 100 * step, "loss": 8 - step / 20} for step in range(1, 61)]
        lines[3]["loss"] = None  # a step that was left out
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"st')
        for name, result in results(blocks).items():
            if name not in without and (only is None or name in only):
                written = json.dumps({"model": path.name, **result, "provenance": PROVENANCE})
                (path / "results" / f"{name}.json").write_text(written)
        return path

    return make


@pytest.fixture
def two_runs(plant, tmp_path):
    return [plant(tmp_path / "base", 0), plant(tmp_path / "tide", 3)]
