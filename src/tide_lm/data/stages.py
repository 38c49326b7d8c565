"""A preparation as tasks on any machines that see the same disk: many encode, and one assembles the shards.

They meet in a working folder beside the one to make:

tide-lm.txt             says whose folder this is
work.json               what is asked for; it exists as long as work is left
tokenizer/              the tokenizer
encoded/00000/, ...     what each task made of its parts of the source
manifest.json           that of the result, before it gets its name
logs/                   the executor's logs
jobs.json               Slurm's job numbers

A task that is killed, or that runs twice, does no harm: its folder gets its name when it is complete.
"""

import filecmp
import json
import os
import shutil
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tide_lm.data.corpus import SPLITS, Corpus, Tally
from tide_lm.data.prepare import Settings, Vocabulary, complete, write_tokens
from tide_lm.data.shards import MANIFEST, Shard, ShardWriter, stored
from tide_lm.data.sources import Part
from tide_lm.data.split import Split
from tide_lm.run import files

MARK = "tide-lm.txt"
FORMAT = 3  # of what tasks encode: 2 records the pieces, and 3 holds out enough


@dataclass(frozen=True)
class Work:
    """What `work.json` holds: all that a task must know, and what tells one preparation from another."""

    settings: Settings
    parts: list[str]
    tasks: int
    version: str
    vocabulary: Vocabulary
    split: Split = field(default_factory=Split)
    format: int = 1  # where work.json does not say


class WorkingFolder:
    def __init__(self, out: Path) -> None:
        self.out, self.path = out, out.with_name(f"{out.name}.work")
        self.logs, self.jobs = self.path / "logs", self.path / "jobs.json"
        self.manifest = self.path / MANIFEST
        self._work, self._encoded = self.path / "work.json", self.path / "encoded"

    def make(self, work: Callable[[Path], Work]) -> None:
        """Make the folder; `work` saves the tokenizer in it. Refuse to replace a folder that is not ours."""
        if self.path.exists() and any(self.path.iterdir()) and not (self.path / MARK).exists():
            raise ValueError(
                f"{self.path} exists, and tide-lm did not make it: move it, or choose another --out"
            )
        with files.write_folder(self.path) as folder:
            (folder / MARK).write_text(f"`tide-lm prepare` makes {self.out} here, then leaves only logs.\n")
            (folder / self._encoded.name).mkdir()
            (folder / self._work.name).write_text(json.dumps(asdict(work(folder)), indent=2) + "\n")

    def is_started(self) -> bool:
        return self._work.exists()

    def is_published(self) -> bool:
        """Tell whether the folder to make exists and was made here: its manifest is the one kept here."""
        manifests = self.manifest, self.out / MANIFEST
        return all(path.exists() for path in manifests) and filecmp.cmp(*manifests, shallow=False)

    def read(self) -> Work:
        values = json.loads(self._work.read_text(encoding="utf-8"))
        settings, vocabulary = Settings(**values.pop("settings")), Vocabulary(**values.pop("vocabulary"))
        split = Split(**values.pop("split", {}))
        return Work(settings=settings, vocabulary=vocabulary, split=split, **values)

    def encoded(self, task: int) -> Path:
        return self._encoded / f"{task:05d}"

    def scratch(self) -> TemporaryDirectory[str]:
        """Make a temporary folder for a task to write in."""
        return TemporaryDirectory(prefix=".", dir=self._encoded)

    def clear(self) -> None:
        """Remove all but the logs."""
        for folder in (self._encoded, self.path / "tokenizer"):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (self._work, self.manifest):  # in this order, since a task may be killed between
            file.unlink(missing_ok=True)


class Encode:
    """One task of many: encodes its parts of the source, which follow one another.

    As a step of a datatrove pipeline it is given data, which it does not use, and gives none.
    """

    def __init__(self, folder: WorkingFolder, parts: Sequence[Part]) -> None:
        self.folder, self.parts = folder, parts

    def __call__(self, data: Any, rank: int, world_size: int) -> None:
        done = self.folder.encoded(rank)
        if done.exists():
            return
        work = self.folder.read()
        _use_own_cores_only()
        share = self.parts[len(self.parts) * rank // world_size : len(self.parts) * (rank + 1) // world_size]
        corpus = Corpus(share, work.split)
        with self.folder.scratch() as name:
            place = Path(name)
            writers = {split: EncodedWriter(place, split, work.vocabulary.dtype) for split in SPLITS}
            counts = write_tokens(corpus, self.folder.path, work.vocabulary, writers)
            for writer in writers.values():
                writer.finish()
            np.save(place / "counts.npy", counts)
            (place / "tally.json").write_text(json.dumps(asdict(corpus.tally)))
            for path in place.iterdir():
                files.sync(path)
            try:
                place.rename(done)
            except OSError:
                if not done.exists():  # else a second run of this task was faster
                    raise


class EncodedWriter(ShardWriter):
    """Writes one split of a task as a shard, and each piece's length and whether a document ends with it."""

    def __init__(self, folder: Path, split: str, dtype: str) -> None:
        super().__init__(folder, split, dtype)
        self._pieces = array("q")

    def add(self, tokens: np.ndarray, ends: bool = True) -> None:
        super().add(tokens, ends=False)  # so that the shard goes on
        self._pieces.extend((len(tokens), ends))

    def finish(self) -> tuple[Shard, ...]:
        np.save(self._folder / f"{self._split}-pieces.npy", np.array(self._pieces, np.int64).reshape(-1, 2))
        return super().finish()


class Assemble:
    """One task: cuts shards from what was encoded, counts, and gives the result its name."""

    def __init__(self, folder: WorkingFolder) -> None:
        self.folder = folder

    def __call__(self, data: Any, rank: int, world_size: int) -> None:
        if self.folder.is_started() and not self.folder.is_published():
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
        complete(result, work.settings, work.vocabulary, work.split, tally, counts, splits)
        files.check_free(self.folder.out)  # another preparation may have made it meanwhile
        shutil.copyfile(result / MANIFEST, self.folder.manifest)
        files.publish(result, self.folder.out)


def assemble(encoded: Sequence[Path], split: str, work: Work, result: Path) -> tuple[Shard, ...]:
    """Copy the pieces of one split into shards, as a single writer of all documents does."""
    dtype = stored(work.vocabulary.dtype)
    writer = ShardWriter(result, split, work.vocabulary.dtype, work.settings.shard_tokens)
    for folder in encoded:
        if len(pieces := np.load(folder / f"{split}-pieces.npy")):
            with (folder / f"{split}-00000.bin").open("rb") as file:
                for length, ends in pieces:
                    writer.add(np.frombuffer(file.read(length * dtype.itemsize), dtype), bool(ends))
    return writer.finish()


def _use_own_cores_only() -> None:
    """Limit the tokenizer to the task's cores, where it would start a thread per core of the machine."""
    cores = int(os.environ.get("DATATROVE_CPUS_PER_TASK", 1))
    os.environ["RAYON_NUM_THREADS"] = str(max(cores, 1))
