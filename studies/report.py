"""docs/STUDY.md, its figures and results/study/summary.json, from the runs that are kept."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean

from studies import figures
from studies.claims import CLAIMS, verdicts
from studies.results import BLOCKS, Kept, Spread, Study
from tide_lm import runs as files
from tide_lm.report.catalogue import FIGURES
from tide_lm.report.drawing import write, write_panels
from tide_lm.report.results import open_runs
from tide_lm.run_config import RECIPES

CONTROLS = {
    "input-only": "the same tables, normalised and added once, at the input, 1 / (K + 1) of each",
    "wide-input": "one wide input embedding, projected",
    "layer-tables": "a table for each layer, gated, as in Gemma 3n",
    "layer-router": "a table for each layer, against a null bank, as in MoLE",
    "value-tables": "a table for each layer, in the values of its attention, as in nanochat",
    "input-and-values": "both `input-only` and `value-tables`: the best recipe without routers",
}
OF_BLOCKS = {"loss-by-blocks"}  # a figure of all K


def write_report(kept: Path, results: Path, docs: Path) -> Path:
    """Writes all of it; returns the page."""
    study = Study(kept)
    if not study.first("base", "paper"):
        raise ValueError(f"{kept} holds no run of the base, which all is compared with: run the study first")
    results.mkdir(parents=True, exist_ok=True)
    summary = {"runs": study.summary()}
    files.write_atomically(results / "summary.json", json.dumps(summary, indent=2) + "\n")
    page = docs / "STUDY.md"
    files.write_atomically(page, "\n\n".join(_page(study, docs)) + "\n")
    return page


def _page(study: Study, docs: Path) -> Iterable[str]:
    tokens = study.first("base", "paper").record["tokens"]
    yield "# Does every layer need to know the token?"
    yield (
        "A replication of TIDE at a scale that fits one GPU: small models, real text, matched parameters and "
        f"tokens ({tokens:,} of them), and controls. `python -m studies report` makes this page from "
        "[results/study](../results/study), and `python -m studies run` those."
    )
    yield from _answer(study)
    yield _recipes()
    yield from _own_figures(study, docs)
    yield "## The paper's claims"
    yield _table(
        ["claim", "paper", "ours, its recipe", "ours, best recipe", "verdict"],
        [[v.claim, v.paper, v.with_paper, v.with_best, f"**{v.verdict}**"] for v in verdicts(study)],
    )
    yield "A verdict is about the paper's recipe. What is a confirmation:"
    yield "\n".join(f"- {claim.text}: {claim.rule}." for claim in CLAIMS)
    yield "## As many parameters, used otherwise"
    yield _losses(study)
    yield "## The number of blocks"
    yield _blocks(study)
    yield "## A larger model"
    yield _larger(study)
    yield "## The search for a recipe"
    yield _search(study)
    yield from _rows(study)
    yield "## The paper's figures"
    yield from _figures(study, docs)


def _answer(study: Study) -> Iterable[str]:
    """What is ahead of what, of the seeds that both have."""
    best, paper = (study.gains("tide", recipe, k=8) for recipe in ("best", "paper"))
    if not best.keys() & paper.keys():
        return
    seeds = sorted(best.keys() & paper.keys())
    ours, theirs = (Spread.of([gains[seed] for seed in seeds]) for gains in (best, paper))
    times = f": {ours.mean / theirs.mean:.2f} times as much" if min(ours.mean, theirs.mean) > 0 else ""
    yield (
        f"TIDE-8E has {theirs} nats less loss than its base with the paper's recipe, and {ours} with the "
        f"best that was found{times}. Tokens are the same; means and standard deviations are over seeds "
        f"({len(seeds)}), each against its own base."
    )
    controls = {kind: study.gains(*kind, k=8) for kind in study.kinds(8) if kind[0] in CONTROLS}
    controls = {kind: gains for kind, gains in controls.items() if gains.keys() & best.keys()}
    if not controls:
        return
    (model, recipe), gains = max(controls.items(), key=lambda item: mean(item[1].values()))
    lead = Spread.of([best[seed] - gain for seed, gain in gains.items() if seed in best])
    noise = study.noise("best")
    if noise is not None and abs(lead.mean) <= noise:
        said = "differs from it no more than seeds do"
    else:
        said = "is ahead of it" if lead.mean > 0 else "**is behind it**"
    yield (
        f"Of as many parameters used otherwise, `{model}` ({CONTROLS[model]}; recipe {recipe}) gains most, "
        f"{Spread.of(list(gains.values()))}. TIDE {said}: {lead} nats."
    )


def _recipes() -> str:
    """What the recipes set, as a run's settings have it."""
    said = {
        name: ", ".join(
            f"`{section}.{key}` {json.dumps(value)}"
            for section, values in sections.items()
            for key, value in values.items()
        )
        for name, sections in RECIPES.items()
    }
    return f"The paper's recipe is {said['paper']}; the best is {said['best']}."


def _compared(study: Study) -> list[list[Kept]]:
    """The base, TIDE-8E and the controls, the best first."""
    wanted = {("tide", "paper"), ("tide", "best")}
    kinds = [kind for kind in study.kinds(8) if kind in wanted or kind[0] in CONTROLS]
    found = [study.of("base", "paper"), *(study.of(*kind, k=8) for kind in kinds)]
    return sorted(found, key=lambda runs: mean(run.record["val_loss"] for run in runs))


