"""The tables and figures of docs/STUDY.md, from the runs that are kept."""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from studies import cache_report, figures
from studies.claims import CLAIMS, Verdict, verdicts
from studies.markdown import table
from studies.plan import GATED, NARROW, OWN_BLOCK, VALUES_BY_RECIPE, final
from studies.results import BLOCKS, RUNS, Kept, Spread, Study
from tide_lm.report import paper
from tide_lm.report.catalogue import FIGURES
from tide_lm.report.drawing import DECILES, write, write_panels
from tide_lm.report.figure import Figure, Panel
from tide_lm.report.results import Run
from tide_lm.spec.recipes import RECIPES

CONTROLS = (  # docs/STUDY.md says what each is
    "input-only",
    "wide-input",
    "layer-tables",
    "layer-router",
    "value-tables",
    "input-and-values",
    OWN_BLOCK,
    GATED,
    NARROW,
)
WITH_VALUES = {"value-tables", "input-and-values", *VALUES_BY_RECIPE}
OF_BLOCKS = {"loss-by-blocks", "training-loss"}  # figures of all K
CHANCE = {"boolq": 0.5, "piqa": 0.5, "lambada_openai": 0.0}  # others choose one of four


def read(results: Path) -> Study:
    """Return the runs that are kept; raise ValueError without the base, which all is compared with."""
    study = Study(results)
    if not study.first("base", "paper"):
        raise ValueError(
            f"{results / RUNS} has no run of the base, which all is compared with: run the study first"
        )
    return study


def write_report(results: Path, docs: Path) -> Path:
    """Draw the figures of the runs that are kept; return the folder of the figures."""
    study, cache, folder = read(results), cache_report.read(results), docs / "study"
    for name, panel in own_figures(study).items():
        write_panels([panel], name, folder, ["svg"])
    if cache:
        write_panels([figures.cache_hits(cache)], "cache", folder, ["svg"])
    for figure, runs in _paper_figures(study):
        write(figure, runs, folder, kinds=["svg"])
    return folder


CLAIM_COLUMNS = ("claim", "paper", "ours, its recipe", "ours, best recipe", "verdict")


def claim_row(verdict: Verdict) -> list[str]:
    return [*verdict[:-1], f"**{verdict.verdict}**"]


def claims(study: Study) -> str:
    """Return every claim of the paper with what was found and a verdict."""
    return table(CLAIM_COLUMNS, map(claim_row, verdicts(study)))


def rules() -> str:
    """Return the rule by which each claim is confirmed."""
    return "\n".join(f"- {claim.text}: {claim.rule}." for claim in CLAIMS)


def not_run(study: Study) -> str:
    """Return the planned runs that are not kept."""
    kept = {run.name for run in study.runs}
    return "; ".join(run.name for run in final() if run.slug not in kept) or "nothing"


def tokens(study: Study) -> str:
    """Return how many tokens every model was trained on."""
    return f"{study.first('base', 'paper').record['tokens']:,}"


def noise(study: Study) -> str:
    """Return how far apart two single runs may be by chance."""
    return "not known" if study.noise is None else f"{study.noise:.3f}"


def gains_by_recipe(study: Study) -> str:
    """Return the gains of TIDE-8E with both recipes, over the seeds that both have."""
    best, paper_gains = (study.gains("tide", recipe, k=8) for recipe in ("best", "paper"))
    seeds = best.keys() & paper_gains.keys()
    if not seeds:
        raise ValueError("TIDE-8E has no seed with both the paper's and the best recipe: run the study first")
    theirs, ours = (Spread.of([gains[seed] for seed in seeds]) for gains in (paper_gains, best))
    times = f"{ours.mean / theirs.mean:.2f}" if min(ours.mean, theirs.mean) > 0 else ""
    rows = [["the paper's", str(theirs), "1.00"], ["best, the default", str(ours), times]]
    columns = ["recipe of TIDE-8E", "gain over the base, nats", "times that of the paper's recipe", "seeds"]
    return table(columns, [[*row, str(len(seeds))] for row in rows])


