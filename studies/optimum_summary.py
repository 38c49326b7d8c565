"""What the runs at the optimum say: tokens saved, gains, and the test split, each with its standard error.

An arm counts at each number of tokens with the schedule (rate, beta2, batch and warm-up) that is best there
with its first seed, which all schedules have, and with the mean over the seeds of that schedule: none is
chosen for having had fewer seeds than others. Standard errors of losses come from seeds.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import numpy as np

from studies.optimum import ARMS
from studies.plan import SIZES
from studies.test_reading import Piece

BASE = "base"
PAPERS_TOKENS = 200  # for each parameter
FEWEST = 3  # token counts of a fit
DRAWS = 10_000  # of the bootstrap
OF_RUN = "recipe", "size", "k", "seed", "tokens", "tokens_per_parameter", "passes", "peak_rate"
Record = Mapping[str, Any]
Schedule = tuple[float, float, int, float]


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file, one per line, by size, arm, tokens, batch, warm-up, beta2, rate and seed."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return sorted(records, key=_order)


def _order(r: Record) -> tuple[Any, ...]:
    changes = -r["batch"], -r["warmup"], beta2(r), r["peak_rate"]
    return list(SIZES).index(r["size"]), r["name"], r["tokens"], *changes, r["seed"], "test" in r


def beta2(record: Record) -> float:
    """How long the optimiser remembers squares."""
    return float(record["config"]["optim"]["beta2"])


def schedule(record: Record) -> Schedule:
    return record["peak_rate"], beta2(record), record["batch"], record["warmup"]


@dataclass(frozen=True)
class Mean:
    """The loss of an arm at some tokens for each parameter: the mean over its seeds, and its standard error.

    The error is unknown, None, while no arm has two seeds.
    """

    loss: float
    error: float | None
    schedule: Schedule
    records: tuple[Record, ...]


def by_schedule(
    records: Sequence[Record], arm: str, size: str
) -> dict[float, dict[Schedule, dict[int, Record]]]:
    """The runs of an arm by tokens, schedule and seed; of a run that was repeated, the one that read more."""
    found = defaultdict[float, dict[Schedule, dict[int, Record]]](lambda: defaultdict(dict))
    for record in sorted(records, key=lambda record: "test" in record):
        if (record["name"], record["size"]) == (arm, size):
            found[record["tokens_per_parameter"]][schedule(record)][record["seed"]] = record
    return {tokens: dict(found[tokens]) for tokens in sorted(found)}


def best(records: Sequence[Record], arm: str, size: str) -> dict[float, Mean]:
    """The loss of an arm by tokens, at its best schedule; one with a seed that was not finite is left out."""
    pooled, means = pooled_deviation(records, size), {}
    for tokens, schedules in by_schedule(records, arm, size).items():
        finite = {
            key: tuple(seeds[seed] for seed in sorted(seeds))
            for key, seeds in schedules.items()
            if all(record["val_loss"] is not None for record in seeds.values())
        }
        if finite:
            key = min(finite, key=lambda key: finite[key][0]["val_loss"])
            losses = [record["val_loss"] for record in finite[key]]
            means[tokens] = Mean(fmean(losses), _error(losses, pooled), key, finite[key])
    return means


def _error(values: Sequence[float], pooled: float | None) -> float | None:
    """The standard error of a mean: from its own values, or from the pooled deviation if there is one."""
    deviation = math.sqrt(variance(values)) if len(values) > 1 else pooled
    return None if deviation is None else deviation / math.sqrt(len(values))


def pooled_deviation(records: Sequence[Record], size: str) -> float | None:
    """The standard deviation of seeds, pooled over all runs of a size that have two seeds or more.

    A size without any takes that of all sizes, and it is None if there is none either.
    """
    groups = defaultdict[tuple[Any, ...], dict[int, float]](dict)
    for record in records:
        if record["val_loss"] is not None:
            key = record["size"], record["name"], record["tokens_per_parameter"], schedule(record)
            groups[key][record["seed"]] = record["val_loss"]
    repeated = {key: list(losses.values()) for key, losses in groups.items() if len(losses) > 1}
    of_size = [losses for key, losses in repeated.items() if key[0] == size] or list(repeated.values())
    if not of_size:
        return None
    squares = sum((len(losses) - 1) * variance(losses) for losses in of_size)
    return math.sqrt(squares / sum(len(losses) - 1 for losses in of_size))


def tokens_needed(
    means: Mapping[float, Mean], loss: float, error: float | None
) -> tuple[float, float | None]:
    """The tokens at which a line through runs, straight over log tokens, comes to a loss; and their error.

    The error is one standard error of the tokens' logarithm, from those of the loss and of both runs beside
    it. ValueError if no two neighbouring runs have the loss between them: the line is drawn no further.
    """
    for (fewer, left), (more, right) in pairwise(sorted(means.items())):
        if right.loss <= loss <= left.loss and right.loss < left.loss:
            fall, width = left.loss - right.loss, math.log(more / fewer)
            part = (left.loss - loss) / fall
            errors = error, left.error, right.error
            if any(e is None for e in errors):
                return fewer * math.exp(part * width), None
            weights = 1, 1 - part, part
            squares = sum((weight * (e or 0)) ** 2 for weight, e in zip(weights, errors, strict=True))
            return fewer * math.exp(part * width), width / fall * math.sqrt(squares)
    losses = [mean.loss for mean in means.values()]
    raise ValueError(f"{loss:.3f} is not within its runs, {losses[0]:.3f} to {losses[-1]:.3f}")


def saved(records: Sequence[Record], tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return how many times fewer tokens each arm needs for the base's losses; tell why where nothing is."""
    found = []
    for size in SIZES:
        arms = {arm: best(records, arm, size) for arm in _others(records, size)}
        if alone := [arm for arm, means in arms.items() if len(means) < 2]:
            tell(f"{size}: no tokens saved, for want of runs with other tokens: {', '.join(alone)}")
        for tokens, mean in best(records, BASE, size).items():
            for arm in (arm for arm in arms if arm not in alone):
                try:
                    needed, error = tokens_needed(arms[arm], mean.loss, mean.error)
                except ValueError as reason:
                    tell(f"{size}, base's loss at {tokens:g} tokens for each parameter, {arm}: {reason}")
                    continue
                ratio = tokens / needed
                error = None if error is None else ratio * error
                place = {"size": size, "tokens_per_parameter": tokens, "arm": arm}
                found.append({**place, "ratio": ratio, "error": error})
    return found


