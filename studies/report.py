"""docs/STUDY.md, its figures and results/study/summary.json, from the runs that are kept."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from studies import cache_report, compression_report, figures
from studies.claims import CLAIMS, verdicts
from studies.markdown import table
from studies.plan import GATED, NARROW, OWN_BLOCK, VALUES_BY_RECIPE, final
from studies.results import BLOCKS, Kept, Spread, Study
from tide_lm import runs as files
from tide_lm.report import paper
from tide_lm.report.catalogue import FIGURES
from tide_lm.report.drawing import write, write_panels
from tide_lm.report.figure import Figure, Panel
from tide_lm.report.results import Run
from tide_lm.run_config import RECIPES

CONTROLS = {
    "input-only": "the same tables, normalised and added once, at the input, 1 / (K + 1) of each",
    "wide-input": "one wide input embedding, projected",
    "layer-tables": "a table for each layer, gated by two more matrices in it, as in Gemma 3n",
    "layer-router": "a table for each layer, weighed against a null bank: MoLE with one expert a layer",
    "value-tables": "a table for each layer, in the values of its attention, as nanochat has in every other",
    "input-and-values": "both `input-only` and `value-tables`",
    OWN_BLOCK: "both `layer-router` and `value-tables`, of one table: `model.memory_own_block`",
    GATED: "both `layer-tables` and `value-tables`, of one table: `model.memory_own_block` and "
    "`model.memory_gate`",
    NARROW: "the same with a narrower FFN, so that its layers have no more parameters than others",
}
WITH_VALUES = {"value-tables", "input-and-values", *VALUES_BY_RECIPE}
OF_BLOCKS = {"loss-by-blocks", "training-loss"}  # figures of all K
CHANCE = {"boolq": 0.5, "piqa": 0.5, "lambada_openai": 0.0}  # others choose one of four


def write_report(kept: Path, results: Path, docs: Path) -> Path:
    """Writes all of it; returns the page."""
    study = Study(kept)
    if not study.first("base", "paper"):
        raise ValueError(f"{kept} holds no run of the base, which all is compared with: run the study first")
    cache = cache_report.read(results)
    text = page(study, cache)
    results.mkdir(parents=True, exist_ok=True)
    files.write_atomically(results / "summary.json", summary(study))
    if found := compression_report.records(study):
        files.write_atomically(results.parent / "compression.json", found)
    for name, panel in _own_figures(study).items():
        write_panels([panel], name, docs / "study", ["svg"])
    if cache:
        write_panels([figures.cache_hits(cache)], "cache", docs / "study", ["svg"])
    for figure, runs in _paper_figures(study):
        write(figure, runs, docs / "study", kinds=["svg"])
    files.write_atomically(docs / "STUDY.md", text)
    return docs / "STUDY.md"


def summary(study: Study) -> str:
    return json.dumps({"runs": study.summary()}, indent=2) + "\n"


def page(study: Study, cache: Mapping[str, Any] | None = None) -> str:
    return "\n\n".join(_paragraphs(study, cache)) + "\n"


def _paragraphs(study: Study, cache: Mapping[str, Any] | None) -> Iterable[str]:
    tokens = study.first("base", "paper").record["tokens"]
    yield "# Does every layer need to know the token?"
    yield (
        f"A replication of TIDE at a scale that fits one GPU: small models, the same {tokens:,} tokens of "
        "real text for all, and controls with as many parameters as TIDE, within 3 %. `python -m studies "
        "report` makes this page from [results/study](../results/study), and `python -m studies run` those."
    )
    yield from _answer(study)
    yield "## The paper's claims"
    yield table(
        ["claim", "paper", "ours, its recipe", "ours, best recipe", "verdict"],
        [[v.claim, v.paper, v.with_paper, v.with_best, f"**{v.verdict}**"] for v in verdicts(study)],
    )
    yield "A verdict is about the paper's recipe. What is a confirmation:"
    yield "\n".join(f"- {claim.text}: {claim.rule}." for claim in CLAIMS)
    kept = {run.path.name for run in study.runs}
    if missing := [run.name for run in final() if run.slug not in kept]:
        yield f"Planned and not run: {'; '.join(missing)}."
    yield from _setting(study)
    yield "## As many parameters, used otherwise"
    yield _recipes()
    for name, panel in _own_figures(study).items():
        yield f"![{panel.alt}](study/{name}.svg)"
    yield _losses(study)
    yield "## The number of blocks"
    yield _blocks(study)
    if larger := study.of_size("medium"):
        yield "## A larger model"
        yield _larger(larger, study)
    yield from _texts(study)
    yield from _zero_shot(study)
    yield from _search(study)
    yield from _rows(study)
    yield from compression_report.section(study)
    if cache:
        yield from cache_report.section(cache)
    yield "## The paper's figures"
    for figure, _ in _paper_figures(study):
        of_recipe = f" Of the {_most_blocks(study)} recipe." if figure.name in OF_BLOCKS else ""
        yield f"### {figure.title}\n\n{figure.place} of the paper. {figure.says}{of_recipe}"
        yield f"![{figure.title}](study/{figure.name}.svg)"


def _answer(study: Study) -> Iterable[str]:
    """What is ahead of what, of the seeds that both have."""
    best, paper_gains = (study.gains("tide", recipe, k=8) for recipe in ("best", "paper"))
    if not best.keys() & paper_gains.keys():
        return
    seeds = sorted(best.keys() & paper_gains.keys())
    ours, theirs = (Spread.of([gains[seed] for seed in seeds]) for gains in (best, paper_gains))
    times = f": {ours.mean / theirs.mean:.2f} times as much" if min(ours.mean, theirs.mean) > 0 else ""
    yield (
        f"TIDE-8E has {theirs} nats less loss than its base with the paper's recipe, and {ours} with the "
        f"best recipe, the default{times}. Means and standard deviations are over {_seeds(seeds)}, each "
        "against its own base."
        + (f" Two single runs may be {study.noise:.3f} apart by chance." if study.noise else "")
    )
    yield from _beside_controls(study, "", CONTROLS, lambda recipe: study.gains("tide", recipe, k=8) or best)
    if without := study.gains("tide", "centre", k=8):
        others = [model for model in CONTROLS if model not in WITH_VALUES]
        said = f"Without rows in attention's values TIDE gains {_gain(without)}. "
        yield from _beside_controls(study, said, others, lambda _: without)


def _beside_controls(
    study: Study, said: str, models: Iterable[str], ours_with: Callable[[str], Mapping[int, float]]
) -> Iterable[str]:
    """The control that gains most, and how far TIDE is ahead, of the seeds that both have.

    `ours_with` has TIDE's gains for a control's recipe.
    """
    kinds = {kind: study.gains(*kind, k=8) for kind in study.kinds(8) if kind[0] in models}
    kinds = {kind: gains for kind, gains in kinds.items() if gains.keys() & ours_with(kind[1]).keys()}
    if not kinds:
        return
    (model, recipe), gains = max(kinds.items(), key=lambda item: mean(item[1].values()))
    ours = ours_with(recipe)
    leads = [ours[seed] - gain for seed, gain in gains.items() if seed in ours]
    lead, noise = Spread.of(leads), (study.noise or 0) / len(leads) ** 0.5
    if abs(lead.mean) <= noise:
        told = "differs from it by no more than chance"
    else:
        told = "is ahead of it" if lead.mean > 0 else "**is behind it**"
    yield (
        f"{said}Of as many parameters used otherwise, `{model}` ({CONTROLS[model]}; recipe {recipe}) gains "
        f"most, {_gain(gains)}. TIDE, with {_gain(ours)}, {told}: {lead} nats, of {_seeds(leads)}."
    )


def _gain(gains: Mapping[int, float]) -> str:
    return f"{Spread.of(list(gains.values()))} ({_seeds(gains)})"


def _seeds(values: Collection[Any]) -> str:
    return "one seed" if len(values) == 1 else f"{len(values)} seeds"


def _setting(study: Study) -> Iterable[str]:
    """How models were trained, and what tokens are called rare."""
    run = study.first("base", "paper")
    if not (run.path / "config.json").exists():
        return
    config, validation = run.config, run.result("validation")
    shape, optim, batch = config.model.shape(), config.optim, config.train.batch
    by_decile = ", ".join(f"{tokens:,}" for tokens in validation["tokens_by_decile"])
    yield "## How it was done"
    yield (
        f"`{config.model.preset}`: {shape.num_hidden_layers} layers, D {shape.hidden_size}, "
        f"{shape.vocab_size:,} ids of a tokenizer that was trained on the text, three quarters of it "
        f"Wikipedia and one quarter books. One pass, {config.train.steps:,} steps of {batch} x "
        f"{config.data.sequence}, learning rate {optim.max_lr:g} to {optim.min_lr:g}, {config.train.dtype}. "
        f"That is {run.record['tokens'] / run.record['parameters']:.1f} tokens for each parameter of the "
        "base, where the paper has 200: what grows with more training cannot be seen here."
    )
    yield (
        "Losses are of held-out text of the same sources. Tokens that have a letter or digit are cut into "
        "ten parts with as many tokens each, by how often they occur in training; of "
        f"{validation['tokens']:,} places to predict they have {by_decile}, the rarest first. Rare are the "
        "first three, common the last three. The recipe was chosen by the same held-out text, and [the "
        "log](LOG.md) tells how."
    )
    yield (
        "`python -m studies prepare CORPUS`, `python -m studies run SHARED --processes 6` until nothing is "
        "left, and `python -m studies report` make it again."
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
    wanted = {("tide", recipe) for recipe in ("paper", "best", "centre", "values x5", "values x5, gated")}
    kinds = [kind for kind in study.kinds(8) if kind in wanted or kind[0] in CONTROLS]
    found = [study.of("base", "paper"), *(study.of(*kind, k=8) for kind in kinds)]
    return sorted(found, key=lambda runs: mean(run.record["val_loss"] for run in runs))


def _own_figures(study: Study) -> dict[str, Panel]:
    kinds = (("base", "paper", 0), ("input-only", "best", 8), ("tide", "paper", 8), ("tide", "best", 8))
    curves = [runs for model, recipe, k in kinds if (runs := study.of(model, recipe, k=k))]
    gains = {"gains": figures.gains(study, _compared(study))} if len(_compared(study)) > 1 else {}
    return {**gains, "loss-by-tokens": figures.loss_by_tokens(curves)}


def _losses(study: Study) -> str:
    rows = [[*_named(runs[0]), *_numbers(runs, study)] for runs in _compared(study)]
    how = "\n".join(f"- `{model}`: {what}." for model, what in CONTROLS.items())
    tried = Counter(model for model, _ in study.kinds(8))
    counts = ", ".join(f"{model} {number}" for model, number in tried.most_common())
    return (
        table(["model", "recipe", "parameters", *_COLUMNS], rows)
        + f"\n\n`centre` is the best recipe without rows in values. Recipes tried: {counts}; they were "
        f"compared by the validation loss of seed 0 that is shown here.\n\nControls:\n\n{how}"
    )


def _blocks(study: Study) -> str:
    found = {recipe: study.by_blocks(recipe) for recipe in ("paper", "best")}
    said = "One seed each."
    if study.first(OWN_BLOCK, "best"):
        found["own block"] = study.by_blocks("best", OWN_BLOCK)
        said += f" Own block: `{OWN_BLOCK}`, in which layers share a block if there are fewer."
    rows = [
        [str(k), *(cell for runs in found.values() for cell in (_three(runs[k]) if k in runs else [""] * 3))]
        for k in BLOCKS
    ]
    columns = ["K", *(f"{name}, {recipe}" for recipe in found for name in ("loss", *_ENDS))]
    return f"{table(columns, rows)}\n\n{said}"


def _larger(found: Sequence[Kept], study: Study) -> str:
    rows = [[*_named(run), *_numbers([run], study)] for run in found]
    return table(["model", "recipe", "parameters", *_COLUMNS], rows)


def _texts(study: Study) -> Iterable[str]:
    """Perplexity on texts of other kinds than what was trained on."""
    names = list(study.first("base", "paper").texts)
    if not names:
        return
    columns = [(name, words) for words in (False, True) for name in names]
    kinds = _compared(study)
    found = [[Spread.of([run.perplexity(*column) for run in runs]) for column in columns] for runs in kinds]
    rows = [
        [*_named(runs[0])[:2], str(len(runs)), *(f"{spread:.1f}" for spread in spreads)]
        for runs, spreads in zip(kinds, found, strict=True)
    ]
    yield "## Other texts"
    yield table(["model", "recipe", "seeds", *names, *(f"{name}, words" for name in names)], rows)
    yield (
        "Perplexity by token; nothing of it was trained on. Words are tokens with a letter or digit: "
        "WikiText puts spaces before punctuation, and the training text does not, so that its other tokens "
        "are rare ones in training."
    )
    best = {
        name: min(range(len(kinds)), key=lambda kind: found[kind][number].mean)
        for number, name in enumerate(names)
    }
    ahead = [
        f"on {name} `{figures.name_of(kinds[kind][0])}` is ahead of it" for name, kind in best.items() if kind
    ]
    if ahead:
        yield f"{figures.name_of(kinds[0][0])} has the lowest loss; {', '.join(ahead)}."


def _zero_shot(study: Study) -> Iterable[str]:
    """Tasks on which some model is above chance."""
    found = {figures.name_of(run): run.tasks for run in study.looked if run.tasks}
    rows = []
    for task, name in paper.TASKS.items():
        if not all(task in tasks for tasks in found.values()):
            continue
        scores, chance = [tasks[task] for tasks in found.values()], CHANCE.get(task, 0.25)
        if any(score["score"] > chance + 2 * score["stderr"] for score in scores):
            shown = [f"{100 * score['score']:.1f} ± {100 * score['stderr']:.1f}" for score in scores]
            rows.append([name, f"{100 * chance:.0f}", *shown])
    if rows:
        yield "## Zero-shot tasks"
        yield table(["task", "chance", *found], rows)
        yield "In percent, with standard errors; one seed. On tasks that are not here, none is above chance."


def _search(study: Study) -> Iterable[str]:
    tried = [run for run in study.whole if run.record["recipe"] not in ("paper", "best")]
    tried = [run for run in tried if run.record["seed"] == 0]
    tried.sort(key=lambda run: run.record["val_loss"])
    rows = [[run.record["model"], run.record["recipe"], *_three(run)] for run in tried]
    if rows:
        yield "## The search for a recipe"
        yield table(["model", "tried", "loss", *_ENDS], rows)
        yield "One seed each; studies/plan.py says what each changes, and [the log](LOG.md) why."


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
    yield table(["recipe", *(f"decile {number}" for number in range(10))], rows)


def _most_blocks(study: Study) -> str:
    """The recipe with which most K were run, the paper's if it is as many."""
    return max(("paper", "best"), key=lambda recipe: len(study.by_blocks(recipe)))


