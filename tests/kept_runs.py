"""Runs of the study that are made up, as they are kept on disk."""

from studies import results
from tide_lm.run.settings import RunConfig

TOKENS = 1000


def keep(
    folder,
    model,
    recipe,
    k,
    loss,
    seed=0,
    size="small",
    curve=None,
    rare=0.0,
    common=0.0,
    name=None,
    settings=(),
    **measured,
):
    """Keep a run whose rare and common tokens gain so much over losses of 10 and 3."""
    preset = f"tide-{k}e-{size}" if k else f"base-{size}"
    by_decile = [10 - rare, *[5.0] * 8, 3 - common]
    points = curve or [(500, loss + 1), (TOKENS, loss)]
    record = {
        "name": name or f"{size}-{model}-{k}-{recipe.replace(' ', '-')}-{seed}",
        "model": model,
        "recipe": recipe,
        "size": size,
        "k": k,
        "seed": seed,
        "tokens": TOKENS,
        "parameters": 10,
        "val_loss": loss,
        "loss_by_decile": by_decile,
        "config": RunConfig.load(None, [f"model.preset={preset}", *settings]).to_dict(),
        "metrics": [
            {"step": tokens, "tokens": tokens, "loss": value, "validation": {"loss": value}}
            for tokens, value in points
        ],
        "results": {"validation": {"step": 1, **by_frequency(loss, by_decile)}, **measured},
    }
    results.add(folder, record)
    return results.Kept(record)


def by_frequency(loss, deciles):
    losses = {"rare": deciles[0], "mid": 5.0, "common": deciles[-1], "unbinned": 7.12}
    found = {name: {"loss": value, "tokens": 19} for name, value in losses.items()}
    return {**found, "loss": loss, "tokens": 100, "loss_by_decile": deciles, "tokens_by_decile": [9] * 10}
