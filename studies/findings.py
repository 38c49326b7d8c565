"""The findings: what the runs of one recipe say to a claim of the paper, and whether it holds.

A finding is None if its runs are not there.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from statistics import correlation, linear_regression, mean
from typing import Any, NamedTuple

from studies.plan import HALF
from studies.results import BLOCKS, Kept, Spread, Study
from tide_lm.report import paper
from tide_lm.report.figures.compression import changes


class Finding(NamedTuple):
    """`holds` is None if it cannot be told."""

    ours: str
    holds: bool | None


Find = Callable[[Study, str], Finding | None]


def half_the_tokens(study: Study, recipe: str) -> Finding | None:
    shares: dict[int, float] = {}
    for k in (2, 4, 8):
        if pairs := study.beside_base("tide", recipe, k=k):
            needed = [(run.tokens_to(base.record["val_loss"]), base.record["tokens"]) for base, run in pairs]
            shares[k] = mean(float("inf") if few is None else few / tokens for few, tokens in needed)
    of_few_blocks = [share for k, share in shares.items() if k < 8]
    if not of_few_blocks:
        return None
    said = (f"K = {k}: {f'{100 * share:.0f} %' if share <= 1 else 'never'}" for k, share in shares.items())
    return Finding(", ".join(said), min(of_few_blocks) <= 0.55)


def half_the_tokens_alone(study: Study, recipe: str) -> Finding | None:
    more = {
        k: Spread.of([run.record["val_loss"] - base.record["val_loss"] for base, run in pairs])
        for k in (4, 8)
        if (pairs := study.beside_base("tide", HALF + recipe, k=k))
    }
    if not more:
        return None
    said = ", ".join(f"K = {k}: {spread.mean:+.3f} nats" for k, spread in more.items())
    return Finding(said, min(spread.mean for spread in more.values()) <= 0)


def _by_blocks(study: Study, recipe: str) -> dict[int, Kept] | None:
    """Return the runs of every K, or None."""
    found = study.by_blocks(recipe)
    return found if len(found) == len(BLOCKS) else None


def monotone(study: Study, recipe: str) -> Finding | None:
    if (runs := _by_blocks(study, recipe)) is None:
        return None
    losses = [runs[k].record["val_loss"] for k in BLOCKS]
    said = ", ".join(f"{loss:.3f}" for loss in losses)
    smallest, noise = min(earlier - later for earlier, later in pairwise(losses)), study.noise
    return Finding(said, None if noise is None or abs(smallest) <= noise else smallest > 0)


def other_texts(study: Study, recipe: str) -> Finding | None:
    pairs = [(base.texts, run.texts) for base, run in study.beside_base("tide", recipe, k=8)]
    if not pairs or not all(pairs[0]):
        return None
    changes = {
        name: mean(after[name]["perplexity"] / before[name]["perplexity"] - 1 for before, after in pairs)
        for name in pairs[0][0]
    }
    said = ", ".join(f"{name} {100 * change:+.0f} %" for name, change in changes.items())
    return Finding(said, max(changes.values()) < 0)


def zero_shot(study: Study, recipe: str) -> Finding | None:
    for base, run in study.beside_base("tide", recipe, k=8):
        if base.tasks and base.tasks.keys() == run.tasks.keys():
            before, after = base.tasks.values(), run.tasks.values()
            change = mean(task["score"] for task in after) - mean(task["score"] for task in before)
            error = sum(task["stderr"] ** 2 for task in (*before, *after)) ** 0.5 / len(before)
            said = f"{100 * change:+.1f} ± {100 * error:.1f} points in the mean of {len(before)} tasks"
            return Finding(said, None if abs(change) <= 2 * error else change > 0)
    return None


def _group(run: Kept, group: str) -> float:
    return run.results["validation"][group]["loss"]


def two_blocks(study: Study, recipe: str) -> Finding | None:
    if (runs := _by_blocks(study, recipe)) is None:
        return None
    none, two, most = (_group(runs[k], "rare") for k in (0, 2, 24))
    if most >= none:
        return Finding(f"K = 24 gains {none - most:.3f} nats", False)
    share = (none - two) / (none - most)
    return Finding(f"{100 * share:.0f} %", share >= 0.45)


def _gains_by_decile(study: Study, recipe: str) -> list[float] | None:
    pairs = study.beside_base("tide", recipe, k=8)
    return [mean(base.decile(i) - run.decile(i) for base, run in pairs) for i in range(10)] if pairs else None


def every_decile(study: Study, recipe: str) -> Finding | None:
    if (gains := _gains_by_decile(study, recipe)) is None:
        return None
    return Finding(f"{min(gains):.3f} to {max(gains):.3f} nats", min(gains) > 0)


def falling_gains(study: Study, recipe: str) -> Finding | None:
    if (gains := _gains_by_decile(study, recipe)) is None:
        return None
    falls = sum(later < earlier for earlier, later in pairwise(gains))
    said = f"{gains[0]:.3f} to {gains[-1]:.3f} nats, falling at {falls} of {len(gains) - 1} steps"
    return Finding(said, falls == len(gains) - 1)


def _rare_and_common(pairs: Iterable[tuple[Kept, Kept]]) -> list[tuple[float, float]]:
    """Return what rare and common tokens gain, for each pair of a base and a run."""
    return [
        (_group(base, "rare") - _group(run, "rare"), _group(base, "common") - _group(run, "common"))
        for base, run in pairs
    ]


def rare_gain_more(study: Study, recipe: str) -> Finding | None:
    gains = _rare_and_common(study.beside_base("tide", recipe, k=8))
    if not gains:
        return None
    rare, common = (Spread.of(each) for each in zip(*gains, strict=True))
    return Finding(f"{rare} against {common} nats", all(rare > common for rare, common in gains))


def _times(gains: Sequence[tuple[float, float]], theirs: float) -> Finding | None:
    """Return how many times as much rare tokens gain, beside the paper's number."""
    if not gains:
        return None
    if min(common for _, common in gains) <= 0:
        return Finding("common tokens gain nothing", None)
    times = Spread.of([rare / common for rare, common in gains])
    near = abs(times.mean - theirs / 2) <= (times.deviation or 0)
    return Finding(f"{times:.2f}x", None if near else times.mean >= theirs / 2)


