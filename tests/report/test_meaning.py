"""What a result means is said by its numbers, not by the paper's."""

import re

import pytest

from tide_lm.report.meaning import best_form, sentence


def routing(rare: float, common: float) -> dict:
    null = [1 - rare] * 3 + [0.5] * 4 + [1 - common] * 3
    layer = [[1 - share, share] for share in null] + [None]
    return {"tokens": [10] * 10 + [0], "by_layer": [layer, layer]}


def dropped(change: list[float], without_any: float) -> dict:
    return {"texts": {"wiki": {"full": 10.0, "change": change, "without_any": without_any}}}


def updates(rare: float, common: float) -> dict:
    rows = {"rare": {"expected_updates": rare}, "common": {"expected_updates": common}}
    return {"tokens": 2e9, "rows": rows}


def collapsed(last: list[int]) -> dict:
    return {
        "categories": {
            "a": {"pairs": [["x", "y"]] * 3, "collapse_set": [[0, 1, 2], last]},
            "b": {"pairs": []},
        }
    }


def neighbours(share: float) -> dict:
    return {name: {"jaccard": [[share, share]]} for name in ("rare", "common")}


def compressed(*forms: tuple[str, int, float]) -> dict:
    return {
        "as_trained": {"wiki": {"loss": 2.0}},
        "forms": [
            {"form": form, "bytes": size, "relative_bytes": size / 100, "texts": {"wiki": {"loss": loss}}}
            for form, size, loss in forms
        ],
    }


FOOTPRINT = [
    {"blocks": blocks, "bits": 4, "vram_bytes": 10**9, "ssd_bytes": blocks * 10**9} for blocks in (0, 2)
]


@pytest.mark.parametrize(
    ("what", "result", "words"),
    [
        (
            "norms",
            {"embedding": [1.0] * 7 + [2.0] * 3},
            "0.50 times as long as a common one's: rare rows are short",
        ),
        ("norms", {"embedding": [2.0] * 7 + [1.0] * 3}, "2.00 times .* rare rows are longer"),
        ("norms", {"embedding": [None, 1.0, None] + [1.0] * 7}, "1.00 times .* does not set"),
        ("updates", updates(0.5, 1000), "2B tokens.* 0.5 updates .* 1,000: many rare rows would never"),
        ("updates", updates(100, 1000), "10.0 times as many"),
        ("updates", updates(900, 1000), "nearly as many"),
        ("gradients", {"embedding_input": [1.0] * 3 + [4.0] * 7}, "0.25 times .* at the input$"),
        (
            "gradients",
            {"embedding_input": [1.0] * 10, "amplification": [None, 7.0, 9.0]},
            "together 8.0 times",
        ),
        ("collapse", collapsed([]), "^0 of 3 pairs .* every pair apart"),
        ("collapse", collapsed([1]), "^1 of 3 pairs .* the other 2 apart"),
        ("collapse", collapsed([0, 1, 2]), "^3 of 3 pairs .* tells none apart"),
        (
            "routing",
            routing(0.9, 0.3),
            "give 56% of .* rare tokens it is 90%, for common ones 30%: .* rare tokens more",
        ),
        ("routing", routing(0.3, 0.9), "serves common tokens more"),
        ("routing", routing(0.5, 0.51), "hardly any difference"),
        (
            "layer-drop",
            dropped([0.1, 0.3], 25.0),
            "2.50 times as high; of single layers, 1 matters most .*30",
        ),
        ("layer-drop", dropped([0.1, 0.3], 9.9), "do not help"),
        (
            "distances",
            {"distance": [[0, 1, 1], [1, 0, 0.2], [1, 0.2, 0]]},
            "1.00 .*0.20: .* not repeat E, and are much alike",
        ),
        ("layer-drop", dropped([-0.1, -0.2], 20.0), "2.00 times as high; without it in any single layer"),
        ("distances", {"distance": [[0, 0.2], [0.2, 0]]}, "0.20 .*the table repeats much of E"),
        ("distances", {"distance": [[0, 0.9], [0.9, 0]]}, "0.90 .*the table does not repeat E"),
        ("neighbours", neighbours(0.02), "2% .* differently from E"),
        ("neighbours", neighbours(0.7), "70% .* group tokens as E does"),
        ("footprint", {"blocks": 2, "rows": FOOTPRINT}, "1.000 GB of GPU memory, and its 2 tables 2.000 GB"),
        ("footprint", {"blocks": 0, "rows": FOOTPRINT}, "1.000 GB of GPU memory$"),
        (
            "compression",
            compressed(("8 bits", 60, 2.0), ("4 bits", 30, 2.005)),
            "^4 bits takes 30% .* best value",
        ),
        (
            "compression",
            compressed(("4 bits", 30, 2.02), ("2 bits", 15, 2.5)),
            "^4 bits .* no form .* within 1%",
        ),
    ],
)
def test_a_sentence_says_what_the_numbers_say(what, result, words):
    assert re.search(words, sentence(what, result)), sentence(what, result)


@pytest.mark.parametrize(
    ("what", "result"),
    [
        ("norms", {"embedding": [None] * 10}),
        ("updates", {"tokens": 1, "rows": {"rare": None, "common": None}}),
        ("collapse", {"categories": {"a": {"pairs": []}}}),
        ("routing", {"tokens": [0] * 11, "by_layer": [[None] * 11]}),
        ("routing", {"tokens": [1] * 11, "by_layer": [[None] * 11]}),
        ("layer-drop", {"texts": {"wiki": {"full": 0, "change": [0.1], "without_any": 1.0}}}),
        ("footprint", {"blocks": 3, "rows": FOOTPRINT}),
        ("neighbours", {name: {"jaccard": [[]]} for name in ("rare", "common")}),
        ("perplexity", {}),
    ],
)
def test_too_few_numbers_mean_nothing(what, result):
    assert sentence(what, result) is None


def test_the_best_form_is_the_smallest_that_hardly_costs():
    forms = ("8 bits", 60, 2.0), ("4 bits", 30, 2.005), ("2 bits", 15, 2.5)
    assert best_form(compressed(*forms))["form"] == "4 bits"
    assert best_form(compressed(forms[2], ("3 bits", 20, 2.2)))["form"] == "3 bits"
