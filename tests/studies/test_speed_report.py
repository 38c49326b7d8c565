"""Tables of speed and memory, from results that are made up."""

from studies import speed_report


def lines(table):
    """The rows of a table, without its columns and the rule below them."""
    return table.splitlines()[2:]


def trained(preset, k, tokens_per_s, plain=False):
    return {
        "preset": preset,
        "k": k,
        "plain": plain,
        "tokens_per_s": tokens_per_s,
        "mfu": tokens_per_s / 2e5,
        "peak_gb": 30.04 + k,
        "step_ms": 1e7 / tokens_per_s,
    }


TRAIN = {
    "runs": [
        trained("base-1b", 0, 80_000.4),
        trained("base-1b", 0, 60_000.0, plain=True),
        trained("tide-8e-1b", 8, 76_000.0),
        {"preset": "tide-8e-1b", "k": 8, "plain": True, "out_of_memory": True},
        trained("tide-24e-1b", 24, 68_000.0),
        trained("base-350m", 0, 200_000.0),
    ]
}


def test_training_is_beside_the_base_and_plain_loops_come_last():
    assert lines(speed_report.training(TRAIN)) == [
        "| base-1b | 80,000 | 1.000 | 40.0 % | 30.0 |",
        "| tide-8e-1b | 76,000 | 0.950 | 38.0 % | 38.0 |",
        "| tide-24e-1b | 68,000 | 0.850 | 34.0 % | 54.0 |",
        "| base-1b, plain | 60,000 | 0.750 | 30.0 % | 30.0 |",
        "| tide-8e-1b, plain | out of memory |  |  |  |",
    ]
    assert speed_report.training_in_short(TRAIN) == "0.95 with 8 tables, 0.85 with 24 tables"


def test_rows_in_values_come_after_the_same_model_without_them():
    runs = [trained("base-1b", 0, 8e4), trained("tide-8e-1b", 8, 5e4), trained("tide-8e-1b+values", 8, 4e4)]
    assert lines(speed_report.rows_in_values({"runs": runs})) == [
        "| tide-8e-1b | no | 200.0 | 38.0 |",
        "| tide-8e-1b | yes | 250.0 | 38.0 |",
    ]


def decoded(preset, k, ms, memory="device", batch=1, by="engine, one kernel", **more):
    at = {"preset": preset, "k": k, "memory": memory, "batch": batch, "by": by}
    return {**at, "ms_per_token": ms, "tokens_per_s": 1000 * batch / ms, **more}


DECODE = {
    "floor_ms": 0.4004,
    "store": {
        "cache_bytes": 64 << 20,
        "hit_rate": 0.8271,
        "hit_ms": 0.6251,
        "miss_ms": 1.1221,
        "device_ms": 0.5811,
    },
    "runs": [
        decoded("base-1b", 0, 0.5004, of_floor=0.801, vram_gb=2.171),
        decoded("base-1b", 0, 1.5004, by="compiled, static cache", vram_gb=2.231),
        decoded("base-1b", 0, 24.9, by="transformers"),
        decoded("tide-8e-1b", 8, 0.5504, of_floor=0.7275, vram_gb=8.461),
        decoded("tide-24e-1b", 24, 0.5604, "cpu", of_floor=0.7145, vram_gb=2.221),
        decoded("tide-24e-1b", 24, 0.6004, "store", of_floor=0.6669, vram_gb=2.221),
        decoded("base-1b", 0, 2.0, batch=32, by="engine", of_floor=0.2, vram_gb=4.4),
        decoded("tide-24e-1b", 24, 2.5, batch=32, by="engine", of_floor=0.2, vram_gb=19.8),
    ],
}


def test_generation_of_one_sequence_has_models_then_others_then_the_floor():
    assert lines(speed_report.generation(DECODE)) == [
        "| base |  | 0.500 | 80 % | 2.17 |",
        "| TIDE-8E | tables, on the GPU | 0.550 | 73 % | 8.46 |",
        "| TIDE-24E | 4 bits, in the host's memory (`cpu`) | 0.560 | 71 % | 2.22 |",
        "| base, compiled and captured, static cache |  | 1.500 |  | 2.23 |",
        "| base, `generate` of transformers |  | 24.900 |  |  |",
        "| reading the base's weights once |  | 0.400 | 100 % |  |",
    ]
    assert lines(speed_report.generation_in_short(DECODE)) == [
        "| none | 0.500 | 2.17 |",
        "| 24, of 4 bits per number, in the host's memory | 0.560 | 2.22 |",
    ]


def test_generation_from_a_store_and_of_several_sequences():
    assert lines(speed_report.generation_from_store(DECODE)) == [
        "| in the cache of 64 MiB | 83 % | 0.625 |",
        "| in the store alone | 17 % | 1.122 |",
        "| all on the GPU |  | 0.581 |",
    ]
    assert lines(speed_report.generation_in_batches(DECODE)) == [
        "| base | 32 | 16,000 |",
        "| TIDE-24E | 32 | 12,800 |",
    ]


def test_weights_gradients_and_moments_are_split_over_gpus():
    """Expect 16 bytes for each resident parameter, and 12 for each of the tables."""
    found = lines(speed_report.memory_by_gpus())
    resident, tables = 1_033_930_752, 2_101_346_304
    shares = [(16 * resident + 12 * tables) / gpus / 1e9 for gpus in (1, 8, 64)]
    assert found[0] == "| `base-1b` | 16.5 | 2.1 | 0.3 |"
    assert found[1] == f"| `tide-8e-1b` | {' | '.join(f'{share:.1f}' for share in shares)} |"
    assert len(found) == 6
