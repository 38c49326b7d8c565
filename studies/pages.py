"""The generated blocks of README.md and docs/*.md, by name, each with the function that makes it."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from studies import cache_report, compression_report, readme_report, report, speed_report, upcycling_report
from studies.blocks import Blocks, rewrite


def write(root: Path, results: Path) -> list[Path]:
    """Rewrite the blocks of README.md and docs/*.md, and return the pages that changed."""
    return rewrite([root / "README.md", *sorted((root / "docs").glob("*.md"))], blocks(results))


def blocks(results: Path) -> Blocks:
    """Return what makes each block, from the JSON files of a folder."""
    study, upcycled = report.read(results / "study"), upcycling_report.read(results / "upcycling")
    if not upcycled:
        raise ValueError(
            f"{results / 'upcycling'} holds no results: make them with `python -m studies upcycle`"
        )
    cache = _read(results / "study" / "cache.json")
    demo, waiting = (_read(results / "cpu" / f"{name}.json") for name in ("demo", "waiting_times"))
    train, values, decode = (
        _read(results / "h200" / f"{name}.json") for name in ("train", "values", "decode")
    )
    return {
        "decoding-in-short": partial(speed_report.decoding_in_short, decode),
        "demo": partial(readme_report.demo, demo),
        "demo-setting": partial(readme_report.demo_setting, demo),
        "demo-texts": partial(readme_report.demo_texts, demo),
        "demo-words": partial(readme_report.demo_words, demo),
        "estimate": partial(readme_report.estimated, "tide-8e-1b"),
        "generation": partial(speed_report.generation, decode),
        "generation-from-store": partial(speed_report.generation_from_store, decode),
        "generation-in-batches": partial(speed_report.generation_in_batches, decode),
        "generation-in-short": partial(speed_report.generation_in_short, decode),
        "memory-by-gpus": speed_report.memory_by_gpus,
        "rows-in-values": partial(speed_report.rows_in_values, values),
        "training": partial(speed_report.training, train),
        "training-in-short": partial(speed_report.training_in_short, train),
        "training-memory-in-short": partial(speed_report.training_memory_in_short, train),
        "study-beside-controls": partial(report.beside_controls, study),
        "study-best-by-text": partial(report.best_by_text, study),
        "study-claims": partial(report.claims, study),
        "study-claims-in-short": partial(readme_report.claims, study),
        "study-figure-gains": partial(report.own_figure, study, "gains"),
        "study-figure-tokens": partial(report.own_figure, study, "loss-by-tokens"),
        "study-gains": partial(readme_report.gains, study),
        "study-gains-by-recipe": partial(report.gains_by_recipe, study),
        "study-larger": partial(report.larger, study),
        "study-losses": partial(report.losses, study),
        "study-losses-by-k": partial(report.losses_by_k, study),
        "study-noise": partial(report.noise, study),
        "study-norm-eps": partial(report.norm_eps, study),
        "study-not-run": partial(report.not_run, study),
        "study-places-by-decile": partial(report.places_by_decile, study),
        "study-recipes": report.recipes,
        "study-recipes-tried": partial(report.recipes_tried, study),
        "study-rows": partial(report.rows_after_training, study),
        "study-rules": report.rules,
        "study-search": partial(report.search, study),
        "study-setting": partial(report.setting, study),
        "study-size": partial(report.size, study),
        "study-texts": partial(report.texts, study),
        "study-tokens": partial(report.tokens, study),
        "study-verdict-counts": partial(readme_report.verdict_counts, study),
        "study-word-neighbours": partial(report.word_neighbours, study),
        "study-zero-shot": partial(report.zero_shot, study),
        "smaller-tables": partial(compression_report.forms, study),
        "smaller-tables-in-short": partial(readme_report.smaller_tables, study),
        "cache-figure": partial(cache_report.figure, cache),
        "cache-hits": partial(cache_report.hits, cache),
        "cache-store": partial(cache_report.store, cache),
        "cache-with-default": partial(cache_report.with_default, cache),
        "upcycling-deciles": partial(upcycling_report.deciles, upcycled),
        "upcycling-figure": partial(upcycling_report.figure, upcycled),
        "upcycling-first-seed": partial(upcycling_report.first_seed, upcycled),
        "upcycling-in-short": partial(upcycling_report.in_short, upcycled),
        "upcycling-tokens": partial(upcycling_report.tokens, upcycled),
        "upcycling-ways": partial(upcycling_report.ways, upcycled),
        "waiting-times": partial(readme_report.waiting_times, waiting, demo),
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}): take it from git, or measure it again as docs/LOG.md says"
        ) from None
