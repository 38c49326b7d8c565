"""The paper's claims, and what the study says to each."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from statistics import correlation, linear_regression, mean
from typing import NamedTuple

from studies.results import BLOCKS, Kept, Study

CONFIRMED, NOT_CONFIRMED, UNKNOWN = "confirmed", "not confirmed", "cannot be told"


class Finding(NamedTuple):
    """What one recipe gives for a claim, in words, and whether that is what is claimed."""

    ours: str
    holds: bool | None


class Claim(NamedTuple):
    """`find` looks at one recipe; None where its runs are not there. `rule` says what is a confirmation."""

    text: str
    paper: str
    rule: str
    find: Callable[[Study, str], Finding | None]


class Verdict(NamedTuple):
    """A claim is about the paper's recipe, and so is its verdict."""

    claim: str
    paper: str
    with_paper: str
    with_best: str
    verdict: str


def verdicts(study: Study) -> list[Verdict]:
    found = []
    for claim in CLAIMS:
        paper, best = claim.find(study, "paper"), claim.find(study, "best")
        holds = paper.holds if paper else None
        verdict = UNKNOWN if holds is None else CONFIRMED if holds else NOT_CONFIRMED
        words = [finding.ours if finding else "not run" for finding in (paper, best)]
        found.append(Verdict(claim.text, claim.paper, *words, verdict))
    return found


def _half_the_tokens(study: Study, recipe: str) -> Finding | None:
    shares = []
    for base, run in study.beside_base("tide", recipe, k=8):
        needed = run.tokens_to(base.record["val_loss"])
        shares.append(None if needed is None else needed / base.record["tokens"])
    if not shares:
        return None
    if None in shares:
        return Finding("never", False)
    share = mean(share for share in shares if share is not None)
    return Finding(f"{100 * share:.0f} % of them with K = 8", share <= 0.55)


def _by_blocks(study: Study, recipe: str) -> dict[int, Kept] | None:
    """Runs of every K, or nothing."""
    found = study.by_blocks(recipe)
    return found if len(found) == len(BLOCKS) else None


def _monotone(study: Study, recipe: str) -> Finding | None:
    if (runs := _by_blocks(study, recipe)) is None:
        return None
    losses = [runs[k].record["val_loss"] for k in BLOCKS]
    said = ", ".join(f"{loss:.3f}" for loss in losses)
    smallest, noise = min(earlier - later for earlier, later in pairwise(losses)), study.noise(recipe)
    return Finding(said, None if noise is None or abs(smallest) <= noise else smallest > 0)


def _group(run: Kept, group: str) -> float:
    return run.result("validation")[group]["loss"]


def _two_blocks(study: Study, recipe: str) -> Finding | None:
    if (runs := _by_blocks(study, recipe)) is None:
        return None
    none, two, most = (_group(runs[k], "rare") for k in (0, 2, 24))
    if most >= none:
        return Finding(f"K = 24 gains {none - most:.3f} nats", False)
    share = (none - two) / (none - most)
    return Finding(f"{100 * share:.0f} %", share >= 0.45)


def _ratio(rare: float, common: float, paper: float) -> Finding:
    """Of gains, which are positive; near what the paper has, or larger."""
    if common <= 0:
        return Finding(f"rare {rare:+.3f}, common {common:+.3f} nats", rare > 0)
    return Finding(f"{rare / common:.1f}x ({rare:.3f} against {common:.3f} nats)", rare / common >= paper / 2)


def _gain_of_eight(study: Study, recipe: str) -> Finding | None:
    pairs = study.beside_base("tide", recipe, k=8)
    if not pairs:
        return None

    def gain(group: str) -> float:
        return mean(_group(base, group) - _group(run, group) for base, run in pairs)

    return _ratio(gain("rare"), gain("common"), 4.8)


def _gain_of_most(study: Study, recipe: str) -> Finding | None:
    if (runs := _by_blocks(study, recipe)) is None:
        return None
    rare, common = (_group(runs[0], group) - _group(runs[24], group) for group in ("rare", "common"))
    return _ratio(rare, common, 5.6)


def _slopes(study: Study, recipe: str) -> Finding | None:
    if (runs := _by_blocks(study, recipe)) is None:
        return None

    def slope(group: str) -> float:
        return linear_regression(BLOCKS, [_group(runs[k], group) for k in BLOCKS]).slope

    rare, common = -slope("rare"), -slope("common")
    if common <= 0:
        return Finding(f"rare {rare:.2e}, common {common:.2e} nats a block", rare > 0)
    return Finding(f"{rare / common:.1f}x", rare / common >= 3.7 / 2)


def _looked(study: Study, recipe: str, what: str) -> dict | None:
    for run in study.of("tide", recipe, k=8):
        if (run.path / "results" / f"{what}.json").exists():
            return run.result(what)
    return None


def _null_bank(study: Study, recipe: str) -> Finding | None:
    if (found := _looked(study, recipe, "routing")) is None:
        return None
    by_layer = [[row[-1] for row in layer[:10] if row is not None] for layer in found["by_layer"]]
    if len(by_layer[-1]) < 2:
        return None
    null, rising = by_layer[-1], [_rank_correlation(weights) for weights in by_layer]
    said = (
        f"{null[0]:.2f} on the rarest, {null[-1]:.2f} on the commonest decile (rank correlation "
        f"{rising[-1]:.2f}; above 0 in {sum(r > 0 for r in rising)} of {len(rising)} layers)"
    )
    return Finding(said, null[-1] > null[0] and sum(b < a for a, b in pairwise(null)) <= 2)


