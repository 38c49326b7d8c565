"""Names of models on the Hugging Face Hub, and whether it answers."""

import re
import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

_NAME = re.compile(r"(?:[^\W_][\w.-]*/)?[^\W_][\w.-]*", re.ASCII)
_PATIENCE = 3  # seconds


def may_be_name(model: str) -> bool:
    """Tell whether this may be NAME or OWNER/NAME on the Hub: an owner is no folder here, and not `runs`."""
    owner, slash, _ = model.partition("/")
    return bool(_NAME.fullmatch(model)) and not (slash and (owner == "runs" or Path(owner).exists()))


def check(model: str, hint: str) -> None:
    """Check that the Hub answers, or that the model was fetched before; an error gives the hint too."""
    from huggingface_hub import constants, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(model, "config.json"), str):
        return
    if constants.HF_HUB_OFFLINE:
        reason = "HF_HUB_OFFLINE keeps it from being fetched from the Hugging Face Hub"
    elif not _answers(constants.ENDPOINT):
        reason = f"the Hugging Face Hub ({constants.ENDPOINT}) does not answer"
    else:
        return
    raise ValueError(f"there is no {model} here, and {reason}: {hint}")


def _answers(address: str) -> bool:
    place = urlsplit(address)
    if place.scheme in getproxies():
        return True  # which only a request would tell
    try:
        port = place.port or {"http": 80}.get(place.scheme, 443)
        socket.create_connection((place.hostname or "", port), timeout=_PATIENCE).close()
    except OSError:
        return False
    return True
