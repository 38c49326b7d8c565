"""What the paper states, with its places; numbers that it only draws are not here.

A statement says what it is about, what the paper has, and where.
"""

from typing import NamedTuple

from tide_lm.evaluation import tasks

TASKS = {name: task.title for name, task in tasks.TASKS.items()}  # Table 2's columns, by lm-eval's names


class Benchmarks(NamedTuple):
    """A row of Table 2: LAMBADA's perplexity, scores in percent in the order of TASKS, their average."""

    model: str
    perplexity: float
    scores: tuple[float, ...]
    average: float


TABLE_2 = (
    Benchmarks("LLaMA-Base 750M", 5.63, (34.6, 60.4, 63.5, 60.9, 62.8, 36.8, 73.8, 85.1), 59.7),
    Benchmarks("TIDE-8E-750M", 5.18, (36.0, 61.4, 63.0, 62.6, 64.9, 37.2, 74.8, 85.8), 60.7),
    Benchmarks("LLaMA-Base 1B", 5.19, (37.5, 64.4, 61.7, 63.9, 64.6, 37.6, 74.9, 86.9), 61.4),
    Benchmarks("TIDE-2E-1B", 4.97, (37.6, 65.7, 68.7, 64.9, 65.1, 36.4, 75.5, 87.1), 62.6),
    Benchmarks("TIDE-8E-1B", 4.89, (37.5, 64.5, 69.3, 65.3, 64.7, 40.8, 75.5, 86.6), 63.0),
    Benchmarks("TIDE-16E-1B", 4.78, (38.7, 65.5, 69.7, 65.3, 65.7, 37.8, 75.9, 87.9), 63.3),
    Benchmarks("TIDE-24E-1B", 4.60, (38.9, 66.3, 69.5, 66.3, 66.4, 37.2, 77.3, 87.2), 63.7),
    Benchmarks("LLaMA-Base 3B", 4.00, (41.2, 74.8, 69.0, 71.9, 69.4, 40.2, 78.1, 93.3), 67.2),
    Benchmarks("TIDE-8E-3B", 3.86, (44.3, 75.5, 72.3, 72.2, 70.2, 40.6, 78.3, 93.2), 68.3),
)

# Table 5: TIDE-8E-1B with tables of 16 bits.
PERPLEXITIES = {"WikiText-2": 10.088, "PubMed": 11.100, "DCLM": 16.108}

# Section 3.3.2, TIDE-8E-1B against LLaMA-Base-1B at 200B tokens: nats gained, and share of the base's loss.
GAINS = {0: ("rarest", 0.704, 0.090), 9: ("commonest", 0.068, 0.024)}  # by decile
GAIN_RATIO = 4.8

# Section 4.1 on Figure 7, 1B models: rare loss at K = 0 and 24, and what common tokens gain.
RARE_LOSS, COMMON_CHANGE = (6.671, 6.250), -0.075

