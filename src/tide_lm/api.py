"""The functions of the package: what the commands do, for notebooks and scripts.

Heavy imports are inside them, so that a wrong call is an error at once.
"""

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tide_lm.run import files, strict
from tide_lm.run.directory import RunDirectory, check_exists, check_results, exported, results_folder
from tide_lm.run.settings import OptimSection
from tide_lm.run.torchrun import started_by_torchrun
from tide_lm.spec import recipes
from tide_lm.spec.config import Residence
from tide_lm.spec.form import Form
from tide_lm.spec.recipes import Recipe

if TYPE_CHECKING:
    from torch import nn

    from tide_lm.model.opened import OpenedModel

PathLike = str | os.PathLike[str]
Log = Callable[[str], None]
Begin = Callable[[int], Callable[[int], None]]


def _ignore(line: str) -> None:
    pass


def load(
    model: PathLike,
    *,
    step: int | None = None,
    counts: PathLike | None = None,
    run: PathLike | None = None,
    memory: str | None = None,
    device: str | None = None,
) -> "OpenedModel":
    """Open a run, a checkpoint, a folder or a name on the Hub, as all commands do.

    The result has the `model`, ready to generate, its `tokenizer`, and the `frequencies` of its tokens, from
    `counts` or from the data of its run. `step` chooses a checkpoint of a run, and `run` the folder that
    results go to. `memory` says where a packed model has its rows: "device", "cpu", "store", or "store:256"
    for a cache of 256 MiB. Without `device`, the model runs on a GPU, if there is one.

    Example: `model = tide_lm.load("runs/mine").model`
    """
    residence = None if memory is None else Residence.parse(str(memory))
    path, of_counts, results = _path("model", model), _optional("counts", counts), _optional("run", run)
    check_exists(str(path))
    if of_counts is not None and not of_counts.exists():
        raise ValueError(f"there is no {of_counts}: give prepared data or a file of counts")
    from tide_lm.model.opened import open_model

    return open_model(
        str(path),
        step=step,
        counts=of_counts,
        run=results,
        memory=residence,
        device=device,
        writes=False,
    )


def train(
    run: PathLike,
    settings: Mapping[str, Any] | PathLike | None = None,
    *,
    start: PathLike | None = None,
    resume: bool = False,
    allow_changes: bool = False,
    log: Log = print,
) -> dict[str, Any]:
    """Train a model in the new folder `run`, or `resume` a run; return its last validation.

    `settings` are a dict, by full name or by section, or a TOML file. What they leave out has the defaults of
    `tide-lm train`. `start` is a run or a folder with the model to start from.

    Example: `tide_lm.train("runs/mine", {"data.path": "data/mine", "model.preset": "tide-4e-tiny"})`
    """
    folder, begin = RunDirectory(_path("run", run)), _optional("start", start)
    file = Path(settings) if isinstance(settings, str | os.PathLike) else None
    given = [strict.unfolded(settings)] if file is None and settings is not None else []
    chosen = folder.settings(file, given, begin, resume)
    if not started_by_torchrun():
        from tide_lm.training.checks import check_run

        check_run(folder, chosen, resume, allow_changes)
    from tide_lm.run import process_group
    from tide_lm.training.trainer import Trainer

    with process_group.joined():
        shown = log if process_group.is_first() else _ignore
        trainer = Trainer(chosen, folder.path, shown, resume=resume, allow_changes=allow_changes)
        validation = trainer.train()
    if trainer.status:
        raise KeyboardInterrupt if trainer.stopped_by == signal.SIGINT else SystemExit(trainer.status)
    return validation


def evaluate(
    model: "PathLike | OpenedModel",
    texts: Mapping[str, PathLike] | Sequence[str] | PathLike | None = None,
    *,
    text_field: str = "text",
    window: int | None = None,
    stride: int | None = None,
    batch: int = 8,
    counts: PathLike | None = None,
    run: PathLike | None = None,
    memory: str | None = None,
    device: str | None = None,
    log: Log = _ignore,
) -> dict[str, dict[str, Any]]:
    """Return perplexity, and loss by decile where token frequencies are known, of each text by its name.

    `texts` are files, folders or globs, by name; without them, the run's held-out text is read. Windows have
    `window` tokens, one every `stride`. The results also go into results/ of the model's run, for its report.
    `counts`, `run`, `memory` and `device` are those of `load`.

    Example: `tide_lm.evaluate("runs/mine", {"wiki": "wiki.test.txt"})["wiki"]["perplexity"]`
    """
    opened = _to_measure(model, counts=counts, run=run, memory=memory, device=device)
    from tide_lm.evaluation.texts import TextSettings, evaluate_texts, write_texts

    settings = TextSettings(_texts(texts), text_field, window, stride, batch)
    found = evaluate_texts(opened, settings, log)
    write_texts(opened, found)
    return found


