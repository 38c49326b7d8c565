"""What is found of the paper's claims, from runs that are made up: each rule is met, and missed."""

import pytest
from kept_runs import TOKENS, by_frequency, keep

from studies.claims import verdicts
from studies.plan import HALF
from studies.results import Study


def found(study, text):
    (verdict,) = [verdict for verdict in verdicts(study) if text in verdict.claim]
    return verdict


def verdict_of(study, text):
    return found(study, text).verdict


def test_what_was_not_run_has_no_verdict(tmp_path):
    keep(tmp_path, "base", "paper", 0, 5.0)
    assert {verdict.verdict for verdict in verdicts(Study(tmp_path))} == {"not run"}


@pytest.mark.parametrize(("at_500", "verdict"), [(4.9, "confirmed"), (6.0, "not confirmed")])
def test_half_the_tokens(at_500, verdict, tmp_path):
    keep(tmp_path, "base", "paper", 0, 5.0)
    keep(tmp_path, "tide", "paper", 4, 4.5, curve=[(500, at_500), (TOKENS, 4.5)])
    keep(tmp_path, "tide", "paper", 8, 5.5)
    study = Study(tmp_path)
    assert verdict_of(study, "half of its tokens") == verdict
    assert found(study, "half of its tokens").with_paper.endswith("K = 8: never")


@pytest.mark.parametrize(("loss", "verdict"), [(4.9, "confirmed"), (5.1, "not confirmed")])
def test_half_the_tokens_with_a_schedule_for_them(loss, verdict, tmp_path):
    keep(tmp_path, "base", "paper", 0, 5.0)
    keep(tmp_path, "tide", f"{HALF}paper", 8, loss)
    assert verdict_of(Study(tmp_path), "a schedule for these") == verdict


def of_every_k(folder, last, seeds):
    for seed, base in enumerate(seeds):
        keep(folder, "base", "paper", 0, base, seed)
        keep(folder, "tide", "paper", 8, base - 0.4, seed, rare=8 / 24, common=8 / 240)
    for k, loss in zip((2, 4, 16, 24), (4.8, 4.7, 4.5, last), strict=True):
        keep(folder, "tide", "paper", k, loss, rare=k / 24, common=k / 240)
    return Study(folder)


@pytest.mark.parametrize(
    ("last", "seeds", "verdict"),
    [
        (4.4, (5.0, 5.02), "confirmed"),
        (4.6, (5.0, 5.02), "not confirmed"),
        (4.48, (5.0, 5.02), "cannot be told"),  # the step is smaller than what seeds may differ by
        (4.4, (5.0,), "cannot be told"),  # how much they differ is not known
    ],
)
def test_monotone_in_blocks(last, seeds, verdict, tmp_path):
    study = of_every_k(tmp_path, last, seeds)
    assert study.noise == (pytest.approx(2 * 2**0.5 * 0.02 / 2**0.5) if len(seeds) > 1 else None)
    assert verdict_of(study, "every step of K") == verdict
    assert found(study, "so many times as much, K = 24").with_paper == "10.00x"
    assert found(study, "each further block").with_paper == "10.00x"
    assert found(study, "K = 2 has").with_paper == "8 %"
    assert found(study, "K = 2 has").with_best == "not run"


@pytest.mark.parametrize(
    ("gains", "more", "times"),
    [
        ([0.1], "confirmed", "confirmed"),
        ([0.4], "confirmed", "not confirmed"),
        ([0.2, 0.22], "confirmed", "cannot be told"),  # 2.5 and 2.3, and half of the paper's is 2.4
        ([0.6], "not confirmed", "not confirmed"),
        ([-0.1], "confirmed", "cannot be told"),
    ],
)
def test_rare_against_common(gains, more, times, tmp_path):
    for seed, gain in enumerate(gains):
        keep(tmp_path, "base", "paper", 0, 5.0, seed)
        keep(tmp_path, "tide", "paper", 8, 4.5, seed, rare=0.5, common=gain)
    study = Study(tmp_path)
    assert verdict_of(study, "gain more than common") == more
    assert verdict_of(study, "so many times as much, K = 8") == times


@pytest.mark.parametrize(
    ("gains", "every", "falling"),
    [
        ([10 - number for number in range(10)], "confirmed", "confirmed"),
        ([1.0, 2.0, *[1.0] * 8], "confirmed", "not confirmed"),
        ([9 - number for number in range(10)], "not confirmed", "confirmed"),
    ],
)
def test_deciles(gains, every, falling, tmp_path):
    base, tide = keep(tmp_path, "base", "paper", 0, 5.0), keep(tmp_path, "tide", "paper", 8, 4.5)
    deciles = zip(base.record["loss_by_decile"], gains, strict=True)
    tide.record["loss_by_decile"] = [loss - gain for loss, gain in deciles]
    study = Study(tmp_path)
    study.runs = [base, tide]
    assert verdict_of(study, "every decile gains") == every
    assert verdict_of(study, "gains fall") == falling


