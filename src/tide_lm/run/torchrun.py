"""What torchrun tells the processes that it starts; nothing here loads torch."""

import os


def started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def restarted() -> bool:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