def _others(records: Sequence[Record], size: str) -> list[str]:
    present = {record["name"] for record in records if record["size"] == size}
    return [arm for arm in ARMS if arm in present - {BASE}]


def gains(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return each arm's gain over the base in nats by tokens, and a line through its logarithm."""
    found = []
    for size in SIZES:
        base = best(records, BASE, size)
        for arm in _others(records, size):
            points = []
            for tokens, mean in best(records, arm, size).items():
                if tokens in base:
                    error = _root_of_squares(base[tokens].error, mean.error)
                    gain = base[tokens].loss - mean.loss
                    points.append(
                        {
                            "tokens_per_parameter": tokens,
                            "gain": gain,
                            "error": error,
                            "peak_rate": mean.schedule[0],
                            "seeds": len(mean.records),
                        }
                    )
            if points:
                found.append({"size": size, "arm": arm, "points": points, "fit": fit(points)})
    return found


def _root_of_squares(*errors: float | None) -> float | None:
    known = [error for error in errors if error is not None]
    return math.hypot(*known) if len(known) == len(errors) else None


def fit(points: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Fit `gain = a * tokens_per_parameter^b` over logarithms, weighted by the gains' standard errors.

    Where points lie farther from the line than their errors explain (`misfit`, chi squared for each degree of
    freedom, is above 1), the errors of the fit are larger by its root. None with fewer than three points,
    without errors, or with a gain that is not above 0.
    """
    if len(points) < FEWEST or not all(p["error"] and p["gain"] > 0 for p in points):
        return None
    x = np.log([p["tokens_per_parameter"] for p in points])
    y = np.log([p["gain"] for p in points])
    weights = np.array([p["gain"] / p["error"] for p in points])  # 1 / error of the logarithm
    design = np.stack([np.ones_like(x), x], 1)
    covariance = np.linalg.inv((design * weights[:, None] ** 2).T @ design)
    line = covariance @ (design.T @ (weights**2 * y))
    misfit = float((weights**2 * (y - design @ line) ** 2).sum() / (len(points) - 2))
    covariance *= max(1.0, misfit)
    far = np.array([1.0, math.log(PAPERS_TOKENS)])
    a, at_papers = math.exp(line[0]), math.exp(far @ line)
    return {
        "a": a,
        "a_error": a * math.sqrt(covariance[0, 0]),
        "b": float(line[1]),
        "b_error": math.sqrt(covariance[1, 1]),
        "misfit": misfit,
        f"gain_at_{PAPERS_TOKENS}": at_papers,
        f"gain_at_{PAPERS_TOKENS}_error": at_papers * math.sqrt(far @ covariance @ far),
    }


def tested(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the test loss of each arm that read the test split, and its gain over the base.

    Losses are means over seeds, of the schedule that is best on validation text among the runs that read the
    split. The error of a gain is that of other text, not of other seeds: see `paired`.
    """
    readers, found = [record for record in records if record.get("test")], []
    for size in SIZES:
        base = {tokens: _nats(mean) for tokens, mean in best(readers, BASE, size).items()}
        for arm in [BASE, *_others(readers, size)]:
            for tokens, mean in best(readers, arm, size).items():
                pieces = [Piece(*piece) for piece in mean.records[0]["test"]]
                nats = _nats(mean)
                found.append(
                    {
                        "size": size,
                        "tokens_per_parameter": tokens,
                        "arm": arm,
                        "peak_rate": mean.schedule[0],
                        "seeds": len(mean.records),
                        "test_loss": float(nats.sum() / sum(piece.tokens for piece in pieces)),
                        "gain": None
                        if arm == BASE or tokens not in base
                        else paired(pieces, base[tokens] - nats),
                    }
                )
    return found


def _nats(mean: Mean) -> np.ndarray:
    """The nats of each piece, the mean over seeds."""
    return np.mean([[Piece(*piece).nats for piece in record["test"]] for record in mean.records], 0)


def paired(pieces: Sequence[Piece], gained: np.ndarray) -> dict[str, Any]:
    """Return a gain in nats per token on articles, on chapters of books, and on both, by paired bootstrap.

    Whole pieces are drawn with replacement, 10,000 times, the same for both models. The error is the standard
    deviation of the draws, and the interval holds 95 % of them.
    """
    is_chapter = np.array([piece.is_chapter for piece in pieces])
    tokens = np.array([piece.tokens for piece in pieces], float)
    found = {}
    for name, of in (("articles", ~is_chapter), ("chapters", is_chapter), ("both", is_chapter >= 0)):
        count = int(of.sum())
        if count < 2:
            continue
        generator = np.random.default_rng(0)
        times = generator.multinomial(count, np.full(count, 1 / count), DRAWS)  # each piece is drawn
        drawn = times @ gained[of] / (times @ tokens[of])
        low, high = np.percentile(drawn, [2.5, 97.5])
        found[name] = {
            "pieces": count,
            "gain": float(gained[of].sum() / tokens[of].sum()),
            "error": float(drawn.std(ddof=1)),
            "interval": [float(low), float(high)],
        }
    return found


def tries(records: Sequence[Record]) -> dict[str, dict[str, int]]:
    """The number of schedules that each arm was tried with, by size."""
    found: dict[str, dict[str, int]] = {}
    for size in SIZES:
        for arm in [BASE, *_others(records, size)]:
            of_arm = {schedule(r) for r in records if (r["name"], r["size"]) == (arm, size)}
            if of_arm:
                found.setdefault(size, {})[arm] = len(of_arm)
    return found


def summary(records: Sequence[Record], tell: Callable[[str], None]) -> dict[str, Any]:
    """Return all that the study says in numbers; tell what cannot be said."""
    return {
        "runs": [_run(record) for record in records],
        "tokens_saved": saved(records, tell),
        "gain": gains(records),
        "test": tested(records),
        "tries": tries(records),
    }


def _run(record: Record) -> dict[str, Any]:
    """What a summary has of a record. A model that is neither the base nor TIDE has its arm's name."""
    read = [Piece(*piece) for piece in record.get("test", [])]
    of_token = sum(piece.nats for piece in read) / sum(piece.tokens for piece in read) if read else None
    return {
        "name": record["name"],
        "model": record["model"] if record["model"] in (BASE, "tide") else record["name"],
        **{key: record[key] for key in OF_RUN},
        "batch": record["batch"],
        "warmup": record["warmup"],
        "beta2": beta2(record),
        **{key: record[key] for key in ("layer_parameters", "table_bytes", "val_loss")},
        "test_loss": of_token,
        "loss_by_decile": record["loss_by_decile"],
    }


def table(records: Sequence[Record]) -> str:
    """Write all runs as a Markdown table, with validation losses."""
    columns = "size", "arm", "tokens per parameter", "batch", "warm-up", "beta2", "peak rate", "seed"
    columns += "loss", "rarest", "commonest"
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for r in records:
        shown = "not finite | |"
        if r["val_loss"] is not None:
            losses = (r["val_loss"], r["loss_by_decile"][0], r["loss_by_decile"][-1])
            shown = " | ".join(f"{loss:.3f}" for loss in losses)
        lines.append(
            f"| {r['size']} | {r['name']} | {r['tokens_per_parameter']:g} | {r['batch']} | {r['warmup']:g} "
            f"| {beta2(r):g} | {r['peak_rate']:g} | {r['seed']} | {shown} |"
        )
    return "\n".join(lines)


def lines(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write what `saved` returns for a person."""
    return [
        f"{s['size']}, base's loss at {s['tokens_per_parameter']:g} tokens for each parameter: "
        f"the base's tokens are {s['ratio']:.2f} times those of {s['arm']}"
        + (f" (standard error {s['error']:.2f})" if s["error"] is not None else "")
        for s in found
    ]
