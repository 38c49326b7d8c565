"""The README of an exported model: what it is, what it was trained on, and what was measured."""

import json

from tide_lm.model import TideForCausalLM
from tide_lm.run_config import RunConfig
from tide_lm.runs import RunDirectory


def model_card(config: RunConfig, model: TideForCausalLM, run: RunDirectory) -> str:
    """Markdown with the hub's header; every number is the run's own."""
    last = json.loads(run.metrics.read_text(encoding="utf-8").splitlines()[-1])
    validation = last["validation"]
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
            f"# {run.path.name}",
            "",
            f"{kind}, preset `{config.model.preset}`, {model.num_parameters():,} parameters, trained with "
            f"`tide-lm` for {last['step']:,} steps on {last['tokens']:,} tokens of `{config.data.path}`.",
            "",
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
            json.dumps(config.to_dict(), indent=2),
            "```",
            "",
        ]
    )