def beside_controls(study: Study) -> str:
    """Return the best control of all, the best without rows in values, and TIDE beside each."""
    best, without = (study.gains("tide", recipe, k=8) for recipe in ("best", "centre"))
    others = [model for model in CONTROLS if model not in WITH_VALUES]
    rows = [
        ["allowed", *_lead(study, CONTROLS, lambda recipe: study.gains("tide", recipe, k=8) or best)],
        ["none", *_lead(study, others, lambda _: without)],
    ]
    own = ["the control that gains most", "its recipe", "its gain, nats"]
    columns = ["rows in values", *own, "TIDE's gain, nats", "TIDE's lead, nats", "TIDE"]
    return table(columns, [row for row in rows if len(row) > 1])


def _lead(study: Study, models: Iterable[str], ours_with: Callable[[str], Mapping[int, float]]) -> list[str]:
    """Return the control that gains most and TIDE's lead over it, over the seeds that both have.

    `ours_with` has TIDE's gains for a control's recipe. Nothing is returned where there is no pair.
    """
    kinds = {kind: study.gains(*kind, k=8) for kind in study.kinds(8) if kind[0] in models}
    kinds = {kind: gains for kind, gains in kinds.items() if gains.keys() & ours_with(kind[1]).keys()}
    if not kinds:
        return []
    (model, recipe), gains = max(kinds.items(), key=lambda item: mean(item[1].values()))
    ours = ours_with(recipe)
    leads = {seed: ours[seed] - gain for seed, gain in gains.items() if seed in ours}
    lead, chance = mean(leads.values()), (study.noise or 0) / len(leads) ** 0.5
    if abs(lead) <= chance:
        told = "differs by no more than chance"
    else:
        told = "is ahead" if lead > 0 else "**is behind**"
    return [f"`{model}`", recipe, _gain(gains), _gain(ours), _gain(leads), told]


def _gain(gains: Mapping[int, float]) -> str:
    return f"{Spread.of(list(gains.values()))} ({_seeds(gains)})"


def _seeds(values: Collection[Any]) -> str:
    return "one seed" if len(values) == 1 else f"{len(values)} seeds"


def setting(study: Study) -> str:
    """Return how the small models were trained."""
    run = study.first("base", "paper")
    config, record = run.config, run.record
    shape, optim, train = config.model.shape(), config.optim, config.train
    rows = {
        "model": f"`{config.model.preset}`",
        "layers": f"{shape.num_hidden_layers}",
        "hidden size D": f"{shape.hidden_size}",
        "vocabulary, token ids": f"{shape.vocab_size:,}",
        "steps": f"{train.steps:,}",
        "batch, sequences x tokens": f"{train.batch} x {config.data.sequence}",
        "learning rate, peak and last": f"{optim.max_lr:g} and {optim.min_lr:g}",
        "number format": train.dtype,
        "training tokens per parameter of the base": f"{record['tokens'] / record['parameters']:.1f}",
        "held-out places to predict": f"{run.results['validation']['tokens']:,}",
    }
    return table(["setting", "value"], rows.items())


def size(study: Study) -> str:
    """How small the models are, and how much text they saw, in a few words."""
    base, tide = study.first("base", "paper"), study.first("tide", "best", k=8)
    shape = base.config.model.shape()
    parameters, with_tables = (f"{run.record['parameters'] / 1e6:.0f}M" for run in (base, tide))
    return (
        f"{shape.num_hidden_layers} layers, hidden size {shape.hidden_size}, {parameters} parameters without "
        f"tables and {with_tables} with 8, trained on {base.record['tokens'] / 1e6:.0f}M tokens"
    )


def places_by_decile(study: Study) -> str:
    """Return how many predicted tokens of the held-out text are in each decile."""
    counts = study.first("base", "paper").results["validation"]["tokens_by_decile"]
    return table(
        [DECILES, *map(str, range(len(counts)))], [["places to predict", *(f"{n:,}" for n in counts)]]
    )


