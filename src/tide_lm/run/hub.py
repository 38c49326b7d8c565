"""Names of models on the Hugging Face Hub, and whether it answers."""

import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

_PATIENCE = 3  # seconds


def may_be_name(model: str) -> bool:
    """Tell whether this may be NAME or OWNER/NAME on the Hub: an owner is no folder here, and not `runs`."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    owner, slash, _ = model.partition("/")
    return not (slash and (owner == "runs" or Path(owner).exists()))


def check(name: str, hint: str, files: Sequence[str] = ("config.json",)) -> None:
    """Check that the Hub answers, or that one of these files was fetched before; an error gives the hint."""
    from huggingface_hub import constants, try_to_load_from_cache

    if any(isinstance(try_to_load_from_cache(name, file), str) for file in files):
        return
    if constants.HF_HUB_OFFLINE:
        reason = "HF_HUB_OFFLINE keeps it from being fetched from the Hugging Face Hub"
    elif not _answers(constants.ENDPOINT):
        reason = f"the Hugging Face Hub ({constants.ENDPOINT}) does not answer"
    else:
        return
    raise ValueError(f"there is no {name} here, and {reason}: {hint}")


def _answers(address: str) -> bool:
    place = urlsplit(address)
    if getproxies().keys() & {place.scheme, "all"}:
        return True  # which only a request would tell
    try:
        port = place.port or {"http": 80}.get(place.scheme, 443)
        socket.create_connection((place.hostname or "", port), timeout=_PATIENCE).close()
    except OSError:
        return False
    return True
