"""Pairs of tokens and the contexts they share, for the study of contextual collapse (figures 2 and 6).

A template ends where the token stands: what follows cannot reach it in a causal model.
"""

import json
from importlib.resources import files

_READ = json.loads((files(__package__) / "contexts.json").read_text(encoding="utf-8"))
PAIRS = {category: tuple(map(tuple, pairs)) for category, pairs in _READ["pairs"].items()}
TEMPLATES = {category: tuple(templates) for category, templates in _READ["templates"].items()}
