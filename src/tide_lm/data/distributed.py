"""A preparation through datatrove: on this machine, or on a Ray or a Slurm cluster.

All machines see the same disk and have tide-lm installed. Ray connects to the cluster that it finds
(RAY_ADDRESS), or starts one on this machine. The result is that of `prepare.prepare`, byte for byte. With
`local` and `ray`, datatrove waits for ever for a task that was killed, for example for want of memory: stop
the call and give it again.
"""

import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tide_lm import __version__
from tide_lm.data import sources, tokenizers
from tide_lm.data.corpus import Corpus, split_of
from tide_lm.data.prepare import Settings, save_tokenizer
from tide_lm.data.shards import Manifest
from tide_lm.data.stages import FORMAT, Assemble, Encode, Work, WorkingFolder
from tide_lm.run import files
from tide_lm.run.optional import require
from tide_lm.spec.names import suggestion

EXECUTORS = {
    "local": "LocalPipelineExecutor",
    "ray": "RayPipelineExecutor",
    "slurm": "SlurmPipelineExecutor",
}
# Parameters of executors that this file decides, or that would leave tasks out.
_NO_OPTIONS = {"pipeline", "tasks", "depends", "logging_dir", "skip_completed", "local_tasks"}
_NO_OPTIONS |= {"local_rank_offset", "job_id_retriever"}


class OptionError(ValueError):
    """An option that the executor does not have, or one that it lacks."""


@dataclass(frozen=True)
class Submitted:
    """Slurm jobs that wait for one another; the last makes the folder."""

    jobs: list[str]
    logs: Path


def prepare(
    settings: Settings, out: str | Path, *, executor: str, tasks: int, options: Mapping[str, Any]
) -> Manifest | Submitted:
    """Write the source's text as token shards into the new folder `out`, or submit jobs that do.

    `options` go to datatrove's executor. Each task reads parts of the source (files, or a dataset's shards)
    that follow one another; tasks beyond their number have nothing to encode. After a failure, the same call
    runs the tasks that are left.
    """
    check_options(executor, options)
    out = Path(out).absolute()
    parts = sources.parts(_absolute(settings.source), settings.text_field)
    folder = WorkingFolder(out)
    with files.claimed(out, "prepared"):
        _start(folder, settings, parts, tasks)
        stages = {"encode": (Encode(folder, parts), tasks), "assemble": (Assemble(folder), 1)}
        if executor == "slurm":
            return _submit(folder, stages, options)
        _run(folder, stages, executor, options)
        shutil.rmtree(folder.path)
        return Manifest.read(out)


def check_options(executor: str, options: Mapping[str, Any]) -> None:
    """Check that an executor has these options, and needs no others."""
    parameters = inspect.signature(_executor(executor)).parameters
    known = {name: parameter for name, parameter in parameters.items() if name not in _NO_OPTIONS}
    for name in options:
        if name not in known:
            hint = suggestion(name, known)
            raise OptionError(f"the executor {executor} has no option {name!r}: {hint}")
    needed = [name for name, parameter in known.items() if parameter.default is parameter.empty]
    if missing := [name for name in needed if name not in options]:
        cure = " ".join(f"--executor-option {name}=..." for name in missing)
        raise OptionError(f"the executor {executor} needs {' and '.join(missing)}: add {cure}")


def _executor(name: str) -> Any:
    if name == "ray":
        require("ray", "--executor ray", extra="ray")
    return getattr(require("datatrove.executor", f"--executor {name}"), EXECUTORS[name])


def _absolute(source: str) -> str:
    """Return a source that tasks in other folders find too."""
    found_anywhere = source in sources.BUILT_IN or source.startswith("hf:")
    return source if found_anywhere else str(Path(source).absolute())


