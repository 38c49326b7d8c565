"""A preparation as tasks on any machines that see the same disk: many encode, and one assembles the shards.

They meet in a working folder beside the one to make:

tide-lm.txt             says whose folder this is
work.json               what is asked for; it exists as long as work is left
tokenizer/              the tokenizer
encoded/00000/, ...     what each task made of its parts of the source
logs/                   the executor's logs
jobs.json               Slurm's job numbers

A task that is killed, or that runs twice, does no harm: its folder gets its name when it is complete.
"""

import json
import os
import shutil
from array import array
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tide_lm.data.corpus import SPLITS, Corpus, Tally
from tide_lm.data.prepare import Settings, Vocabulary, complete, write_tokens
from tide_lm.data.shards import MANIFEST, Shard, ShardWriter, stored
from tide_lm.data.sources import Part
from tide_lm.run import files

CHUNK_TOKENS = 2**20  # copied at once


@dataclass(frozen=True)
class Work:
    """What `work.json` holds: all that a task must know, and what tells one preparation from another."""

    settings: Settings
    parts: list[str]
    tasks: int
    version: str
    vocabulary: Vocabulary


class WorkingFolder:
    def __init__(self, out: Path) -> None:
        self.out, self.path = out, out.with_name(f"{out.name}.work")
        self.logs, self.jobs = self.path / "logs", self.path / "jobs.json"
        self._work, self._encoded = self.path / "work.json", self.path / "encoded"

    def make(self) -> None:
        """Make an empty folder; refuse to replace one that is not ours."""
        mark = self.path / "tide-lm.txt"
        if self.path.exists() and any(self.path.iterdir()) and not mark.exists():
            raise ValueError(
                f"{self.path} exists, and tide-lm did not make it: move it, or choose another --out"
            )
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        mark.write_text(f"`tide-lm prepare` makes {self.out} here, and then leaves only logs.\n")
        self._encoded.mkdir()

    def start(self, work: Work) -> None:
        """Open the folder to tasks, once it has its tokenizer."""
        files.write_atomically(self._work, json.dumps(asdict(work), indent=2) + "\n")

    def is_started(self) -> bool:
        return self._work.exists()

    def read(self) -> Work:
        values = json.loads(self._work.read_text(encoding="utf-8"))
        settings, vocabulary = Settings(**values.pop("settings")), Vocabulary(**values.pop("vocabulary"))
        return Work(settings=settings, vocabulary=vocabulary, **values)

    def encoded(self, task: int) -> Path:
        return self._encoded / f"{task:05d}"

    def scratch(self) -> TemporaryDirectory[str]:
        """Make a temporary folder for a task to write in."""
        return TemporaryDirectory(prefix=".", dir=self._encoded)

    def clear(self) -> None:
        """Remove all but the logs."""
        for folder in (self._encoded, self.path / "tokenizer"):
            shutil.rmtree(folder, ignore_errors=True)
        self._work.unlink(missing_ok=True)


class Stage:
    """A step of a datatrove pipeline; the data that such steps hand on are not used."""

    def __init__(self, folder: WorkingFolder) -> None:
        self.folder = folder

    def __repr__(self) -> str:
        return f"{type(self).__name__} {self.folder.out}"


