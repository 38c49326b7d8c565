"""`tide-lm demo`: train a base and a TIDE model of one transformer on stories, and compare them.

The stories come with the package: no network is needed.
"""

import json
import math
import multiprocessing
import shutil
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tide_lm.cli.options import AsJson
from tide_lm.cli.output import print_json, print_next, print_table
from tide_lm.cli.progress import tidy_end, training_progress, working
from tide_lm.report import overview
from tide_lm.report.results import open_runs
from tide_lm.run import files
from tide_lm.run.directory import RunDirectory, results_folder, write_result
from tide_lm.run.settings import RunConfig

if TYPE_CHECKING:
    from tide_lm.model.opened import OpenedModel

WIDTH = 80
PRESETS = {"base": "base-tiny", "tide": "tide-4e-tiny"}
PROMPTS = ("Once upon a time there was", "The wolf said to the", "In the middle of the forest")
TEMPERATURE, TOP_K = 0.7, 40  # and the prompt's place as the seed
NEW_TOKENS = 40
HELD_OUT = 0.05
LEAST, MOST = 5, 10  # words that occur so often at least, and so many of them
COMPRESSED = ["4 bits", "2 bits", "16 bits, rank 0.3", "16 bits, rank 0.3, joint"]


def command(
    steps: Annotated[int, typer.Option(min=10, help="Training steps per model.")] = 400,
    run: Annotated[Path, typer.Option(help="The folder for data, runs and numbers.")] = Path("runs/demo"),
    as_json: AsJson = False,
) -> None:
    """Train a base and a TIDE model on the same stories and compare them; a few minutes on two cores.

    Example: tide-lm demo --steps 1000 --run runs/demo
    """
    from tide_lm.report.page import write_report

    started = time.monotonic()
    if (run / "config.json").exists():
        raise ValueError(f"{run} holds a run of tide-lm train: choose another --run")
    results_folder(run)
    with files.locked(run / "lock", f"{run} is in use by another demo: wait for it, or choose another --run"):
        _clear(run)
        result: dict[str, Any] = {"steps": steps, "text_bytes": _prepare(run / "data")}
        result |= _train_both(run, steps) | _look_into(run)
        with working("Drawing the report"):
            page = write_report([run / kind for kind in PRESETS], run / "report" / "index.html")
    result["seconds"] = round(time.monotonic() - started, 1)
    path = write_result(run, "demo", result, seed=0)
    print_json(result) if as_json else _print(run, result)
    typer.echo(f"Runs and numbers: {path.parent.parent}; the report: {page}", err=True)
    print_next(f"tide-lm explore {run}")


def _clear(run: Path) -> None:
    """Remove an earlier demo, of which nothing is kept: it may have had other data or settings."""
    data, done = run / "data", run / "results" / "demo.json"
    trained = {run / kind: _trained_on(run / kind, data) for kind in PRESETS}
    ours = {data: any(trained.values()) or _prepared_anew(data), **trained}
    old = [folder for folder in ours if folder.exists()]
    for folder in old:
        if any(folder.iterdir()) and not (done.exists() or ours[folder]):
            raise ValueError(f"{folder} is no part of a demo: move it, or choose another --run")
    if old:
        typer.echo(f"{run} holds an earlier demo, which this one replaces.", err=True)
    for folder in old:
        shutil.rmtree(folder)
    done.unlink(missing_ok=True)


def _trained_on(folder: Path, data: Path) -> bool:
    path = (RunDirectory(folder).read_config() or {}).get("data", {}).get("path")
    return path is not None and Path(path).resolve() == data.resolve()


def _prepared_anew(data: Path) -> bool:
    """Tell whether these data are those that a demo prepares, and will prepare again."""
    from tide_lm.data.shards import MANIFEST, Manifest

    if not (data / MANIFEST).exists():
        return False
    source = Manifest.read(data).source
    return (source["source"], source["validation"]) == ("stories", HELD_OUT)


def _prepare(folder: Path) -> int:
    """Prepare the stories in a vocabulary of 4,096, and return their bytes."""
    from tide_lm.data.corpus import Corpus, split_of
    from tide_lm.data.prepare import Settings, prepare_corpus
    from tide_lm.data.sources import BUILT_IN, Part

    typer.echo("Preparing the stories ...", err=True)
    parts = [Part("stories", BUILT_IN["stories"])]  # whatever else has that name here
    settings = Settings("stories", train_tokenizer=4096, validation=HELD_OUT)
    corpus = Corpus(parts, split_of(parts, HELD_OUT))
    return prepare_corpus(corpus, parts, settings, folder).source["bytes"]


