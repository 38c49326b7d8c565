"""Runs of the study that are made up, as they are kept on disk."""

import json

from studies.results import Kept

TOKENS = 1000


def keep(folder, model, recipe, k, loss, seed=0, size="small", curve=None, rare=0.0, common=0.0, **results):
    """A run whose rare and common tokens gain so much over losses of 10 and 3."""
    path = folder / f"{size}-{model}-{k}-{recipe.replace(' ', '-')}-{seed}"
    (path / "results").mkdir(parents=True)
    record = {
        "model": model,
        "recipe": recipe,
        "size": size,
        "k": k,
        "seed": seed,
        "tokens": TOKENS,
        "parameters": 10,
        "val_loss": loss,
        "loss_by_decile": [10 - rare, *[5.0] * 8, 3 - common],
    }
    validation = {"step": 1, **by_frequency(loss, record["loss_by_decile"])}
    for name, value in {"study": record, "validation": validation, **results}.items():
        (path / "results" / f"{name}.json").write_text(json.dumps(value) + "\n")
    points = curve or [(500, loss + 1), (TOKENS, loss)]
    lines = [
        json.dumps({"step": tokens, "tokens": tokens, "loss": value, "validation": {"loss": value}})
        for tokens, value in points
    ]
    (path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return Kept(path)


def by_frequency(loss, deciles):
    losses = {"rare": deciles[0], "mid": 5.0, "common": deciles[-1], "unbinned": 7.12}
    found = {name: {"loss": value, "tokens": 19} for name, value in losses.items()}
    return {**found, "loss": loss, "tokens": 100, "loss_by_decile": deciles, "tokens_by_decile": [9] * 10}
