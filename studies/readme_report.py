"""The README's own tables: the results of the study and the demo in short, and the cost of a model."""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from studies.claims import CONFIRMED, NOT_CONFIRMED, UNKNOWN, verdicts
from studies.figures import opened
from studies.markdown import table
from studies.plan import NARROW, VALUES_BY_RECIPE
from studies.report import CLAIM_COLUMNS, CONTROLS, claim_row
from studies.results import Kind, Spread, Study
from tide_lm.report.figures.compression import rare_change, worst_change
from tide_lm.report.formatting import difference, percent

SHOWN = (  # of the paper's claims
    "every decile gains",
    "rare tokens gain more than common ones",
    "TIDE comes to the base's final loss with half of its tokens",
    "loss falls with every step of K: 0, 2, 4, 8, 16, 24",
    "zero-shot tasks are better",
    "the null bank's weight is larger on the commonest decile than on the rarest",
    "the first layer's memory is indispensable",
    "a token's tables get K times the gradient of the base's embedding",
    "tables in 4 bits cost little",
)
FORMS = {
    "8 bits": "8 bits",
    "4 bits": "4 bits",
    "3 bits": "3 bits",
}
GAINS: dict[Kind, str] = {  # by model and recipe
    ("tide", "paper"): "TIDE as the paper trains it",
    ("tide", "best"): "TIDE with the default recipe",
    ("tide", "values x5"): "TIDE with rows five times as large in attention's values",
    ("tide", "values x5, gated"): "the same, gated, with a narrower FFN",
    (NARROW, "values x5"): "a table for each layer, and all else the same",
}


def gains(study: Study) -> str:
    """Return the gain over the base for each use of 8 tables."""
    paper = study.gains("tide", "paper", k=8)
    best, published = _best(study, CONTROLS), _best(study, set(CONTROLS) - set(VALUES_BY_RECIPE))
    kinds = [
        *GAINS.items(),
        (best, f"the control that gains most, `{best[0]}`"),
        (published, f"the published use that gains most, tuned here, `{published[0]}`"),
    ]
    rows = []
    for kind, name in kinds:
        found = study.gains(*kind, k=8)
        both = found.keys() & paper.keys()
        if not both:
            raise ValueError(f"{' with '.join(kind)} and TIDE as the paper trains it share no seed: run them")
        times = sum(found[seed] for seed in both) / sum(paper[seed] for seed in both)
        rows.append([name, str(Spread.of(list(found.values()))), f"{times:.2f}", str(len(found))])
    return table(
        [
            "8 tables are used as",
            "less loss than the base, nats",
            "times that of the paper's recipe, same seeds",
            "seeds",
        ],
        rows,
    )


def _best(study: Study, models: Collection[str]) -> Kind:
    """Return the kind that gains most, of those that were trained."""
    found = {kind: study.gains(*kind, k=8) for kind in study.kinds(8) if kind[0] in models}
    return max(found, key=lambda kind: Spread.of(list(found[kind].values())).mean)


def claims(study: Study) -> str:
    """Return some of the paper's claims with the study's verdicts."""
    found = {verdict.claim: verdict for verdict in verdicts(study)}
    return table(CLAIM_COLUMNS, [claim_row(found[text]) for text in SHOWN])


def verdict_counts(study: Study) -> str:
    """Return how many claims have each verdict."""
    found = Counter(verdict.verdict for verdict in verdicts(study))
    counts = {name: found.pop(name, 0) for name in (CONFIRMED, NOT_CONFIRMED, UNKNOWN)} | found
    return table(["claims", *counts], [[str(sum(counts.values())), *map(str, counts.values())]])


def smaller_tables(study: Study) -> str:
    """Return what fewer bits cost a model of the default recipe, on the text that loses most."""
    (run,) = (run for run in opened(study.diagnosed) if run.name == "TIDE-8E (best)")
    result = run.result("compression")
    forms = {form["form"]: form for form in result["forms"]}
    rows = []
    for form, name in FORMS.items():
        size, worst = forms[form]["relative_bytes"], worst_change(result, forms[form])
        rare = difference(rare_change(result, forms[form]))
        rows.append([name, f"{100 * size:.0f} %", percent(worst, 2), rare])
    texts = len(result["as_trained"])
    worst = f"perplexity, the worst of {texts} texts"
    return table(["tables in", "bytes, % of the 16-bit tables", worst, "loss of rare tokens, nats"], rows)


def demo(result: Mapping[str, Any]) -> str:
    """Return the losses of the demo's two models by the frequency of the predicted token."""
    base, tide = result["base"], result["tide"]
    pairs = {
        "0, the rarest": [model["loss_by_decile"][0] for model in (base, tide)],
        "9, the commonest": [model["loss_by_decile"][9] for model in (base, tide)],
        "all": [model["val_loss"] for model in (base, tide)],
    }
    models = (f"`{model['preset']}`, {model['parameters']:,} parameters" for model in (base, tide))
    rows = [[name, f"{a:.3f}", f"{b:.3f}", f"{b - a:+.3f}"] for name, (a, b) in pairs.items()]
    return table(["decile", *models, "difference"], rows)


def demo_setting(result: Mapping[str, Any]) -> str:
    """Return how much text the demo's models saw, on which machine, and how long it took."""
    about = result["provenance"]
    python, machine = ".".join(about["python"].split(".")[:2]), about["machine"]
    return (
        f"{result['base']['tokens']:,} training tokens; {result['seconds'] / 60:.1f} minutes with Python "
        f"{python} on {machine['cores']} cores ({machine['cpu']})"
    )


def demo_texts(result: Mapping[str, Any]) -> str:
    """Return what the demo's models write after its prompts."""
    written = result["written"]
    rows = [
        [f"**{text['prompt']}**{_literal(text[way])}" for way in ("base", "tide", "without_memory")]
        for text in written["texts"]
    ]
    base, tide = (f"`{result[kind]['preset']}`" for kind in ("base", "tide"))
    return table([f"{base}, at temperature {written['temperature']}", tide, "the same, memory off"], rows)


def demo_words(result: Mapping[str, Any]) -> str:
    """Return the words that gain most in the demo, each where it gains most."""
    words = result["words"]
    rows = [
        [word["word"], f"{word['times']}", f"{word['gain']:+.2f}", _literal(word["sentence"])]
        for word in words["largest"]
    ]
    return table(["word", "times", "mean gain, nats", "where it gains most"], rows)


def _literal(text: str) -> str:
    """Return text in a line that Markdown shows as it is, but for the asterisks around a word."""
    return re.sub(r"([\\`_<>|\[\]])", r"\\\1", re.sub(r"\s+", " ", text))


def waiting_times(result: Mapping[str, Any], demo: Mapping[str, Any]) -> str:
    """Return how long each command takes once all is set up, and all of them together."""
    seconds, cores = result["seconds"], result["provenance"]["machine"]["cores"]
    tests, first, everything = (
        f"{each / 60:.0f} minutes" for each in (seconds["test"], demo["seconds"], sum(seconds.values()))
    )
    return (
        f"On {cores} cores the tests then take {tests} and the demo {first}; `.ci/run` sets up four "
        f"environments and runs every test that the machine can run, in {everything}."
    )


def estimated(model: str) -> str:
    """Return what `tide-lm estimate` prints."""
    plain = {key: value for key, value in os.environ.items() if key != "FORCE_COLOR"}
    command = [sys.executable, "-m", "tide_lm", "estimate", model]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=plain)
    lines = [line.rstrip() for line in done.stdout.strip().splitlines()]
    return "\n".join(["```", f"$ tide-lm estimate {model}", *lines, "```"])
