"""The README of an exported model: what it is, what it was trained on, and what was measured."""

import json
from pathlib import Path
from typing import Any

from tide_lm import __version__
from tide_lm.model import TideForCausalLM
from tide_lm.run_config import RunConfig


def model_card(
    name: str, config: RunConfig, model: TideForCausalLM, tokens: int, validation: dict[str, Any]
) -> str:
    """Markdown with the hub's header; every number is the run's own."""
    settings = config.to_dict()
    settings["data"]["path"] = data = Path(config.data.path).name  # the rest may be private
    blocks = model.config.num_memory_blocks
    kind = f"A TIDE model with {blocks} memory blocks" if blocks else "A base model (Llama, no memory)"
    deciles = [
        f"| {decile} | {'-' if loss is None else f'{loss:.3f}'} | {tokens:,} |"
        for decile, (loss, tokens) in enumerate(
            zip(validation["loss_by_decile"], validation["tokens_by_decile"], strict=True)
        )
    ]
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            "pipeline_tag: text-generation",
            "tags: [tide]",
            "---",
            f"# {name}",
            "",
            f"{kind}, preset `{config.model.preset}`, {model.num_parameters():,} parameters, trained with "
            f"`tide-lm` {__version__} for {validation['step']:,} steps on {tokens:,} tokens of `{data}`.",
            "",
            *([f"Tables: {config.optim.table_policy}.", ""] if blocks else []),
            f"Held-out loss: {validation['loss']:.4f} nats a token ({validation['tokens']:,} tokens).",
            "",
            "| decile of the target's frequency | loss | tokens |",
            "|---|---|---|",
            *deciles,
            "",
            "Open it with `pip install tide-lm`, then `import tide_lm` and "
            "`AutoModelForCausalLM.from_pretrained(...)`.",
            "",
            "```json",
            json.dumps(settings, indent=2),
            "```",
            "",
        ]
    )
