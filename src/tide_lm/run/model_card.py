"""The README of an exported model: what it is, what it was trained on, and what was measured."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tide_lm import __version__
from tide_lm.run.optional import ELSEWHERE
from tide_lm.run.settings import ModelSection, RunConfig
from tide_lm.spec.estimate import count_parameters


def model_card(name: str, config: RunConfig, tokens: int, results: Mapping[str, dict[str, Any]]) -> str:
    """Return the card in Markdown; every number is the run's own.

    `results` are named as in results/: validation, and perplexity and benchmarks if there are any.
    """
    settings = config.to_dict()
    settings["data"]["path"] = data = Path(config.data.path).name  # other parts of the path may be private
    settings["model"]["start"] = Path(config.model.start).name
    shape, validation = config.model.shape(), results["validation"]
    blocks = shape.num_memory_blocks
    kind = f"A TIDE model with {blocks} memory blocks" if blocks else "A base model (Llama, no memory)"
    return titled(
        name,
        [
            f"{kind}, {_origin(config.model)}, {count_parameters(shape).total:,} parameters, "
            f"trained with `tide-lm` {__version__} for {validation['step']:,} steps on {tokens:,} tokens of "
            f"`{data}`.",
            "",
            *([f"Tables: {config.table_policy}.", ""] if blocks else []),
            f"Held-out loss: {validation['loss']:.4f} nats per token ({validation['tokens']:,} tokens).",
            "",
            *_deciles(validation),
            *_perplexities(results.get("perplexity", {}).get("texts", {})),
            *(_benchmarks(results["benchmarks"]) if "benchmarks" in results else []),
            f"Install the package that opens it ({ELSEWHERE}), then `import tide_lm` and call "
            "`AutoModelForCausalLM.from_pretrained(...)`.",
            "",
            "```json",
            json.dumps(settings, indent=2),
            "```",
            "",
        ],
    )


def titled(name: str, lines: Iterable[str], base: str | None = None) -> str:
    """Return lines with the Hub's header; `base` is the model on the Hub that this one was made from."""
    hub = ["library_name: transformers", "pipeline_tag: text-generation", "tags: [tide]"]
    hub += [] if base is None else [f"base_model: {base}"]
    return "\n".join(["---", *hub, "---", f"# {_plain(name)}", "", *lines])


def _origin(model: ModelSection) -> str:
    return f"preset `{model.preset}`" if model.preset else f"from `{_plain(model.name)}`"


def _deciles(validation: dict[str, Any]) -> list[str]:
    both = zip(validation["loss_by_decile"], validation["tokens_by_decile"], strict=True)
    rows = [(decile, _number(loss, 3), f"{tokens:,}") for decile, (loss, tokens) in enumerate(both)]
    return _table(["decile of the target's frequency", "loss", "tokens"], rows)


def _perplexities(texts: Mapping[str, dict[str, Any]]) -> list[str]:
    rows = [
        (
            name,
            *(_number(text[key], 3) for key in ("perplexity", "word_perplexity", "bits_per_byte")),
            *(_number(text[key], 0) for key in ("window", "stride")),
        )
        for name, text in texts.items()
    ]
    columns = ["text", "perplexity per token", "per word", "bits per byte", "window", "stride"]
    return _table(columns, rows) if rows else []


def _benchmarks(result: dict[str, Any]) -> list[str]:
    """Return the table of benchmarks, in the order of the paper's columns."""

    def percent(share: float | None) -> str:
        return _number(share and 100 * share, 1)

    rows = []
    for name, task in result["tasks"].items():
        measured = percent(task["score"]), percent(task["stderr"]), task["metric"]
        rows.append((name, *measured, f"{task['samples']:,}", task["split"]))
    rows.append(("average", percent(result["average"]), "", "", "", ""))
    rows.append(("LAMBADA perplexity", _number(result["lambada_perplexity"], 2), "", "", "", ""))
    limit = f", of the first {result['limit']:,} samples of each task" if result["limit"] else ""
    return [
        f"Zero-shot benchmarks in percent{limit}:",
        "",
        *_table(["task of lm-eval", "score", "±", "metric", "samples", "split"], rows),
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return a table in Markdown, and an empty line after it."""
    head, *body = (f"| {' | '.join(_plain(str(cell)) for cell in line)} |" for line in (columns, *rows))
    return [head, "|---" * len(columns) + "|", *body, ""]


def _plain(text: str) -> str:
    """Put text in one line, and escape what would end a table's cell."""
    return " ".join(text.split()).replace("|", r"\|")