def text(perplexity):
    return {"perplexity": perplexity, "bytes": 9, "window": 8, "stride": 4, **by_frequency(5.0, [5.0] * 10)}


@pytest.mark.parametrize(("other", "verdict"), [(19.0, "confirmed"), (21.0, "not confirmed")])
def test_other_texts(other, verdict, tmp_path):
    keep(tmp_path, "base", "paper", 0, 5.0, perplexity={"texts": {"a": text(30.0), "b": text(20.0)}})
    keep(tmp_path, "tide", "paper", 8, 4.5, perplexity={"texts": {"a": text(15.0), "b": text(other)}})
    study = Study(tmp_path)
    assert verdict_of(study, "perplexity on other texts") == verdict
    assert found(study, "perplexity on other texts").with_paper.startswith("a -50 %, b ")


@pytest.mark.parametrize(
    ("score", "verdict"), [(0.5, "confirmed"), (0.3, "not confirmed"), (0.41, "cannot be told")]
)
def test_zero_shot(score, verdict, tmp_path):
    def tasks(value):
        return {"tasks": {name: {"score": value, "stderr": 0.01} for name in ("one", "two")}}

    keep(tmp_path, "base", "paper", 0, 5.0, benchmarks=tasks(0.4))
    keep(tmp_path, "tide", "paper", 8, 4.5, benchmarks=tasks(score))
    assert verdict_of(Study(tmp_path), "zero-shot") == verdict


def of_routing(folder, *layers):
    """With a null bank of these weights by layer and decile, and all else for the first of two blocks."""
    by_layer = [[[1 - weight, 0.0, weight] for weight in layer] + [[0.5, 0, 0.5]] for layer in layers]
    keep(folder, "tide", "paper", 8, 4.5, routing={"by_layer": by_layer})
    return Study(folder)


def test_the_null_bank_rises(tmp_path):
    rising = [0.5 + number / 20 for number in range(10)]
    study = of_routing(tmp_path, rising[::-1], rising)
    assert found(study, "is larger on the commonest")[2:] == ("0.50 and 0.95", "not run", "confirmed")
    assert verdict_of(study, "rises from decile") == "confirmed"
    assert "rank correlation 1.00, above 0 in 1 of 2" in found(study, "rises from decile").with_paper
    assert found(study, "different blocks lead")[2:] == (
        "M1 on the rarest, M1 on the commonest",
        "not run",
        "not confirmed",
    )
    assert found(study, "one block has much")[2:] == ("0.50", "not run", "confirmed")


@pytest.mark.parametrize("null", [[0.9] * 10, [0.95, 0.9]])
def test_a_null_bank_that_does_not_rise(null, tmp_path):
    study = of_routing(tmp_path, null)
    assert verdict_of(study, "is larger on the commonest") == "not confirmed"
    assert verdict_of(study, "rises from decile") == "not confirmed"
    assert verdict_of(study, "one block has much") == "not confirmed"


def test_other_blocks_may_lead_on_common_tokens(tmp_path):
    rows = [[0.3, 0.1, 0.6]] * 5 + [[0.1, 0.2, 0.7]] * 5
    keep(tmp_path, "tide", "paper", 8, 4.5, routing={"by_layer": [rows]})
    assert found(Study(tmp_path), "different blocks lead")[2:] == (
        "M1 on the rarest, M2 on the commonest",
        "not run",
        "confirmed",
    )


FEW, MANY = [9.0, 0.1, 0.01, 0.01, 0.1, 0.1], [0.5, 0.1, 0.01, 0.2, 0.05, 0.6]


@pytest.mark.parametrize(
    ("texts", "worst", "indispensable", "middle", "later"),
    [
        ([FEW], "confirmed", "confirmed", "confirmed", "not confirmed"),
        ([MANY], "not confirmed", "not confirmed", "not confirmed", "confirmed"),
        ([FEW, MANY], "not confirmed", "not confirmed", "not confirmed", "not confirmed"),
    ],
)
def test_layers_without_memory(texts, worst, indispensable, middle, later, tmp_path):
    drop = {"texts": {str(number): {"change": change} for number, change in enumerate(texts)}}
    keep(tmp_path, "tide", "paper", 8, 4.5, **{"layer-drop": drop})
    study = Study(tmp_path)
    assert verdict_of(study, "memory matters most") == worst
    assert verdict_of(study, "indispensable") == indispensable
    assert verdict_of(study, "hardly matters") == middle
    assert verdict_of(study, "matters again") == later