def _own_figures(study: Study, docs: Path) -> Iterable[str]:
    kinds = (("base", "paper", 0), ("input-only", "best", 8), ("tide", "paper", 8), ("tide", "best", 8))
    curves = [runs for model, recipe, k in kinds if (runs := study.of(model, recipe, k=k))]
    for name, panel in {
        "gains": figures.gains(study, _compared(study)),
        "loss-by-tokens": figures.loss_by_tokens(curves),
    }.items():
        write_panels([panel], name, docs / "study", ["svg"])
        yield f"![{panel.alt}](study/{name}.svg)"


def _losses(study: Study) -> str:
    rows = [[*_named(runs[0]), *_numbers(runs, study)] for runs in _compared(study)]
    how = "\n".join(f"- `{model}`: {what}." for model, what in CONTROLS.items())
    return _table(["model", "recipe", "parameters", *_COLUMNS], rows) + f"\n\nControls:\n\n{how}"


def _blocks(study: Study) -> str:
    found = {recipe: study.by_blocks(recipe) for recipe in ("paper", "best")}
    rows = [
        [str(k), *(cell for runs in found.values() for cell in (_three(runs[k]) if k in runs else [""] * 3))]
        for k in BLOCKS
    ]
    columns = ["K", *(f"{name}, {recipe}" for recipe in found for name in ("loss", *_ENDS))]
    return _table(columns, rows) + "\n\nOne seed each."


def _larger(study: Study) -> str:
    found = [run for run in study.runs if run.record["size"] == "medium"]
    found.sort(key=lambda run: -run.record["val_loss"])
    rows = [[*_named(run), *_numbers([run], study)] for run in found]
    return _table(["model", "recipe", "parameters", *_COLUMNS], rows)


def _search(study: Study) -> str:
    tried = [run for run in study.runs if run.record["recipe"] not in ("paper", "best")]
    tried.sort(key=lambda run: run.record["val_loss"])
    rows = [[run.record["model"], run.record["recipe"], *_three(run)] for run in tried]
    return (
        _table(["model", "tried", "loss", *_ENDS], rows)
        + "\n\nOne seed each; studies/plan.py says what each changes."
    )


def _rows(study: Study) -> Iterable[str]:
    """Tables' rows against what the norm adds to their mean square."""
    found = {
        recipe: run
        for recipe in ("paper", "best")
        for run in study.of("tide", recipe, k=8)
        if (run.path / "results" / "norms.json").exists()
    }
    if not found:
        return
    shape = next(iter(found.values())).config.model.shape()
    rows = []
    for recipe, run in found.items():
        deciles = zip(*run.result("norms")["tables"], strict=True)
        rows.append(
            [
                recipe,
                *(
                    "" if None in norms else f"{mean(norms) / shape.hidden_size**0.5:.4f}"
                    for norms in deciles
                ),
            ]
        )
    yield "## Rows of the tables after training"
    yield (
        "The root of the mean square of a row, by the decile of its token. Rows decay where the recipe says "
        f"so, and between their updates nothing holds them; the norm adds {shape.rms_norm_eps:g}, so that a "
        f"row of {shape.rms_norm_eps**0.5:.4f} counts for {0.5**0.5:.2f} of what it should."
    )
    yield _table(["recipe", *(f"decile {number}" for number in range(10))], rows)


def _figures(study: Study, docs: Path) -> Iterable[str]:
    looked = [
        run
        for model, recipe, k in (("base", "paper", 0), ("tide", "paper", 8), ("tide", "best", 8))
        for run in study.of(model, recipe, k=k)[:1]
    ]
    by_blocks = study.by_blocks("best").values()
    for name, figure in FIGURES.items():
        chosen = by_blocks if name in OF_BLOCKS else looked
        kept = [run for run in open_runs([run.path for run in chosen]) if figure.missing(run) is None]
        if figure.too_few(kept) is not None:
            continue
        write(figure, kept, docs / "study", kinds=["svg"])
        yield f"### {figure.title}\n\n{figure.place} of the paper. {figure.says}"
        yield f"![{figure.title}](study/{name}.svg)"


_ENDS = ("rarest decile", "commonest decile")
_COLUMNS = ("seeds", "validation loss", *_ENDS, "gain")


def _three(run: Kept) -> list[str]:
    return [f"{loss:.3f}" for loss in (run.record["val_loss"], run.decile(0), run.decile(9))]


def _named(run: Kept) -> list[str]:
    record = run.record
    model = f"TIDE-{record['k']}E" if record["model"] == "tide" else record["model"]
    return [model, record["recipe"], f"{record['parameters']:,}"]


def _numbers(found: Sequence[Kept], study: Study) -> list[str]:
    """Of runs of one kind: loss, that of both ends, and how much less it is than the base's of each seed."""
    losses = [[run.record["val_loss"], run.decile(0), run.decile(9)] for run in found]
    record = found[0].record
    gains = study.gains(record["model"], record["recipe"], record["size"], record["k"])
    gain = str(Spread.of(list(gains.values()))) if gains and record["model"] != "base" else ""
    return [str(len(found)), *(str(Spread.of(each)) for each in zip(*losses, strict=True)), gain]


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
