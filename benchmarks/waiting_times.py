"""Measure how long `.ci/run` takes, and `make test` within it, in a clone of this commit.

Run it while the machine does nothing else.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

from tide_lm.run.provenance import write_record

ROOT = Path(__file__).parents[1]
# What `.ci/run` does, step by step; nothing is installed before.
STEPS = {
    "environments": ["make", "--jobs=2", "environments"],
    "test": ["make", "test"],
    "others": ["make", "--old-file=test", "test-all"],
}


def measure(folder: Path) -> dict[str, float]:
    """Return the seconds of each step by its name. A step that fails ends the measurement."""
    clone, seconds = folder / "clone", {}
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    for name, command in STEPS.items():
        started = time.monotonic()
        subprocess.run(command, cwd=clone, check=True, env=os.environ | {"PIP_NO_CACHE_DIR": "1"})
        seconds[name] = round(time.monotonic() - started, 1)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = {"seconds": measure(Path(folder))}
    print(json.dumps(result, indent=2))
    if args.json:
        write_record(args.json, result)


if __name__ == "__main__":
    main()