def times_with_eight(study: Study, recipe: str) -> Finding | None:
    return _times(_rare_and_common(study.beside_base("tide", recipe, k=8)), 4.8)


def times_with_most(study: Study, recipe: str) -> Finding | None:
    return _times(_rare_and_common(study.beside_base("tide", recipe, k=24)), 5.6)


def slopes(study: Study, recipe: str) -> Finding | None:
    if (runs := _by_blocks(study, recipe)) is None:
        return None

    def gain(group: str) -> float:
        return -linear_regression(BLOCKS, [_group(runs[k], group) for k in BLOCKS]).slope

    return _times([(gain("rare"), gain("common"))], 3.7)


def _diagnostic(study: Study, model: str, recipe: str, what: str) -> dict[str, Any] | None:
    for run in study.of(model, recipe, k=8 if model == "tide" else 0):
        if what in run.results:
            return run.results[what]
    return None


def _null_bank(study: Study, recipe: str) -> list[list[float]] | None:
    """Return the null bank's weight by layer and decile."""
    if (found := _diagnostic(study, "tide", recipe, "routing")) is None:
        return None
    by_layer = [[row[-1] for row in layer[:10] if row is not None] for layer in found["by_layer"]]
    return by_layer if len(by_layer[-1]) > 1 else None


def null_bank_is_larger(study: Study, recipe: str) -> Finding | None:
    if (by_layer := _null_bank(study, recipe)) is None:
        return None
    rare, common = by_layer[-1][0], by_layer[-1][-1]
    return Finding(f"{rare:.2f} and {common:.2f}", common > rare)


def null_bank_rises(study: Study, recipe: str) -> Finding | None:
    if (by_layer := _null_bank(study, recipe)) is None:
        return None
    falls = sum(later < earlier for earlier, later in pairwise(by_layer[-1]))
    ranks = [_rank_correlation(weights) for weights in by_layer]
    said = (
        f"falls at {falls} of {len(by_layer[-1]) - 1} steps; rank correlation {ranks[-1]:.2f}, above 0 in "
        f"{sum(rank > 0 for rank in ranks)} of {len(ranks)} layers"
    )
    return Finding(said, by_layer[-1][-1] > by_layer[-1][0] and falls <= 2)