def _start(folder: WorkingFolder, settings: Settings, parts: Sequence[sources.Part], tasks: int) -> None:
    """Make the working folder, or check that it is of the same call, which continues."""
    asked: dict[str, Any] = {"settings": settings, "parts": [part.name for part in parts]}
    asked |= {"tasks": tasks, "version": __version__, "format": FORMAT}
    if folder.is_started():
        found = folder.read()
        if other := [name for name, value in asked.items() if getattr(found, name) != value]:
            raise ValueError(
                f"{folder.path} has unfinished work with other {' and '.join(other)}: "
                "give the same call to the same version of tide-lm to finish it, or remove the folder"
            )
        _check_no_job_is_left(folder)
        return
    if settings.tokenizer is not None:
        tokenizers.check(settings.tokenizer)
    split = split_of(parts, settings.validation)

    def work(draft: Path) -> Work:
        return Work(**asked, vocabulary=save_tokenizer(settings, Corpus(parts, split), draft), split=split)

    folder.make(work)


def _run(
    folder: WorkingFolder, stages: Mapping[str, tuple[Any, int]], executor: str, options: Mapping[str, Any]
) -> None:
    """Run one stage after another, each to its end."""
    if executor == "local":
        options = {"workers": os.cpu_count(), **options}
    for stage, (step, tasks) in stages.items():
        logs = folder.logs / stage
        run = _executor(executor)(pipeline=[step], tasks=tasks, logging_dir=str(logs), **options)
        try:
            run.run()
        except Exception as error:
            raise _failure(folder, stage, str(error) or repr(error)) from error
        if left := run.get_incomplete_ranks(skip_completed=True):  # the Ray executor raises nothing
            raise _failure(folder, stage, _last_line(logs / "logs" / f"task_{left[0]:05d}.log"))


def _failure(folder: WorkingFolder, stage: str, cause: str) -> ValueError:
    return ValueError(
        f"the stage {stage!r} failed ({cause}): its logs are in {folder.logs / stage / 'logs'}; "
        f"give the same call again to continue, or remove {folder.path} to start anew"
    )


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8").split("\n") if log.exists() else []
    return next(
        (line for line in reversed(lines) if line.strip()), "a task was killed before it could log why"
    )


def _submit(
    folder: WorkingFolder, stages: Mapping[str, tuple[Any, int]], options: Mapping[str, Any]
) -> Submitted:
    """Submit all stages to Slurm, each to start when the one before has succeeded."""
    if shutil.which("sbatch") is None:
        raise ValueError("--executor slurm calls sbatch, which is not here: run it on a login node")
    options = dict(options)
    name = options.pop("job_name", folder.out.name)
    # A job whose predecessor failed would wait for ever.
    arguments = {"kill-on-invalid-dep": "yes", **(options.pop("sbatch_args", None) or {})}
    if not {"env_command", "condaenv", "venv_path"} & set(options):
        options["env_command"] = f'export PATH="{Path(sys.executable).parent}:$PATH"'
    jobs: list[Any] = []
    for stage, (step, tasks) in stages.items():
        job = _executor("slurm")(
            pipeline=[step],
            tasks=tasks,
            logging_dir=str(folder.logs / stage),
            job_name=f"{name}-{stage}",
            sbatch_args=arguments,
            depends=jobs[-1] if jobs else None,
            **options,
        )
        jobs.append(job)
    try:
        jobs[-1].run()  # and those that it depends on
    except subprocess.CalledProcessError as error:
        raise ValueError(
            f"sbatch failed (exit status {error.returncode}, its message is above): change --executor-option"
        ) from error
    finally:
        ids = [str(job.job_id) for job in jobs if job.job_id not in (None, -1)]
        files.write_atomically(folder.jobs, json.dumps(ids))
    return Submitted(ids, folder.logs)


def _check_no_job_is_left(folder: WorkingFolder) -> None:
    if not folder.jobs.exists() or shutil.which("squeue") is None:
        return
    ids = json.loads(folder.jobs.read_text())
    command = ["squeue", "--noheader", f"--jobs={','.join(ids)}"]
    if ids and subprocess.run(command, capture_output=True, text=True).stdout.strip():
        raise ValueError(
            f"jobs of {folder.path} are still in Slurm's queue: wait for them, or `scancel {' '.join(ids)}`"
        )
