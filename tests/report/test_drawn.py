"""Every number that the report shows of planted results is the one that was there when it was last looked at.

After a change that is meant, look at the report, call pytest on this file with TIDE_LM_KEEP=1, and read what
git shows of drawn.json.
"""

import json
import os
import re
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

from tide_lm.report import overview
from tide_lm.report.catalogue import FIGURES
from tide_lm.report.formatting import MINUS
from tide_lm.report.results import open_runs

KEPT = Path(__file__).with_name("drawn.json")
SIGNED = re.compile(rf"[{MINUS}+-]?[\d.,]*\d")


def drawn(panel) -> dict[str, list]:
    """Return what stands on a panel: points of lines and dots, corners of bars, and numbers of heat maps."""
    canvas, axes = plt.subplots()
    try:
        panel.draw(axes)
        found = {
            "lines": [np.transpose(line.get_xydata()) for line in axes.lines],
            "dots": [dots.get_offsets() for dots in axes.collections if len(dots.get_offsets())],
            "bars": [bar.get_patch_transform().transform(bar.get_path().vertices) for bar in axes.patches],
            "maps": [image.get_array() for image in axes.images],
        }
    finally:
        plt.close(canvas)
    return {kind: [rounded(values) for values in some] for kind, some in found.items() if some}


def rounded(values) -> list:
    """Return numbers with five digits, and None for what is not drawn."""
    flat = np.ma.filled(np.ma.asarray(values, dtype=float), np.nan).ravel()
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in flat]


def numbers(cells) -> list[str]:
    return [number for cell in cells for number in SIGNED.findall(cell)]


def shown(figure, runs) -> dict:
    return {
        "panels": [drawn(panel) for panel in figure.panels(runs)],
        "beside the paper's": [numbers(row.ours) for row in figure.compare(runs)],
        "tables": [[numbers(row) for row in table.rows] for table in figure.tables(runs)],
    }


def shown_first(runs) -> dict:
    """Return the numbers above all figures: of the runs, and of their losses."""
    return {
        "tables": [
            [numbers(row) for row in table.rows] for table in (overview.facts(runs), *overview.losses(runs))
        ],
        "headlines": [
            [found.group, *rounded([found.change]), *numbers([found.losses])]
            for found in overview.headlines(runs)
        ],
    }


@pytest.mark.parametrize("name", ["overview", *FIGURES])
def test_the_numbers_are_those_that_were_looked_at(name, two_runs):
    figure = FIGURES.get(name)
    runs = open_runs(two_runs[1:] if figure and figure.of_memory else two_runs)
    found = shown(figure, runs) if figure else shown_first(runs)
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if os.environ.get("TIDE_LM_KEEP"):
        kept[name] = found
        lines = (f"{json.dumps(figure)}: {json.dumps(kept[figure])}" for figure in sorted(kept))
        KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        pytest.skip("kept, and not compared")
    assert found == kept[name]