def analyze(
    what: str,
    model: "PathLike | OpenedModel",
    *,
    texts: Mapping[str, PathLike] | Sequence[str] | PathLike | None = None,
    text_field: str | None = None,
    window: int | None = None,
    stride: int | None = None,
    batch: int | None = None,
    words: Sequence[str] | None = None,
    delta: float | None = None,
    tokens: float | None = None,
    sequence: int | None = None,
    counts: PathLike | None = None,
    run: PathLike | None = None,
    memory: str | None = None,
    device: str | None = None,
    log: Log = _ignore,
) -> dict[str, Any]:
    """Return the numbers of one of the paper's analyses, which also go into results/ of the model's run.

    `what` is norms, updates, gradients, collapse, routing, layer-drop, distances, neighbours or footprint.
    Routing and layer-drop read `texts` as `evaluate` does. Neighbours are those of `words` too. In collapse,
    states collapsed that are nearer than `delta` of the mean norm. Updates are those of a training on so many
    `tokens`, in batches of `batch` sequences of `sequence` tokens. The other arguments are those of `load`.

    Example: `tide_lm.analyze("routing", "runs/mine")["by_layer"]`
    """
    from tide_lm.analysis import analyze as analyses

    chosen = analyses.named(what)
    of_texts = {"text_field": text_field, "window": window, "stride": stride}
    own = {"delta": delta, "tokens": tokens, "sequence": sequence, "batch": batch}
    given = {"text": texts, "counts": counts, "token": words, **of_texts, **own}
    for name in _given(given):
        if name not in analyses.READS[chosen]:
            argument = {"text": "texts", "token": "words"}.get(name, name)
            raise ValueError(f"{argument} does nothing with {chosen}: leave it out")
    opened = _to_measure(model, counts=counts, run=run, memory=memory, device=device)
    from tide_lm.evaluation.texts import TextSettings

    read = TextSettings(_texts(texts), **_given({**of_texts, "batch": batch}))
    listed = [words] if isinstance(words, str) else words or ()
    settings = analyses.AnalysisSettings(read, words=listed, **_given(own))
    found = analyses.analyze(chosen, opened, settings, log)
    opened.write(chosen.value, found)
    return found


def pack(
    model: "PathLike | OpenedModel",
    out: PathLike,
    *,
    bits: int = 4,
    group: int = 32,
    rank: float = 1.0,
    blocks: str = "even",
    counts: PathLike | None = None,
) -> dict[str, Any]:
    """Write the new folder `out`: the model with its tables in a store; return the sizes of the store.

    Numbers have `bits` bits, and a `group` of them shares a scale. `rank` is the share of the full rank to
    keep, of each table or of all together (`blocks="joint"`). The most frequent rows of `counts`, or of the
    run's data, are read first.

    Example: `tide_lm.pack("runs/mine", "mine-4bit", bits=4)["bytes"]`
    """
    folder, form = _path("out", out), Form(bits, group, rank, blocks)  # type: ignore[arg-type]
    files.check_free(folder)
    opened = _opened(model, counts=counts)
    from tide_lm.compress.pack import STORE
    from tide_lm.compress.pack import pack as pack_tables

    counts_V = None if opened.frequencies is None else opened.frequencies.counts_V
    header = pack_tables(opened.model_with_memory, folder, form, counts_V, opened.tokenizer.save_pretrained)
    whole = 2 * header.vocab_size * header.blocks * header.hidden
    return {
        "store": str(folder / STORE),
        "bits": header.bits,
        "ranks": list(header.ranks),
        "bytes": header.file_bytes,
        "relative_bytes": header.file_bytes / whole,
        "row_bytes": header.row_bytes,
        "stride": header.stride,
        "padding": header.padding,
    }