def _rank_correlation(values: Sequence[float]) -> float:
    """Return the rank correlation of values with their places; 0 where all are equal."""
    if len(set(values)) == 1:
        return 0.0
    ordered = sorted(values)
    ranks = [ordered.index(value) + ordered.count(value) / 2 for value in values]
    return correlation(ranks, range(len(values)))


def _blocks_of_last_layer(study: Study, recipe: str) -> list[list[float]] | None:
    """Return the weights of the blocks by decile."""
    if (found := _diagnostic(study, "tide", recipe, "routing")) is None:
        return None
    return [row[:-1] for row in found["by_layer"][-1][:10] if row is not None]


def different_blocks_lead(study: Study, recipe: str) -> Finding | None:
    if (rows := _blocks_of_last_layer(study, recipe)) is None:
        return None
    leading = [f"M{1 + max(range(len(row)), key=row.__getitem__)}" for row in rows]
    return Finding(f"{leading[0]} on the rarest, {leading[-1]} on the commonest", len(set(leading)) > 1)


def one_block_is_large(study: Study, recipe: str) -> Finding | None:
    if (rows := _blocks_of_last_layer(study, recipe)) is None:
        return None
    return Finding(f"{max(rows[0]):.2f}", max(rows[0]) >= paper.LARGEST_BLOCK / 2)


def _layer_drop(study: Study, recipe: str) -> list[list[float]] | None:
    """Return how much the perplexity changes, by text and layer."""
    if (found := _diagnostic(study, "tide", recipe, "layer-drop")) is None:
        return None
    return [text["change"] for text in found["texts"].values()]


def _percent(values: Sequence[float], digits: int = 1) -> str:
    return f"{100 * min(values):+.{digits}f} to {100 * max(values):+.{digits}f} %"


def first_layer_is_worst(study: Study, recipe: str) -> Finding | None:
    if (texts := _layer_drop(study, recipe)) is None:
        return None
    worst = {max(range(len(changes)), key=changes.__getitem__) for changes in texts}
    return Finding(f"layer {', '.join(map(str, sorted(worst)))}", worst == {0})


def first_layer_is_indispensable(study: Study, recipe: str) -> Finding | None:
    if (texts := _layer_drop(study, recipe)) is None:
        return None
    first = [changes[0] for changes in texts]
    return Finding(_percent(first), min(first) >= 9)


def middle_hardly_matters(study: Study, recipe: str) -> Finding | None:
    if (texts := _layer_drop(study, recipe)) is None:
        return None
    middle = [change for changes in texts for change in changes[2:-2]]
    return Finding(_percent(middle), max(middle) < 0.05) if middle else None


def later_peak(study: Study, recipe: str) -> Finding | None:
    if (texts := _layer_drop(study, recipe)) is None:
        return None

    def is_peak(layer: int) -> bool:
        around = [(c[layer], max(c[layer - 1], c[layer + 1])) for c in texts]
        return all(here > 0.01 and here > 2 * beside for here, beside in around)

    peaks = [layer for layer in range(2, len(texts[0]) - 1) if is_peak(layer)]
    return Finding(f"at layer {', '.join(map(str, peaks))}" if peaks else "none", bool(peaks))


def tables_are_far_from_e(study: Study, recipe: str) -> Finding | None:
    if (found := _diagnostic(study, "tide", recipe, "distances")) is None:
        return None
    distance = found["distance"]
    to_e = distance[0][1:]
    among = [distance[i][j] for i in range(1, len(distance)) for j in range(i + 1, len(distance))]
    said = f"{min(to_e):.2f} to {max(to_e):.2f} from E, {min(among):.2f} to {max(among):.2f} among each other"
    return Finding(said, min(to_e) >= 0.6 and mean(among) < mean(to_e))


def rare_neighbours_agree_less(study: Study, recipe: str) -> Finding | None:
    if (found := _diagnostic(study, "tide", recipe, "neighbours")) is None:
        return None
    rare, common = ([mean(table) for table in found[group]["jaccard"]] for group in ("rare", "common"))
    said = f"overlaps of {mean(rare):.3f} and {mean(common):.3f} in the mean"
    return Finding(said, all(r < c for r, c in zip(rare, common, strict=True)))