@pytest.mark.parametrize(
    ("to_e", "among", "verdict"),
    [(0.8, 0.2, "confirmed"), (0.5, 0.2, "not confirmed"), (0.8, 0.9, "not confirmed")],
)
def test_distances(to_e, among, verdict, tmp_path):
    distance = [[0, to_e, to_e], [to_e, 0, among], [to_e, among, 0]]
    keep(tmp_path, "tide", "paper", 8, 4.5, distances={"distance": distance})
    assert verdict_of(Study(tmp_path), "far from E") == verdict


@pytest.mark.parametrize(("rare", "verdict"), [(0.1, "confirmed"), (0.4, "not confirmed")])
def test_neighbours(rare, verdict, tmp_path):
    overlaps = {"rare": {"jaccard": [[0.0, 0.2], [rare]]}, "common": {"jaccard": [[0.3], [0.3]]}}
    keep(tmp_path, "tide", "paper", 8, 4.5, neighbours=overlaps)
    assert verdict_of(Study(tmp_path), "agree less") == verdict


@pytest.mark.parametrize(("rarest", "verdict"), [(2.0, "confirmed"), (0.9, "not confirmed")])
def test_gradients_are_those_of_all_tables_over_the_bases(rarest, verdict, tmp_path):
    keep(tmp_path, "base", "paper", 0, 5.0, gradients={"embedding_input": [2.0, 2.0]})
    keep(tmp_path, "tide", "paper", 8, 4.5, gradients={"tables": [[rarest, 3.0]] * 4})
    study = Study(tmp_path)
    assert verdict_of(study, "times the gradient") == verdict
    assert found(study, "times the gradient").with_paper.endswith("6.0x on the commonest decile")


def compressed(costs):
    """A text of perplexity 10, and what forms make of it."""
    forms = [
        {"form": form, "texts": {"wiki": {"perplexity": 10 * (1 + cost)}, "web": {"perplexity": 10.0}}}
        for form, cost in costs.items()
    ]
    return {"as_trained": {"wiki": {"perplexity": 10.0}, "web": {"perplexity": 10.0}}, "forms": forms}


@pytest.mark.parametrize(
    ("text", "form", "cost", "verdict"),
    [
        ("in 8 bits", "8 bits", 0.0004, "confirmed"),
        ("in 8 bits", "8 bits", 0.0006, "not confirmed"),
        ("in 4 bits", "4 bits", 0.019, "confirmed"),
        ("in 4 bits", "4 bits", 0.021, "not confirmed"),
        ("30 % off", "16 bits, rank 0.7", 0.04, "confirmed"),
        ("half the rank", "16 bits, rank 0.5", 0.3, "not confirmed"),
        ("90 % off", "16 bits, rank 0.1", 3.0, "not confirmed"),  # on one text of two
        ("90 % off", "16 bits, rank 0.2", 3.0, "not run"),
    ],
)
def test_smaller_tables(text, form, cost, verdict, tmp_path):
    keep(tmp_path, "tide", "paper", 8, 4.5, compression=compressed({form: cost}))
    assert verdict_of(Study(tmp_path), text) == verdict


@pytest.mark.parametrize(
    ("norms", "rise", "decline"),
    [([1.0, 2.0], "confirmed", "not confirmed"), ([2.0, 1.0], "not confirmed", "confirmed")],
)
def test_norms_of_the_base(norms, rise, decline, tmp_path):
    growth = [{"embedding": [norm]} for norm in norms]
    keep(tmp_path, "base", "paper", 0, 5.0, norms={"embedding": norms, "growth": growth})
    study = Study(tmp_path)
    assert found(study, "longer for commoner").verdict == rise
    assert found(study, "shrink").verdict == decline
    assert found(study, "shrink").with_best == ""


def pairs(distance, relative):
    """Two pairs in two layers."""
    return {"categories": {"numbers": {"distance": [distance] * 2, "relative": [relative] * 2}}}


@pytest.mark.parametrize(("base", "near"), [([0.05, 0.3], "confirmed"), ([0.2, 0.3], "not confirmed")])
def test_collapse_of_the_base(base, near, tmp_path):
    keep(tmp_path, "base", "paper", 0, 5.0, collapse=pairs([1.0, 2.0], base))
    assert verdict_of(Study(tmp_path), "are near each other") == near


def test_separation_as_it_is_and_for_the_norms(tmp_path):
    keep(tmp_path, "base", "paper", 0, 5.0, collapse=pairs([9.0, 2.0], [0.9, 0.3]))
    keep(tmp_path, "tide", "paper", 8, 4.5, collapse=pairs([1.0, 4.0], [0.1, 0.2]))
    study = Study(tmp_path)
    assert found(study, "from the middle layers on")[2:] == ("numbers: 2 to 4", "not run", "confirmed")
    assert found(study, "for the norms")[2:] == ("numbers: 0.30 to 0.20", "not run", "not confirmed")
