"""The preparation as tasks that run apart, on any machines that see the same disk: encode, assemble, finish.

They meet in a working folder beside the one to make:

tide-lm.txt             says whose folder this is
work.json               what is asked for; it is there as long as work is left
result/                 the folder to make; the tokenizer is in it from the start
encoded/00000/, ...     what a task made of its parts of the source, which follow one another
assembled/00000.json    the shards that a task wrote
logs/                   those of the executor
jobs.json               the numbers that Slurm gave

A task that was killed, or that runs twice, does no harm: what it writes gets its name when it is whole.
"""

import json
import os
import shutil
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tide_lm.data.corpus import SPLITS, Corpus, Tally
from tide_lm.data.prepare import Settings, Vocabulary, complete, write_tokens
from tide_lm.data.shards import Manifest, Shard, ShardFile, is_full, stored
from tide_lm.data.sources import Part
from tide_lm.run import files

CHUNK_TOKENS = 2**20
_END = np.dtype("<i8")


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
        self.result, self.logs, self.jobs = self.path / "result", self.path / "logs", self.path / "jobs.json"
        self._work, self._encoded = self.path / "work.json", self.path / "encoded"
        self._assembled = self.path / "assembled"

    def make(self) -> None:
        """Makes the folder anew, but removes none that others made."""
        mark = self.path / "tide-lm.txt"
        if self.path.exists() and any(self.path.iterdir()) and not mark.exists():
            raise ValueError(
                f"{self.path} is in the way, and not of tide-lm: move it, or choose another --out"
            )
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir()
        mark.write_text(f"Here `tide-lm prepare` makes {self.out}. Once that is there, only logs are left.\n")
        self.result.mkdir()

    def start(self, work: Work) -> None:
        """Opens the folder to tasks, once the result has its tokenizer."""
        self._encoded.mkdir(exist_ok=True)
        self._assembled.mkdir(exist_ok=True)
        files.write_atomically(self._work, json.dumps(asdict(work), indent=2) + "\n")

    def is_started(self) -> bool:
        return self._work.exists()

    def read(self) -> Work:
        values = json.loads(self._work.read_text(encoding="utf-8"))
        settings, vocabulary = Settings(**values.pop("settings")), Vocabulary(**values.pop("vocabulary"))
        return Work(settings=settings, vocabulary=vocabulary, **values)

    def encoded(self, task: int) -> Path:
        return self._encoded / f"{task:05d}"

    def assembled(self, task: int) -> Path:
        return self._assembled / f"{task:05d}.json"

    def apart(self) -> TemporaryDirectory[str]:
        """A place of its own for a task to write in."""
        return TemporaryDirectory(prefix=".", dir=self._encoded)

    def check_done(self, stage: str, made: Sequence[Path]) -> None:
        """An executor may go on although a task failed."""
        if missing := [task for task, path in enumerate(made) if not path.exists()]:
            raise ValueError(
                f"{len(missing)} of {len(made)} tasks of {stage!r} failed, the first is {missing[0]}: "
                f"look into {self.logs / stage}, mend the cause and give the same call again"
            )

    def clear(self) -> None:
        """Leaves the logs alone."""
        for folder in (self._encoded, self._assembled):
            shutil.rmtree(folder, ignore_errors=True)
        self._work.unlink(missing_ok=True)


class Stage:
    """A step of a datatrove pipeline; the data that such steps hand on are not used."""

    def __init__(self, folder: WorkingFolder) -> None:
        self.folder = folder

    def __repr__(self) -> str:
        return f"{type(self).__name__} {self.folder.out}"


class Encode(Stage):
    """Task by task, the tokens of its parts: as the usual way makes them, but not yet cut into shards."""

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
        with self.folder.apart() as name:
            place = Path(name)
            with ExitStack() as opened:
                writers = {
                    split: opened.enter_context(closing(StreamWriter(place, split, work.vocabulary.dtype)))
                    for split in SPLITS
                }
                counts = write_tokens(corpus, self.folder.result, work.vocabulary, writers)
            np.save(place / "counts.npy", counts)
            (place / "tally.json").write_text(json.dumps(asdict(corpus.tally)))
            for path in place.iterdir():
                files.sync(path)
            try:
                place.rename(done)
            except OSError:
                if not done.exists():  # else a second run of this task was faster
                    raise


class StreamWriter:
    """One split of a task: its tokens in one file, and in another where each document ends."""

    def __init__(self, folder: Path, split: str, dtype: str) -> None:
        self._dtype, self._written = stored(dtype), 0
        self._tokens = (folder / f"{split}.bin").open("wb")
        self._ends = (folder / f"{split}.ends").open("wb")

    def add(self, tokens: np.ndarray, ends: bool) -> None:
        self._tokens.write(tokens.astype(self._dtype).tobytes())
        self._written += len(tokens)
        if ends:
            self._ends.write(_END.type(self._written).tobytes())

    def close(self) -> None:
        self._tokens.close()
        self._ends.close()


