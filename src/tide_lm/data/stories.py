"""The stories that come with the package: whole books for children, one document per tale or chapter.

stories.md says which, and where they are from.
"""

import json
import lzma
from collections.abc import Iterator
from importlib import resources


def documents() -> Iterator[tuple[str, str]]:
    """Yield each tale or chapter, in the order of the books."""
    packed = resources.files("tide_lm.data").joinpath("stories.jsonl.xz").read_bytes()
    for number, line in enumerate(lzma.decompress(packed).splitlines(), 1):
        record = json.loads(line)
        yield f"{record['book']}/{number}", record["text"]
