"""Run transformers' own OpenAI server with the classes of this package, so that no code of a folder runs.

The server looks classes up by name in transformers itself.
"""

import os
import sys
import threading
from pathlib import Path
from types import FrameType

import uvicorn
from huggingface_hub.constants import HF_HUB_CACHE

from tide_lm.model import TideForCausalLM

GRACE = 5.0  # seconds that requests have to finish after a signal


class Server(uvicorn.Server):
    """Ends soon after a signal, instead of waiting for a thread that generates."""

    stopped_by = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not Server.stopped_by:
            Server.stopped_by = sig
            timer = threading.Timer(GRACE, os._exit, [128 + sig])
            timer.daemon = True
            timer.start()
        super().handle_exit(sig, frame)


if __name__ == "__main__":
    sys.modules["transformers"].TideForCausalLM = TideForCausalLM  # type: ignore[attr-defined]
    uvicorn.Server = Server  # type: ignore[misc]
    Path(HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)  # which it lists
    from transformers.cli.transformers import main  # which is to find the class there

    try:
        main()
    finally:
        if Server.stopped_by:
            os._exit(128 + Server.stopped_by)