def _rank_correlation(values: Sequence[float]) -> float:
    """Of values with their places; 0 where all are equal."""
    if len(set(values)) == 1:
        return 0.0
    ordered = sorted(values)
    ranks = [ordered.index(value) + ordered.count(value) / 2 for value in values]
    return correlation(ranks, range(len(values)))


def _specialised(study: Study, recipe: str) -> Finding | None:
    """Blocks are specialised if the likeliest block of the last layer is not the same for all deciles."""
    if (found := _looked(study, recipe, "routing")) is None:
        return None
    rows = [row[:-1] for row in found["by_layer"][-1][:10] if row is not None]
    favourites = {max(range(len(row)), key=row.__getitem__) for row in rows}
    largest = max(max(row) / max(sum(row), 1e-9) for row in rows)
    even = 1 / len(rows[0])
    said = f"{len(favourites)} blocks lead in some decile; the largest share of one is {largest:.2f}"
    return Finding(said, len(favourites) > 1 and largest > 2 * even)


def _layer_drop(study: Study, recipe: str) -> Finding | None:
    if (found := _looked(study, recipe, "layer-drop")) is None:
        return None
    changes = [text["change"] for text in found["texts"].values()]
    by_layer = [mean(values) for values in zip(*changes, strict=True)]
    worst = max(range(len(by_layer)), key=by_layer.__getitem__)
    middle = by_layer[2:-2] or by_layer[1:]
    said = (
        f"perplexity {100 * by_layer[0]:+.0f} % without layer 0 (the worst is layer {worst}), "
        f"{100 * min(middle):+.1f} to {100 * max(middle):+.1f} % in the middle"
    )
    return Finding(said, worst == 0 and by_layer[0] >= 9 and max(middle) < 0.05)


def _distances(study: Study, recipe: str) -> Finding | None:
    if (found := _looked(study, recipe, "distances")) is None:
        return None
    to_e = found["distance"][0][1:]
    among = [
        found["distance"][i][j]
        for i in range(1, len(found["distance"]))
        for j in range(1, len(found["distance"]))
        if i < j
    ]
    said = f"{min(to_e):.2f} to {max(to_e):.2f} from E, {min(among):.2f} to {max(among):.2f} among each other"
    return Finding(said, min(to_e) >= 0.6 and mean(among) < mean(to_e))


def _amplification(study: Study, recipe: str) -> Finding | None:
    if (found := _looked(study, recipe, "gradients")) is None:
        return None
    values: Iterable[float] = [value for value in found["amplification"] if value is not None]
    rare, common = found["amplification"][0], found["amplification"][-1]
    return Finding(f"{rare:.1f}x on the rarest, {common:.1f}x on the commonest decile", min(values) >= 4)


def _separation(study: Study, recipe: str) -> Finding | None:
    base = study.first("base", "paper")
    tide = _looked(study, recipe, "collapse")
    if base is None or tide is None or not (base.path / "results" / "collapse.json").exists():
        return None

    def middle(found: dict) -> list[float]:
        """The relative distance of pairs, from the middle layer on, for each category."""
        means = []
        for category in found["categories"].values():
            layers: Sequence[Sequence[float]] = list(zip(*category["relative"], strict=True))
            means.append(mean(mean(layer) for layer in layers[len(layers) // 2 :]))
        return means

    before, after = middle(base.result("collapse")), middle(tide)
    names = list(tide["categories"])
    said = ", ".join(f"{n}: {b:.2f} to {a:.2f}" for n, b, a in zip(names, before, after, strict=True))
    return Finding(said, all(a > b for a, b in zip(after, before, strict=True)))


CLAIMS = (
    Claim(
        "TIDE comes to the base's final loss with half of its tokens",
        "50 %, K = 2 to 4",
        "at most 55 %",
        _half_the_tokens,
    ),
    Claim(
        "loss falls with every step of K: 0, 2, 4, 8, 16, 24",
        "yes, without saturation",
        "every step, by more than seeds differ; cannot be told if the smallest step is within that",
        _monotone,
    ),
    Claim("K = 2 has most of the gain that K = 24 has on rare tokens", "55 %", "at least 45 %", _two_blocks),
    Claim(
        "rare tokens gain more than common ones, K = 8",
        "4.8x",
        "at least half of the paper's",
        _gain_of_eight,
    ),
    Claim(
        "rare tokens gain more than common ones, K = 24",
        "5.6x",
        "at least half of the paper's",
        _gain_of_most,
    ),
    Claim("each further block gives rare tokens more", "slope 3.7x", "at least half of the paper's", _slopes),
    Claim(
        "the null bank's weight rises with frequency",
        "0.53 to 0.89",
        "in the last layer, from the rarest to the commonest decile, falling at most at two of nine steps",
        _null_bank,
    ),
    Claim(
        "blocks specialise in frequencies",
        "one block has 0.31 on rare tokens",
        "not the same block leads in all deciles, and one has twice its even share",
        _specialised,
    ),
    Claim(
        "the first layer's memory is indispensable, the middle's is not",
        "+1,000 %; below 2 %",
        "perplexity rises most, and tenfold, without layer 0, and by less than 5 % without a middle one",
        _layer_drop,
    ),
    Claim(
        "tables are far from E, and nearer to each other",
        "0.65 to 0.99 from E",
        "all at least 0.6 from E, and nearer to each other in the mean",
        _distances,
    ),
    Claim(
        "a token's tables get K times its embedding's gradient",
        "K-fold",
        "at least K / 2 in every decile",
        _amplification,
    ),
    Claim(
        "tokens that contexts confuse stay apart from the middle layers on",
        "yes",
        "farther apart than in the base, relative to their norms, in each category",
        _separation,
    ),
)