def upcycle(
    model: PathLike,
    out: PathLike,
    *,
    memory_blocks: int = 8,
    memory_values: bool = True,
    memory_value_scale: float = 1.0,
    memory_pairs: bool = False,
    seed: int = 0,
    begin: Begin = lambda total: lambda written: None,
) -> dict[str, Any]:
    """Write the new folder `out`: a TIDE model that computes what a Llama does; return its parameters.

    `model` is a folder, a run that has ended, or a name on the Hub. For progress, `begin` is called with the
    bytes to write, and what it returns with the bytes of each write.

    Example: `tide_lm.upcycle("my-llama", "my-tide", memory_blocks=8)`
    """
    name, folder = str(_path("model", model)), _path("out", out)
    for key, value, least in (("memory_blocks", memory_blocks, 1), ("seed", seed, 0)):
        strict.check(key, value, Annotated[int, least])
    files.check_free(folder)
    check_exists(name)
    from tide_lm.interop import upcycle as upcycling

    source = upcycling.open_source(exported(name))
    memory = {
        "num_memory_blocks": memory_blocks,
        "memory_values": memory_values,
        "memory_value_scale": memory_value_scale,
        "memory_pair_rows": source.config.vocab_size if memory_pairs else 0,
    }
    written = upcycling.upcycle(source, folder, memory, seed, begin)
    return {"folder": str(folder), **asdict(written)}


def param_groups(
    model: "nn.Module",
    lr: float,
    recipe: Recipe = recipes.DEFAULT,
    *,
    weight_decay: float = OptimSection.weight_decay,
    table_lr_multiple: float | None = None,
    table_weight_decay: float | None = None,
    gain_lr_multiple: float | None = None,
) -> list[dict[str, Any]]:
    """Return parameters in groups for an optimiser of torch, with the rates and decay of `tide-lm train`.

    Tables, and the gains of an upcycled model, have a multiple of `lr`, and tables have their own decay. What
    is not given is the recipe's. Schedules keep the multiples.

    Example: `torch.optim.AdamW(tide_lm.param_groups(model, lr=1e-3), betas=(0.9, 0.95))`
    """
    from torch import nn

    from tide_lm.model import TideConfig
    from tide_lm.training.optim import grouped

    if not isinstance(model, nn.Module):
        raise ValueError(f"the model is a {type(model).__name__}: give a torch module, as in load(...).model")
    strict.check("recipe", recipe, Recipe)
    configs = (getattr(module, "config", None) for module in model.modules())  # a wrapper may have none
    config = next((config for config in configs if isinstance(config, TideConfig)), None)
    given = {
        "weight_decay": weight_decay,
        "table_lr_multiple": table_lr_multiple,
        "table_weight_decay": table_weight_decay,
        "gain_lr_multiple": gain_lr_multiple,
    }
    chosen = {name: strict.plain(value) for name, value in _given(given).items()}
    defaults = recipes.optim_of(recipe, 1.0 if config is None else config.memory_gain_init)
    groups = grouped(model, strict.build(OptimSection, defaults | chosen, "param_groups"))
    rate = strict.check("lr", strict.plain(lr), float)
    return [{"lr": rate * group.pop("lr_multiple"), **group} for group in groups]


def _path(name: str, value: Any) -> Path:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ValueError(f"{name} is {value!r:.60}: give a path")
    return Path(value)


def _optional(name: str, value: Any) -> Path | None:
    return None if value is None else _path(name, value)


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _texts(texts: Any) -> dict[str, Path]:
    """Return texts by name: those of a dict, or files that are named by themselves."""
    if not isinstance(texts, Mapping):
        listed = [texts] if isinstance(texts, str | os.PathLike) else texts or ()
        paths = [_path("a text", text) for text in listed]
        texts = {path.name.split(".")[0]: path for path in paths}
        if len(texts) < len(paths):
            raise ValueError(f"two texts have one name in {', '.join(map(str, paths))}: give a dict of names")
    return {str(name): _path(f"the text {name!r}", path) for name, path in texts.items()}


def _opened(model: Any, **options: Any) -> "OpenedModel":
    """Open a model, or return one that `load` has opened."""
    if isinstance(model, str | os.PathLike):
        return load(model, **options)
    from tide_lm.model.opened import OpenedModel

    if not isinstance(model, OpenedModel):
        raise ValueError(f"model is {model!r:.60}: give a path, or what tide_lm.load returned")
    if given := [name for name, value in options.items() if value is not None]:
        raise ValueError(f"the model is open already, so {given[0]} does nothing: give it to tide_lm.load")
    return model


def _to_measure(model: Any, **options: Any) -> "OpenedModel":
    """Open a model whose results will be written, which must be possible."""
    opened = _opened(model, **options)
    check_results(opened.run, opened.path)
    results_folder(opened.run)
    return opened
