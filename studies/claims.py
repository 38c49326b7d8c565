"""The paper's claims, each with the rule that confirms it."""

from typing import NamedTuple

from studies import findings
from studies.findings import Find
from studies.results import Study

CONFIRMED, NOT_CONFIRMED, UNKNOWN, NOT_RUN = "confirmed", "not confirmed", "cannot be told", "not run"


class Claim(NamedTuple):
    """A claim of the paper. `find` judges one recipe; a claim `of_base` has no recipe."""

    text: str
    paper: str
    rule: str
    find: Find
    of_base: bool = False


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
        words = [finding.ours if finding else NOT_RUN for finding in (paper, best)]
        if paper is None:
            verdict = NOT_RUN
        else:
            verdict = UNKNOWN if paper.holds is None else CONFIRMED if paper.holds else NOT_CONFIRMED
        found.append(Verdict(claim.text, claim.paper, words[0], "" if claim.of_base else words[1], verdict))
    return found


CLAIMS = (
    Claim(
        "TIDE comes to the base's final loss with half of its tokens",
        "50 %, K = 2 and 4",
        "at most 55 % with K = 2 or 4; it is then in the middle of its schedule, and the base at the end",
        findings.half_the_tokens,
    ),
    Claim(
        "TIDE comes to it with half of the tokens and a schedule for these",
        "not said",
        "a loss that is not above the base's",
        findings.half_the_tokens_alone,
    ),
    Claim(
        "loss falls with every step of K: 0, 2, 4, 8, 16, 24",
        "yes, without saturation",
        "every step, and by more than chance; cannot be told if the smallest step is within that",
        findings.monotone,
    ),
    Claim(
        "perplexity on other texts is below the base's",
        "strictly, three texts",
        "on each text, K = 8",
        findings.other_texts,
    ),
    Claim(
        "zero-shot tasks are better",
        "+1.6 points in the mean, 1B, K = 8",
        "by more than two standard errors",
        findings.zero_shot,
    ),
    Claim(
        "every decile gains",
        "0.704 to 0.068 nats",
        "each, K = 8",
        findings.every_decile,
    ),
    Claim(
        "gains fall from the rarest to the commonest decile",
        "at every step",
        "at every step, K = 8",
        findings.falling_gains,
    ),
    Claim(
        "rare tokens gain more than common ones",
        "yes",
        "with each seed, K = 8",
        findings.rare_gain_more,
    ),
    Claim(
        "rare tokens gain so many times as much, K = 8",
        "4.8x",
        "at least half of the paper's; cannot be told if that is within the deviation of the seeds",
        findings.times_with_eight,
    ),
    Claim(
        "rare tokens gain so many times as much, K = 24",
        "5.6x",
        "at least half of the paper's",
        findings.times_with_most,
    ),
    Claim(
        "each further block gives rare tokens so many times as much",
        "3.7x",
        "at least half of the paper's",
        findings.slopes,
    ),
    Claim(
        "K = 2 has so much of K = 24's gain on rare tokens",
        "55 %",
        "at least 45 %",
        findings.two_blocks,
    ),
    Claim(
        "the null bank's weight is larger on the commonest decile than on the rarest",
        "0.53 and 0.89",
        "in the last layer",
        findings.null_bank_is_larger,
    ),
    Claim(
        "the null bank's weight rises from decile to decile",
        "never falls",
        "in the last layer, falling at most at two of nine steps",
        findings.null_bank_rises,
    ),
    Claim(
        "different blocks lead on rare and on common tokens",
        "M5 on rare, M4 on mid ones",
        "in the last layer, not the same block in all deciles",
        findings.different_blocks_lead,
    ),
    Claim(
        "one block has much weight on rare tokens",
        "0.31",
        "in the last layer, at least half of the paper's on the rarest decile",
        findings.one_block_is_large,
    ),
    Claim(
        "the first layer's memory matters most",
        "layer 0",
        "perplexity rises most without it, on each text",
        findings.first_layer_is_worst,
    ),
    Claim(
        "the first layer's memory is indispensable",
        "more than +1,000 %",
        "perplexity rises tenfold, on each text",
        findings.first_layer_is_indispensable,
    ),
    Claim(
        "the middle layers' memory hardly matters",
        "below 2 %",
        "perplexity rises by less than 5 % without one that is not of the first or last two, on each text",
        findings.middle_hardly_matters,
    ),
    Claim(
        "a later layer's memory matters again",
        "layer 13 of 24",
        "after layer 1, one costs more than 1 % and twice what its neighbours cost, on each text",
        findings.later_peak,
    ),
    Claim(
        "tables are far from E, and nearer to each other",
        "0.65 to 0.99 from E",
        "all at least 0.6 from E, and nearer to each other in the mean",
        findings.tables_are_far_from_e,
    ),
    Claim(
        "rare tokens' neighbours in the tables agree less with those in E",
        "in every table",
        "smaller mean overlap in every table",
        findings.rare_neighbours_agree_less,
    ),
    Claim(
        "a token's tables get K times the gradient of the base's embedding",
        "K-fold",
        "squared norms, through the input alone: at least K / 2 times in every decile. They depend on how "
        "long a row is before its norm, and on the gain after it",
        findings.amplification,
    ),
    Claim(
        "rows of the base's E are longer for commoner tokens",
        "at every decile",
        "at every decile",
        findings.norms_rise,
        of_base=True,
    ),
    Claim(
        "rows of the base's E for rare tokens shrink as training goes on",
        "yes",
        "the rarest decile's, from checkpoint to checkpoint",
        findings.rare_norms_decline,
        of_base=True,
    ),
    Claim(
        "the base's states of tokens that contexts confuse are near each other",
        "near zero but in the last layers",
        "below 0.1 of their norms in the first half of the layers, in each category",
        findings.base_collapses,
        of_base=True,
    ),
    Claim(
        "TIDE keeps such tokens apart from the middle layers on",
        "yes",
        "farther apart than in the base, in each category",
        findings.stay_apart,
    ),
    Claim(
        "TIDE keeps them apart for the norms of their states",
        "not said",
        "the same, divided by their norms, which grow where distances do",
        findings.stay_apart_for_their_norms,
    ),
    Claim(
        "tables in 8 bits cost nothing",
        "-0.00 to +0.03 %",
        "perplexity rises by at most 0.05 % on each text",
        findings.eight_bits,
    ),
    Claim(
        "tables in 4 bits cost little",
        "+1.5 to +1.7 %",
        "perplexity rises by at most 2 % on each text",
        findings.four_bits,
    ),
    Claim(
        "30 % off the rank of each table costs almost nothing",
        "almost flat",
        "perplexity rises by at most 5 % on each text",
        findings.rank_a_little_lower,
    ),
    Claim(
        "half the rank of each table costs a tenth to a quarter",
        "about +10 to +25 % for 40 to 60 % off",
        "perplexity rises by at most 25 % on each text",
        findings.half_the_rank,
    ),
    Claim(
        "90 % off the rank of each table costs a multiple",
        "+484 to +657 %",
        "perplexity at least doubles on each text",
        findings.hardly_any_rank,
    ),
)