def settings(preset: str, data: Path, steps: int) -> RunConfig:
    """Return the settings of a model: its preset's, for so many steps. Only the preset differs."""
    return RunConfig.load(
        None,
        [
            f"model.preset={preset}",
            f"data.path={json.dumps(str(data))}",
            f"optim.warmup_steps={steps // 10}",
            f"train.steps={steps}",
            "train.log_every=50",
            "train.record_gradients=true",
            f"train.validate_every={steps}",
            "train.validation_sequences=256",
            f"train.keep_every={max(steps // 3, 1)}",
        ],
    )


def _train_both(run: Path, steps: int) -> dict[str, Any]:
    """Train both models at once, on a core each: models so small gain little from a second one."""
    typer.echo(f"Training {' and '.join(PRESETS.values())}, at once ...", err=True)
    base, tide = (settings(preset, run / "data", steps) for preset in PRESETS.values())
    with tidy_end(), ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as other:
        trained = other.submit(_train, PRESETS["base"], base, run / "base")
        try:
            with training_progress(steps) as (log, advance):

                def log_most(line: str) -> None:
                    # Samples are greedy, unlike what is shown at the end; and a demo is not resumed.
                    if not line.startswith(("sample: ", "stopped by a signal")):
                        log(line)

                found = _train(PRESETS["tide"], tide, run / "tide", log_most, advance)
            with working(f"Waiting for {PRESETS['base']}"):
                return {"base": trained.result(), "tide": found}
        except BrokenProcessPool:
            raise ValueError(f"the training of {PRESETS['base']} was killed: start the demo again") from None
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _train(
    preset: str,
    config: RunConfig,
    run: Path,
    log: Callable[[str], None] = lambda line: None,
    advance: Callable[[int], None] = lambda step: None,
) -> dict[str, Any]:
    import torch

    from tide_lm.training.trainer import Trainer

    started, threads = time.monotonic(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trainer = Trainer(config, run, log, advance)
        validation = trainer.train()
    finally:
        torch.set_num_threads(threads)
    if not validation:
        raise typer.Abort  # stopped by a signal
    return {
        "preset": preset,
        "parameters": trainer.model.num_parameters(),
        "bytes": (trainer.run.export / "model.safetensors").stat().st_size,
        "tokens": config.train.steps * trainer.config.train.batch * trainer.config.data.sequence,
        "val_loss": validation["loss"],
        "loss_by_decile": validation["loss_by_decile"],
        "unbinned_loss": validation["unbinned"]["loss"],
        "seconds": round(time.monotonic() - started, 1),
    }


def _look_into(run: Path) -> dict[str, Any]:
    """Analyse both models for the report; return what else the demo shows."""
    from tide_lm.analysis.analyze import OF_MEMORY, Analysis, AnalysisSettings, analyze
    from tide_lm.compress.forms import forms_named
    from tide_lm.compress.measure import measure
    from tide_lm.evaluation.texts import TextSettings
    from tide_lm.evaluation.words import word_gains
    from tide_lm.model.opened import open_model

    texts = TextSettings(window=128, stride=128, batch=32)
    base, tide = (open_model(str(run / kind)) for kind in PRESETS)
    found = {}
    for kind, opened in zip(PRESETS, (base, tide), strict=True):
        for what in Analysis:
            if what not in OF_MEMORY or opened.has_memory:
                with working(f"Looking at {what} of {kind}") as log:
                    found[what] = analyze(what, opened, AnalysisSettings(texts), log)
                opened.write(what.value, found[what])
    with working("Compressing the tables") as log:
        tide.write("compression", measure(tide, texts, forms_named(COMPRESSED), log))
    held_out, windows = texts.resolve(tide)
    [(name, text)] = held_out.items()
    with working("Looking for the words that gain most"):
        words = word_gains(tide, base, text, windows, LEAST, MOST)
    tide.write("words", {"against": base.name, **words})
    dropped = found[Analysis.layer_drop]["texts"][name]
    return {
        "loss_with_memory": math.log(dropped["full"]),
        "loss_without_memory": math.log(dropped["without_any"]),
        "written": _written(base, tide),
        "words": words,
    }


def _written(base: "OpenedModel", tide: "OpenedModel") -> dict[str, Any]:
    """Return what the models write after each prompt, TIDE with its memory and without."""
    from tide_lm.serve import Sampling
    from tide_lm.serve.text import Text, generate_plainly, prompt_ids, stop_ids

    layers = list(range(tide.shape.num_hidden_layers))
    ways: dict[str, tuple[OpenedModel, dict[str, Any]]] = {
        "base": (base, {}),
        "tide": (tide, {}),
        "without_memory": (tide, {"drop_memory_layers": layers}),
    }
    texts = []
    for seed, prompt in enumerate(PROMPTS):
        written: dict[str, Any] = {"prompt": prompt, "seed": seed}
        for name, (opened, options) in ways.items():
            ids, stop = prompt_ids(opened.tokenizer, prompt), stop_ids(opened.tokenizer, opened.model)
            text, drawn = Text(opened.tokenizer, ids[-1], stop), Sampling(TEMPERATURE, TOP_K, seed=seed)
            generate_plainly(opened.model, ids, NEW_TOKENS, drawn, stop, text.ids.append, **options)
            written[name] = str(text)
        texts.append(written)
    return {"temperature": TEMPERATURE, "top_k": TOP_K, "new_tokens": NEW_TOKENS, "texts": texts}


def _print(run: Path, result: dict[str, Any]) -> None:
    base, tide, words = result["base"], result["tide"], result["words"]
    names = [base["preset"], tide["preset"], "the same, memory off"]
    sizes = " and ".join(
        f"{model['preset']} ({model['parameters']:,} parameters, {model['bytes'] / 1e6:.1f} MB on disk, "
        f"{model['seconds']:.0f} s)"
        for model in (base, tide)
    )
    _say(
        f"Two models of one transformer were trained on {result['text_bytes'] / 1e6:.1f} MB of stories, "
        f"with the same {base['tokens']:,} tokens: {sizes}. The second is the first with "
        "memory tables."
    )
    rows: list[list[str]] = []
    for text in result["written"]["texts"]:
        ways = (text["prompt"] + text[way] for way in ("base", "tide", "without_memory"))
        rows += [[" ".join(each.split()) for each in ways], [""] * 3]
    drawn = f"temperature {TEMPERATURE}, top-k {TOP_K}, seeds from 0"
    print_table(
        f"What they write after {len(PROMPTS)} prompts ({drawn})",
        names,
        rows[:-1],
        numbers=False,
        width=WIDTH,
    )
    _say(
        "Memory off is the same TIDE model, with nothing from its tables added in any layer. Its loss on "
        f"held-out stories is then {result['loss_without_memory']:.3f} nats per token instead of "
        f"{result['loss_with_memory']:.3f} (1 nat less: 2.7 times the probability)."
    )
    print_table(
        f"Held-out words with the largest mean gain of TIDE over the base, of the {words['words']:,} words "
        f"that occur {LEAST} times or more (TIDE predicts {words['better']:,} of these better)",
        ["word", "times", "nats", "the place where it gains most"],
        [
            (word["word"], word["times"], f"{word['gain']:+.2f}", _around(word["sentence"], 48))
            for word in words["largest"]
        ],
        numbers=False,
        width=WIDTH,
    )
    for table in overview.losses(open_runs([run / kind for kind in PRESETS])):
        print_table(table.caption, table.columns, table.rows, width=WIDTH)
    ratio = math.exp(base["val_loss"] - tide["val_loss"])
    _say(
        "In short: in stories that neither model has read, TIDE gives the token that really follows "
        f"{ratio:.2f} times the probability that its base gives it (a geometric mean). It has more "
        "parameters, but the tables that hold them are only looked up. This is one seed of two tiny models: "
        "a first look."
    )


def _say(text: str) -> None:
    typer.echo(textwrap.fill(text, WIDTH) + "\n")


def _around(sentence: str, width: int) -> str:
    """Return a sentence, or what of it fits around the word between asterisks."""
    if len(sentence) <= width:
        return sentence
    within = width - 8  # both ends may be marked as cut
    start = max(0, min(sentence.index("*") - within // 2, len(sentence) - within))
    shown = sentence[start : start + within]
    shown = shown if start + within == len(sentence) else shown.rpartition(" ")[0] + " ..."
    return "... " + shown.partition(" ")[2] if start else shown