def recipes() -> str:
    """Return the settings of both recipes."""
    settings = {
        f"{section}.{key}": [json.dumps(RECIPES[name][section][key]) for name in ("paper", "best")]
        for section, values in RECIPES["paper"].items()
        for key in values
    }
    return table(["setting", "paper", "best"], [[f"`{key}`", *values] for key, values in settings.items()])


def _compared(study: Study) -> list[list[Kept]]:
    """Return the base, TIDE-8E and the controls, the best first."""
    wanted = {("tide", recipe) for recipe in ("paper", "best", "centre", "values x5", "values x5, gated")}
    kinds = [kind for kind in study.kinds(8) if kind in wanted or kind[0] in CONTROLS]
    found = [study.of("base", "paper"), *(study.of(*kind, k=8) for kind in kinds)]
    return sorted(found, key=lambda runs: mean(run.record["val_loss"] for run in runs))


def own_figures(study: Study) -> dict[str, Panel]:
    kinds = (("base", "paper", 0), ("input-only", "best", 8), ("tide", "paper", 8), ("tide", "best", 8))
    curves = [runs for model, recipe, k in kinds if (runs := study.of(model, recipe, k=k))]
    gains = {"gains": figures.gains(study, _compared(study))} if len(_compared(study)) > 1 else {}
    return {**gains, "loss-by-tokens": figures.loss_by_tokens(curves)}


def own_figure(study: Study, name: str) -> str:
    """Return one of the study's own figures, with its numbers in words."""
    return f"![{own_figures(study)[name].alt}](study/{name}.svg)"


def losses(study: Study) -> str:
    """Return the losses of the base, TIDE-8E and the controls, the best first."""
    rows = [[*_named(runs[0]), *_numbers(runs, study)] for runs in _compared(study)]
    return table(["model", "recipe", "parameters", *_COLUMNS], rows)


def recipes_tried(study: Study) -> str:
    """Return how many recipes each model was trained with."""
    tried = Counter(model for model, _ in study.kinds(8))
    return ", ".join(f"{model} {number}" for model, number in tried.most_common())


def losses_by_k(study: Study) -> str:
    """Return the losses by the number of blocks, for one seed."""
    found = {recipe: study.by_blocks(recipe) for recipe in ("paper", "best")}
    if study.first(OWN_BLOCK, "best"):
        found["own block"] = study.by_blocks("best", OWN_BLOCK)
    rows = [
        [str(k), *(cell for runs in found.values() for cell in (_three(runs[k]) if k in runs else [""] * 3))]
        for k in BLOCKS
    ]
    return table(["K", *(f"{name}, {recipe}" for recipe in found for name in ("loss", *_ENDS))], rows)


def larger(study: Study) -> str:
    """Return the runs of a larger model, the worst first."""
    rows = [[*_named(run), *_numbers([run], study)] for run in study.of_size("medium")]
    return table(["model", "recipe", "parameters", *_COLUMNS], rows)


def texts(study: Study) -> str:
    """Return the perplexity on texts of other kinds than the training text."""
    names, kinds, found = _perplexities(study)
    rows = [
        [*_named(runs[0])[:2], str(len(runs)), *(f"{spread:.1f}" for spread in spreads)]
        for runs, spreads in zip(kinds, found, strict=True)
    ]
    return table(["model", "recipe", "seeds", *names, *(f"{name}, words" for name in names)], rows)


def best_by_text(study: Study) -> str:
    """Return the best model for each text."""
    names, kinds, found = _perplexities(study)
    rows = []
    for number, name in enumerate(names):
        spreads = [spreads[number] for spreads in found]
        best = min(range(len(kinds)), key=lambda kind: spreads[kind].mean)
        rows.append([name, *_named(kinds[best][0])[:2], f"{spreads[best]:.1f}"])
    return table(["text", "model with the lowest perplexity", "recipe", "perplexity"], rows)