# By row of results/updates.json. Table 1 assumes 200B tokens, in batches of 8 sequences of 2,048.
_UPDATES = {
    "0": ("hapax (rarest)", "1,660 (f = 8.3e-9)"),
    "1": ("near-hapax", "6,640 (f = 3.3e-8)"),
    "2": ("uncommon", "16,600 (f = 8.3e-8)"),
    "mid": ("mid", "1e5 to 1e6 (f = about 1e-6)"),
    "common": ("common (highest)", "1.66e9, which is occurrences: 1.22e7 by its formula (f = 8.3e-3)"),
}
UPDATES = {row: (f"expected updates, {name}", stated, "Table 1") for row, (name, stated) in _UPDATES.items()}
NORMS = (
    ("mean norm rises from decile to decile", "at every step, for the base model", "Figure 1a"),
    ("standard deviation of norms, rare and common", "wide and narrow; no number", "Figure 1b"),
    ("change of the mean norm, decile 0 and 9, over checkpoints", "falls and rises; no number", "Figure 1c"),
)
_AMPLIFICATION = "K, if each table's gradient is as large as E's", "Proposition 3.2"
AMPLIFICATION = {
    decile: (f"gradient of all tables over that of E's input, decile {decile}", *_AMPLIFICATION)
    for decile in (0, 9)
}
FOOTPRINT = (
    ("VRAM without memory, 8 bits", "1.03 GB at 1B", "section 3.2, Figure 4"),
    ("tables on SSD at K = 24, 4 bits", "3.152 GB at 1B", "section 3.2, Figure 4"),
)
DISTANCES = (
    ("mean cosine distance of the tables to E", "0.65 to 0.99 (TIDE-8E-1B)", "section 4.2, Figure 9"),
    ("mean cosine distance between tables", "smaller than to E; no number", "section 4.2"),
)
COLLAPSE = (  # layers, and the distance of pairs there
    ("first", 0, "distances near zero; no number"),
    ("last", -1, "farther apart, numbers least; no number"),
)
LARGEST_BLOCK = 0.31
_FIGURE_10 = "section 4.2, Figure 10"
ROUTING = (  # in the last layer
    ("null bank, last layer, rarest to commonest decile", "0.530 to 0.889", _FIGURE_10),
    ("its weight does not fall from decile to decile", "at all 9 steps", _FIGURE_10),
    ("largest weight of a block on the rarest decile", f"about {LARGEST_BLOCK} (M5 of 8)", _FIGURE_10),
)
_LAYER_DROP = (
    ("layer 0", range(1), "more than 1,000 % on every text, 1.09e6 % on PubMed"),
    ("layer 1", range(1, 2), "+8.1 % to +12.9 %"),
    ("one of layers 4 to 12", range(4, 13), "less than about 2 % each"),
    ("layer 13", range(13, 14), "a second peak; no number"),
)
LAYER_DROP = {  # K = 24
    layers: (f"perplexity without {name}", stated, "appendix H, Figure 11")
    for name, layers, stated in _LAYER_DROP
}
_TABLE_5, _FIGURE_12 = "appendix J, Table 5", "appendix J, Figure 12"
BITS = {  # by form of the tables, TIDE-8E-1B
    "8 bits": ("perplexity in 8 bits", "+0.01 % on WikiText-2, 0.00 % on PubMed, +0.03 % on DCLM", _TABLE_5),
    "4 bits": ("perplexity in 4 bits", "+1.72 % on WikiText-2, +1.59 % on PubMed, +1.46 % on DCLM", _TABLE_5),
}
RANKS = {
    "16 bits, rank 0.7": ("perplexity with 30 % off the rank", "almost flat; no number", _FIGURE_12),
    "16 bits, rank 0.5": (
        "perplexity with half the rank",
        "about +10 % to +25 % at 40 to 60 % off",
        _FIGURE_12,
    ),
    "16 bits, rank 0.1": (
        "perplexity with 90 % off the rank",
        "up to +587 % on WikiText-2, +657 % on PubMed, +484 % on DCLM beyond 70 % off",
        _FIGURE_12,
    ),
}
NEIGHBOURS = (
    "median overlap is lower for rare tokens than for common ones",
    "in every table; no number",
    "Figure 13",
)
WORDS = {
    word: (f"overlap of the tables with E for “{word}”", f"{span} (TIDE-8E-1B)", "Table 6")
    for word, span in {"asynchronously": "0.11 to 0.43", "fred": "0.11 to 0.18"}.items()
}
TRAINING_LOSS = "last training loss, nats", "drawn; no number", "Figure 14"

# What belongs to the paper and is not measured by an analysis of this version.
ELSEWHERE = (
    ("Figure 3", "the architecture", "docs/architecture.svg draws it; there is nothing to measure"),
    ("Table 4", "decoding time in ms a token", "11.085 at K = 0 to 13.422 at K = 24 in the paper"),
)