class Assemble(Stage):
    """Task by task, every so-many-th shard, copied from what was encoded."""

    def __call__(self, data: Any, rank: int, world_size: int) -> None:
        done = self.folder.assembled(rank)
        if done.exists():
            return
        work = self.folder.read()
        folders = [self.folder.encoded(task) for task in range(work.tasks)]
        self.folder.check_done("encode", folders)
        shards: dict[str, list[Shard]] = {}
        with self.folder.apart() as name:
            place = Path(name)
            for split in SPLITS:
                stream = Stream(folders, split, work.vocabulary.dtype)
                stretches = enumerate(stream.shards(work.settings.shard_tokens))
                shards[split] = [
                    stream.copy(stretch, ShardFile(place, split, number, work.vocabulary.dtype))
                    for number, stretch in islice(stretches, rank, None, world_size)
                ]
                for shard in shards[split]:
                    (place / shard.file).replace(self.folder.result / shard.file)
        record = {split: [asdict(shard) for shard in made] for split, made in shards.items()}
        files.write_atomically(done, json.dumps(record))


@dataclass(frozen=True)
class Stretch:
    """The tokens from `start` to `stop`, which are so many documents."""

    start: int
    stop: int
    documents: int


class Stream:
    """One split as all tasks encoded it, one after another."""

    def __init__(self, folders: Sequence[Path], split: str, dtype: str) -> None:
        self._files, self._dtype = [folder / f"{split}.bin" for folder in folders], stored(dtype)
        self._ends = [_mapped(folder / f"{split}.ends") for folder in folders]
        sizes = [file.stat().st_size // self._dtype.itemsize for file in self._files]
        self._starts = np.cumsum([0, *sizes]).tolist()
        self._first_documents = np.cumsum([0, *map(len, self._ends)])

    def shards(self, shard_tokens: int) -> Iterator[Stretch]:
        """Where shards begin and end. A few ends are looked at for each, however many documents there are."""
        documents = range(int(self._first_documents[-1]))
        first = start = 0
        while first < len(documents):

            def fills(document: int, start: int = start) -> bool:
                return is_full(self._end(document) - start, shard_tokens)

            last = min(bisect_left(documents, True, first, key=fills), documents[-1])
            stop = self._end(last)
            yield Stretch(start, stop, last + 1 - first)
            first, start = last + 1, stop

    def _end(self, document: int) -> int:
        task = int(np.searchsorted(self._first_documents, document, side="right")) - 1
        return self._starts[task] + int(self._ends[task][document - self._first_documents[task]])

    def copy(self, stretch: Stretch, shard: ShardFile) -> Shard:
        for file, start, stop in zip(self._files, self._starts, self._starts[1:], strict=False):
            low, high = max(start, stretch.start), min(stop, stretch.stop)
            for position in range(low, high, CHUNK_TOKENS):
                count, offset = min(CHUNK_TOKENS, high - position), position - start
                shard.add(np.fromfile(file, self._dtype, count, offset=offset * self._dtype.itemsize))
        assert shard.tokens == stretch.stop - stretch.start
        return shard.close(stretch.documents)


def _mapped(path: Path) -> np.ndarray:
    return np.memmap(path, _END, mode="r") if path.stat().st_size else np.empty(0, _END)


class Finish(Stage):
    """One task: counts and manifest, then the result gets its name, and the work is cleared away."""

    def __call__(self, data: Any, rank: int, world_size: int) -> None:
        if self.folder.result.exists():
            self._complete(self.folder.read())
            files.check_free(self.folder.out)
            files.publish(self.folder.result, self.folder.out)
        self.folder.clear()

    def _complete(self, work: Work) -> Manifest:
        records = [self.folder.assembled(task) for task in range(work.tasks)]
        self.folder.check_done("assemble", records)
        tally, counts = Tally(), np.zeros(work.vocabulary.vocab_size, np.int64)
        for folder in (self.folder.encoded(task) for task in range(work.tasks)):
            tally.add(Tally(**json.loads((folder / "tally.json").read_text())))
            counts += np.load(folder / "counts.npy")
        made = [json.loads(record.read_text()) for record in records]
        splits = {
            # The shards of a split went to the tasks in turn.
            split: tuple(
                Shard(**made[number % work.tasks][split][number // work.tasks])
                for number in range(sum(len(record[split]) for record in made))
            )
            for split in SPLITS
        }
        return complete(self.folder.result, work.settings, work.vocabulary, tally, counts, splits)


def _use_own_cores_only() -> None:
    """Else each task would start a thread per core of its machine; the executor says how many are its own."""
    cores = int(os.environ.get("DATATROVE_CPUS_PER_TASK", 1))
    os.environ["RAYON_NUM_THREADS"] = str(max(cores, 1))