def _perplexities(study: Study) -> tuple[list[str], list[list[Kept]], list[list[Spread]]]:
    """Return the texts, the kinds of runs, and each kind's perplexities on all tokens and on words."""
    names, kinds = list(study.first("base", "paper").texts), _compared(study)
    columns = [(name, words) for words in (False, True) for name in names]
    found = [[Spread.of([run.perplexity(*column) for run in runs]) for column in columns] for runs in kinds]
    return names, kinds, found


def zero_shot(study: Study) -> str:
    """Return the tasks on which some model is above chance."""
    found = {figures.name_of(run): run.tasks for run in study.diagnosed if run.tasks}
    rows = []
    for task, name in paper.TASKS.items():
        if not all(task in tasks for tasks in found.values()):
            continue
        scores, chance = [tasks[task] for tasks in found.values()], CHANCE.get(task, 0.25)
        if any(score["score"] > chance + 2 * score["stderr"] for score in scores):
            shown = [f"{100 * score['score']:.1f} ± {100 * score['stderr']:.1f}" for score in scores]
            rows.append([name, f"{100 * chance:.0f}", *shown])
    return table(["task", "chance", *found], rows)


def search(study: Study) -> str:
    """Return the recipes of the search, the best first."""
    tried = [run for run in study.whole if run.record["recipe"] not in ("paper", "best")]
    tried = [run for run in tried if run.record["seed"] == 0]
    tried.sort(key=lambda run: run.record["val_loss"])
    rows = [[run.record["model"], run.record["recipe"], *_three(run)] for run in tried]
    return table(["model", "tried", "loss", *_ENDS], rows)


def rows_after_training(study: Study) -> str:
    """Return the root mean square of the tables' rows by the decile of their token."""
    rows = []
    for recipe, run in _with_norms(study).items():
        size = run.config.model.shape().hidden_size
        deciles = zip(*run.results["norms"]["tables"], strict=True)
        means = ("" if None in norms else f"{mean(norms) / size**0.5:.4f}" for norms in deciles)
        rows.append([recipe, *means])
    return table(["recipe", *(f"decile {number}" for number in range(10))], rows)


def norm_eps(study: Study) -> str:
    """Return what the norm adds to a row's mean square, and its root."""
    run = next(iter(_with_norms(study).values()))
    eps = run.config.model.shape().rms_norm_eps
    return f"{eps:g}, the square of {eps**0.5:.4f}"


def _with_norms(study: Study) -> dict[str, Kept]:
    """Return a run whose norms were measured, by recipe."""
    found = {
        recipe: run
        for recipe in ("paper", "best")
        for run in study.of("tide", recipe, k=8)
        if "norms" in run.results
    }
    if not found:
        raise ValueError("no run of TIDE-8E has norms: run the study first")
    return found


def word_neighbours(study: Study) -> str:
    """Return the nearest neighbours of a few words, in E and in each table."""
    runs = [run for run in figures.opened(study.diagnosed) if "neighbours" in run.results]
    shown = FIGURES["neighbours"].tables(runs)
    rows = [[found.caption, *map(_escaped, row)] for found in shown for row in found.rows]
    return table(["word and model", *shown[0].columns], rows)


def _escaped(cell: str) -> str:
    return re.sub(r"([\\|*_`<])", r"\\\1", cell)


def _paper_figures(study: Study) -> Iterable[tuple[Figure, list[Run]]]:
    """Yield the figures of the paper that the runs have results for."""
    for name, figure in FIGURES.items():
        chosen = list(study.by_blocks("paper").values()) if name in OF_BLOCKS else study.diagnosed
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
    """Return the loss of one kind of runs, on all tokens and both end deciles, and its gain over the base."""
    losses = [[run.record["val_loss"], run.decile(0), run.decile(9)] for run in found]
    record = found[0].record
    gains = study.gains(record["model"], record["recipe"], record["size"], record["k"])
    gain = str(Spread.of(list(gains.values()))) if gains and record["model"] != "base" else ""
    return [str(len(found)), *(str(Spread.of(each)) for each in zip(*losses, strict=True)), gain]