class Encode(Stage):
    """One task of many: encodes its parts of the source, which follow one another."""

    def __init__(self, folder: WorkingFolder, parts: Sequence[Part]) -> None:
        super().__init__(folder)
        self.parts = parts

    def __call__(self, data: Any, rank: int, world_size: int) -> None:
        done = self.folder.encoded(rank)
        if done.exists():
            return
        work = self.folder.read()
        _use_own_cores_only()
        share = self.parts[len(self.parts) * rank // world_size : len(self.parts) * (rank + 1) // world_size]
        corpus = Corpus(share, work.settings.validation)
        with self.folder.scratch() as name:
            place = Path(name)
            with ExitStack() as opened:
                writers = {
                    split: opened.enter_context(closing(EncodedWriter(place, split, work.vocabulary.dtype)))
                    for split in SPLITS
                }
                counts = write_tokens(corpus, self.folder.path, work.vocabulary, writers)
            np.save(place / "counts.npy", counts)
            (place / "tally.json").write_text(json.dumps(asdict(corpus.tally)))
            for path in place.iterdir():
                files.sync(path)
            try:
                place.rename(done)
            except OSError:
                if not done.exists():  # else a second run of this task was faster
                    raise


class EncodedWriter:
    """One split of a task: its tokens in one file, and in another where each document ends."""

    def __init__(self, folder: Path, split: str, dtype: str) -> None:
        self._dtype, self._written, self._ends = stored(dtype), 0, array("q")
        self._tokens, self._path = (folder / f"{split}.bin").open("wb"), folder / f"{split}.ends.npy"

    def add(self, tokens: np.ndarray, ends: bool) -> None:
        self._tokens.write(tokens.astype(self._dtype).tobytes())
        self._written += len(tokens)
        if ends:
            self._ends.append(self._written)

    def close(self) -> None:
        self._tokens.close()
        np.save(self._path, np.array(self._ends, np.int64))


class Assemble(Stage):
    """One task: cuts shards from what was encoded, counts, and gives the result its name."""

    def __call__(self, data: Any, rank: int, world_size: int) -> None:
        if self.folder.is_started() and not (self.folder.out / MANIFEST).exists():
            with self.folder.scratch() as name:
                self._assemble(Path(name, "result"), self.folder.read())
        self.folder.clear()

    def _assemble(self, result: Path, work: Work) -> None:
        encoded = [self.folder.encoded(task) for task in range(work.tasks)]
        if missing := [task for task, folder in enumerate(encoded) if not folder.exists()]:
            raise ValueError(  # an executor may continue after a failure
                f"{len(missing)} of {len(encoded)} tasks of 'encode' failed, the first is {missing[0]}: "
                f"look into {self.folder.logs / 'encode'}, remove the cause and give the same call again"
            )
        result.mkdir()
        shutil.copytree(self.folder.path / "tokenizer", result / "tokenizer")
        tally, counts = Tally(), np.zeros(work.vocabulary.vocab_size, np.int64)
        for folder in encoded:
            tally.add(Tally(**json.loads((folder / "tally.json").read_text())))
            counts += np.load(folder / "counts.npy")
        splits = {split: assemble(encoded, split, work, result) for split in SPLITS}
        complete(result, work.settings, work.vocabulary, tally, counts, splits)
        files.check_free(self.folder.out)
        files.publish(result, self.folder.out)


def assemble(encoded: Sequence[Path], split: str, work: Work, result: Path) -> tuple[Shard, ...]:
    """Copy one split into shards, with the cuts that a single writer of all documents makes."""
    shard_tokens, dtype = work.settings.shard_tokens, stored(work.vocabulary.dtype)
    writer = ShardWriter(result, split, work.vocabulary.dtype, shard_tokens)
    for folder in encoded:
        ends = np.load(folder / f"{split}.ends.npy")
        first = start = 0
        while first < len(ends):
            filling = int(np.searchsorted(ends, start + shard_tokens - writer.open_tokens))
            last = min(filling, len(ends) - 1)
            stop = int(ends[last])
            for position in range(start, stop, CHUNK_TOKENS):
                count = min(CHUNK_TOKENS, stop - position)
                tokens = np.fromfile(folder / f"{split}.bin", dtype, count, offset=position * dtype.itemsize)
                writer.add(tokens, ends=0)
            writer.add(np.empty(0, dtype), ends=last + 1 - first)
            first, start = last + 1, stop
    return writer.finish()


def _use_own_cores_only() -> None:
    """Limit the tokenizer to the task's cores, where it would start a thread per core of the machine."""
    cores = int(os.environ.get("DATATROVE_CPUS_PER_TASK", 1))
    os.environ["RAYON_NUM_THREADS"] = str(max(cores, 1))
