"""VRAM and SSD by number of blocks and precision: figure 4."""

from dataclasses import replace
from typing import Any

from tide_lm.spec import estimate
from tide_lm.spec.config import ModelConfig
from tide_lm.spec.presets import PAPER_BLOCKS


def footprint(model: ModelConfig) -> dict[str, Any]:
    """Return bytes that must be in VRAM and bytes of tables that may be on SSD, the model's K included."""
    rows = []
    for blocks in sorted({0, *PAPER_BLOCKS, model.num_memory_blocks}):
        shape = replace(model, num_memory_blocks=blocks)
        rows += [
            {
                "blocks": blocks,
                "bits": bits,
                "vram_bytes": estimate.resident_bytes(shape, bits),
                "ssd_bytes": estimate.table_bytes(shape, bits),
            }
            for bits in estimate.PRECISIONS
        ]
    return {"blocks": model.num_memory_blocks, "rows": rows}