def _paper_figures(study: Study) -> Iterable[tuple[Figure, list[Run]]]:
    """Those that the runs have something for."""
    for name, figure in FIGURES.items():
        by_blocks = study.by_blocks(_most_blocks(study)).values()
        chosen = list(by_blocks) if name in OF_BLOCKS else study.looked
        kept = [run for run in figures.opened(chosen) if figure.missing(run) is None]
        if figure.too_few(kept) is None:
            yield figure, kept


_ENDS = ("rarest decile", "commonest decile")
_COLUMNS = ("seeds", "validation loss", *_ENDS, "gain")


def _three(run: Kept) -> list[str]:
    return [f"{loss:.3f}" for loss in (run.record["val_loss"], run.decile(0), run.decile(9))]


def _named(run: Kept) -> list[str]:
    return [figures.model_of(run), run.record["recipe"], f"{run.record['parameters']:,}"]


def _numbers(found: Sequence[Kept], study: Study) -> list[str]:
    """Of runs of one kind: loss, that of both ends, and how much less it is than the base's of each seed."""
    losses = [[run.record["val_loss"], run.decile(0), run.decile(9)] for run in found]
    record = found[0].record
    gains = study.gains(record["model"], record["recipe"], record["size"], record["k"])
    gain = str(Spread.of(list(gains.values()))) if gains and record["model"] != "base" else ""
    return [str(len(found)), *(str(Spread.of(each)) for each in zip(*losses, strict=True)), gain]
