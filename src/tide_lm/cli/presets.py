"""`tide-lm presets`: the models of the paper, what it states of them and what is assumed."""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from tide_lm.cli.options import AsJson, usage_errors
from tide_lm.cli.output import print_json, print_next, print_table
from tide_lm.spec import presets
from tide_lm.spec.estimate import count_parameters


def command(
    name: Annotated[str | None, typer.Argument(help="One preset in full, such as tide-8e-1b.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the paper's models and tiny ones: what the paper states of them, and what is assumed.

    Example: tide-lm presets tide-8e-1b
    """
    with usage_errors():
        chosen = [presets.get(known) for known in ([name] if name else presets.names())]
    if as_json:
        print_json([_record(preset) for preset in chosen])
    elif name:
        _print_one(chosen[0])
    else:
        _print_sizes([preset for preset in chosen if not preset.model.num_memory_blocks])
    print_next(f"tide-lm estimate {name or 'tide-8e-1b'}")


def _record(preset: presets.Preset) -> dict[str, Any]:
    model = asdict(preset.model)
    parameters = count_parameters(preset.model)
    return {
        "name": preset.name,
        "model": model,
        "stated": sorted(preset.stated),
        "assumed": sorted(model.keys() - preset.stated),
        "parameters": {**asdict(parameters), "total": parameters.total},
    }


def _print_one(preset: presets.Preset) -> None:
    source = {True: "stated by the paper", False: "assumed"}
    rows = [(key, value, source[key in preset.stated]) for key, value in asdict(preset.model).items()]
    print_table(preset.name, ["field", "value", "source"], rows, numbers=False)


def _print_sizes(bases: list[presets.Preset]) -> None:
    def cell(base: presets.Preset, *fields: str) -> str:
        values = "/".join(f"{getattr(base.model, field):,}" for field in fields)
        return values if base.stated.issuperset(fields) else f"{values} a"

    fields = {
        "d": ["hidden_size"],
        "layers": ["num_hidden_layers"],
        "heads/kv": ["num_attention_heads", "num_key_value_heads"],
        "FFN": ["intermediate_size"],
        "vocabulary": ["vocab_size"],
    }
    rows = []
    for base in bases:
        size = f"{count_parameters(base.model).backbone / 1e6:,.1f}M"
        rows.append((base.name, *(cell(base, *names) for names in fields.values()), size))
    print_table("Presets", ["name", *fields, "parameters"], rows)
    blocks = ", ".join(map(str, presets.PAPER_BLOCKS))
    typer.echo(
        "a: assumed; the rest is stated by the paper. With memory: tide-Ke-SIZE, such as tide-8e-1b,\n"
        f"for any number of blocks K (the paper's: {blocks})."
    )
