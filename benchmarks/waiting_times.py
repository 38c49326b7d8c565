"""Measure how long a newcomer waits for the README's commands, and for `.ci/run`, in clones of this commit.

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
# Commands of one clone, one after the other; each of the two clones begins with nothing installed.
CLONES = (
    {"everything": [".ci/run"]},
    {"setup": ["make", "setup"], "test": ["make", "test"], "demo": ["make", "demo"]},
)


def measure(folder: Path) -> dict[str, float]:
    """Return the seconds of each command by its name. A command that fails ends the measurement."""
    seconds = {}
    for number, commands in enumerate(CLONES):
        clone, downloads = folder / str(number), folder / f"downloads-{number}"
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        for name, command in commands.items():
            started = time.monotonic()
            subprocess.run(command, cwd=clone, check=True, env=os.environ | {"PIP_CACHE_DIR": str(downloads)})
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