def amplification(study: Study, recipe: str) -> Finding | None:
    base = _diagnostic(study, "base", "paper", "gradients")
    tide = _diagnostic(study, "tide", recipe, "gradients")
    if base is None or tide is None:
        return None
    tables = [sum(decile) for decile in zip(*tide["tables"], strict=True)]
    times = [all_tables / e for all_tables, e in zip(tables, base["embedding_input"], strict=True)]
    said = f"{times[0]:.1f}x on the rarest, {times[-1]:.1f}x on the commonest decile"
    return Finding(said, min(times) >= len(tide["tables"]) / 2)


def _cost(study: Study, recipe: str, form: str) -> list[float] | None:
    """Return, by text, how much higher the perplexity is with the tables in a form; it may be infinite."""
    if (found := _diagnostic(study, "tide", recipe, "compression")) is None:
        return None
    for record in found["forms"]:
        if record["form"] == form:
            return [math.inf if more is None else more for more in changes(found, record).values()]
    return None


def _costs_at_most(form: str, most: float) -> Find:
    def find(study: Study, recipe: str) -> Finding | None:
        cost = _cost(study, recipe, form)
        return None if cost is None else Finding(_percent(cost, 2), max(cost) <= most)

    return find


eight_bits = _costs_at_most("8 bits", 0.0005)
four_bits = _costs_at_most("4 bits", 0.02)
rank_a_little_lower = _costs_at_most("16 bits, rank 0.7", 0.05)
half_the_rank = _costs_at_most("16 bits, rank 0.5", 0.25)


def hardly_any_rank(study: Study, recipe: str) -> Finding | None:
    cost = _cost(study, recipe, "16 bits, rank 0.1")
    return None if cost is None else Finding(_percent(cost), min(cost) >= 1)


def norms_rise(study: Study, recipe: str) -> Finding | None:
    if (found := _diagnostic(study, "base", "paper", "norms")) is None:
        return None
    norms = found["embedding"]
    return Finding(f"{norms[0]:.2f} to {norms[-1]:.2f}", all(b > a for a, b in pairwise(norms)))


def rare_norms_decline(study: Study, recipe: str) -> Finding | None:
    if (found := _diagnostic(study, "base", "paper", "norms")) is None:
        return None
    rarest = [point["embedding"][0] for point in found["growth"]]
    if len(rarest) < 2:
        return None
    said = f"{rarest[0]:.2f} at the first checkpoint, {rarest[-1]:.2f} at the last"
    return Finding(said, all(b < a for a, b in pairwise(rarest)))


def _separation(found: dict[str, Any], measure: str) -> dict[str, list[float]]:
    """Return the mean distance of pairs, by category and layer."""
    categories = found["categories"].items()
    return {
        name: [mean(layer) for layer in zip(*category[measure], strict=True)] for name, category in categories
    }


def base_collapses(study: Study, recipe: str) -> Finding | None:
    if (found := _diagnostic(study, "base", "paper", "collapse")) is None:
        return None
    layers = _separation(found, "relative")
    early = {name: max(distances[: len(distances) // 2]) for name, distances in layers.items()}
    said = ", ".join(f"{name}: up to {distance:.2f}" for name, distance in early.items())
    return Finding(said, max(early.values()) < 0.1)


def _stay_apart(study: Study, recipe: str, measure: str, digits: int) -> Finding | None:
    base = _diagnostic(study, "base", "paper", "collapse")
    tide = _diagnostic(study, "tide", recipe, "collapse")
    if base is None or tide is None:
        return None
    before, after = _separation(base, measure), _separation(tide, measure)
    said, holds = [], True
    for name, distances in after.items():
        half = len(distances) // 2
        b, a = mean(before[name][half:]), mean(distances[half:])
        said.append(f"{name}: {b:.{digits}f} to {a:.{digits}f}")
        holds = holds and a > b
    return Finding(", ".join(said), holds)


def stay_apart(study: Study, recipe: str) -> Finding | None:
    return _stay_apart(study, recipe, "distance", 0)


def stay_apart_for_their_norms(study: Study, recipe: str) -> Finding | None:
    return _stay_apart(study, recipe, "relative", 2)
