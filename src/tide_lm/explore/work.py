"""Analyses that a visitor starts: in the background, one at a time, with the results of `tide-lm analyze`."""

import shlex
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from tide_lm.analysis.analyze import READS, Analysis, AnalysisSettings, analyze
from tide_lm.model.opened import OpenedModel
from tide_lm.run.directory import check_results, results_folder

Log = Callable[[str], None]


class StoppedError(Exception):
    """A visitor has stopped the work."""


@dataclass
class Work:
    """What runs, if anything does, what it said last, and what kept others from their end."""

    running: str | None = None
    said: str = ""
    stopped: bool = False
    faults: dict[str, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, what: str, work: Callable[[Log], None]) -> None:
        with self._lock:
            if self.running is not None:
                raise ValueError(f"{self.running} is running: wait for it, or stop it")
            self.running, self.said, self.stopped = what, "", False
            self.faults.pop(what, None)
        threading.Thread(target=self._run, args=(what, work), daemon=True).start()

    def stop(self, what: str) -> None:
        with self._lock:
            self.stopped |= self.running == what

    def _run(self, what: str, work: Callable[[Log], None]) -> None:
        try:
            work(self._log)
        except StoppedError:
            self.faults[what] = "it was stopped"
        except Exception as error:  # the visitor waits for an answer
            self.faults[what] = str(error) or type(error).__name__
        finally:
            self.running = None

    def _log(self, said: str) -> None:
        if self.stopped:
            raise StoppedError
        self.said = said


def analysis(opened: OpenedModel, what: str, counts: Path | None = None) -> Callable[[Log], None]:
    """Return the work of `tide-lm analyze`, on a copy of the model: visitors use the other meanwhile."""
    command = ["tide-lm", "analyze", what, opened.path]
    if counts is not None and "counts" in READS[Analysis(what)]:
        command += ["--counts", str(counts)]

    def work(log: Log) -> None:
        copy = replace(opened)  # without the weights, which it reads anew
        check_results(copy.run, copy.path)
        results_folder(copy.run)
        copy.write(what, analyze(Analysis(what), copy, AnalysisSettings(), log), shlex.join(command))

    return work
