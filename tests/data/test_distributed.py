"""The preparation in tasks: the same bytes as the usual way, whatever fails or is killed on the way."""

import gzip
import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from data.in_this_process import InThisProcess

from tide_lm.data import distributed, prepare, sources
from tide_lm.data.prepare import Settings
from tide_lm.data.shards import Manifest
from tide_lm.data.stages import Assemble, Encode, WorkingFolder
from tide_lm.run.optional import install

WORDS = ["every", "layer", "knows", "the", "token", "beneath", "the", "context", "and", "adds", "it"]


def texts(count: int, seed: int) -> list[str]:
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(WORDS, draw.integers(1, 300))) + f". {i}\n" for i in range(count)]


def jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Seven files of several kinds; two hold no text."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.txt").write_text("".join(texts(20, 0)))
    (folder / "b.jsonl").write_bytes(b"")
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(jsonl(texts(90, 1))))
    (folder / "d.jsonl").write_bytes(jsonl(["", ""]))
    (folder / "e.txt").write_text(texts(1, 2)[0])
    pyarrow.parquet.write_table(pyarrow.table({"text": texts(60, 3)}), folder / "f.parquet")
    (folder / "g.jsonl").write_bytes(jsonl(texts(40, 4)))
    return folder


@pytest.fixture(scope="module")
def settings(corpus) -> Settings:
    return Settings(str(corpus), train_tokenizer=300, validation=0.1, shard_tokens=3000)


@pytest.fixture(scope="module")
def usual(settings, tmp_path_factory) -> dict[str, bytes]:
    """The files that the usual way makes of the corpus."""
    return usual_way(settings, tmp_path_factory.mktemp("usual") / "out")


def usual_way(settings: Settings, out: Path) -> dict[str, bytes]:
    prepare.prepare(settings, out)
    return files_of(out)


@pytest.fixture(params=["here", pytest.param("datatrove", marks=pytest.mark.cluster)])
def in_tasks(request, monkeypatch):
    """Prepares in tasks: by datatrove, or by what stands in for it."""
    if request.param == "here":
        monkeypatch.setattr(distributed, "_executor", lambda name: InThisProcess)

    def prepare_in_tasks(settings: Settings, out: Path, tasks: int = 2, workers: int = 1) -> Manifest:
        options = {"workers": workers}
        made = distributed.prepare(settings, out, executor="local", tasks=tasks, options=options)
        assert isinstance(made, Manifest)
        return made

    return prepare_in_tasks


@pytest.mark.parametrize(("tasks", "workers"), [(1, 1), (2, 2), (3, 1), (11, 1)])
def test_any_number_of_tasks_gives_the_files_of_the_usual_way(
    in_tasks, settings, usual, tmp_path, tasks, workers
):
    manifest = in_tasks(settings, tmp_path / "out", tasks, workers)
    assert files_of(tmp_path / "out") == usual
    assert len(manifest.splits["train"]) > 5
    assert len(manifest.splits["validation"]) > 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_source_may_be_named_from_here(in_tasks, settings, corpus, usual, tmp_path, monkeypatch):
    """Only the manifest says how: tasks run in other folders."""
    monkeypatch.chdir(corpus.parent)
    manifest = in_tasks(replace(settings, source=corpus.name), tmp_path / "out", workers=2)
    assert manifest.source["source"] == corpus.name
    made = files_of(tmp_path / "out")
    assert {name for name in usual if made[name] != usual[name]} == {"manifest.json"}


@pytest.mark.parametrize("name", sources.BUILT_IN)
def test_a_text_that_comes_with_the_package_is_one_part(name, in_tasks, tmp_path, monkeypatch):
    documents = [("a", texts(1, 0)[0]), ("b", texts(1, 1)[0])]
    monkeypatch.setitem(sources.BUILT_IN, name, lambda: iter(documents))
    settings = Settings(name, train_tokenizer=300, validation=0)
    in_tasks(settings, tmp_path / "out", 2)
    assert files_of(tmp_path / "out") == usual_way(settings, tmp_path / "usual")


def test_the_shards_of_a_dataset_are_its_parts(in_tasks, tmp_path):
    pytest.importorskip("datasets", reason="the extra `data` is not installed")
    folder = tmp_path / "mine"
    folder.mkdir()
    for number in range(3):
        (folder / f"train-{number}.jsonl").write_bytes(jsonl(texts(20, number)))
    source = f"hf:{folder}"
    assert [part.name for part in sources.parts(source)] == [f"{source}, shard {i} of 3" for i in range(3)]
    found = [text for part in sources.parts(source) for _, text in part.documents()]
    assert found == [*texts(20, 0), *texts(20, 1), *texts(20, 2)]
    settings = Settings(source, train_tokenizer=300, validation=0.1, shard_tokens=1000)
    in_tasks(settings, tmp_path / "out", workers=2)
    assert files_of(tmp_path / "out") == usual_way(settings, tmp_path / "usual")


def test_a_damaged_file_is_named_and_once_it_is_mended_the_same_call_goes_on(
    in_tasks, corpus, tmp_path, tokenizer
):
    settings, damaged, whole = part_of(corpus, tmp_path, tokenizer)
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"'encode' failed .*g.jsonl:41 is not JSON") as caught:
        in_tasks(settings, out, 3)
    assert not out.exists()
    (log,) = Path(str(caught.value).split("logs are in ")[1].split(";")[0]).glob("task_00002.log")
    assert "g.jsonl:41 is not JSON" in log.read_text()
    with pytest.raises(ValueError, match=r"out.work .*tasks.*remove"):
        in_tasks(settings, out, 4)
    damaged.write_bytes(whole)
    wanted = usual_way(settings, tmp_path / "usual")
    (damaged.parent / "c.jsonl.gz").write_bytes(b"what was encoded is not read again")
    in_tasks(settings, out, 3)
    assert files_of(out) == wanted
    assert not (tmp_path / "out.work").exists()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (b"", "'assemble'.* 0 tokens"),
        (b'{"text": "\\ud800"}\n', "half of"),
    ],
)
def test_a_source_without_text_makes_no_folder(in_tasks, tmp_path, tokenizer, lines, message):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "a.jsonl").write_bytes(lines)
    settings = Settings(str(tmp_path / "a.jsonl"), tokenizer=str(tmp_path / "tokenizer"))
    with pytest.raises(ValueError, match=message):
        in_tasks(settings, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_of_others_is_not_taken_for_work(in_tasks, corpus, tmp_path):
    (tmp_path / "out.work").mkdir()
    (tmp_path / "out.work" / "mine").touch()
    with pytest.raises(ValueError, match=r"out.work .*move"):
        in_tasks(Settings(str(corpus)), tmp_path / "out")
    assert (tmp_path / "out.work" / "mine").exists()


def test_what_fails_before_the_tasks_start_leaves_nothing(in_tasks, corpus, tmp_path):
    with pytest.raises(ValueError, match="'no-such' cannot be loaded"):
        in_tasks(Settings(str(corpus), tokenizer="no-such"), tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        in_tasks(Settings(str(corpus)), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


CALL = """
import json, sys
from tide_lm.data import distributed
from tide_lm.data.prepare import Settings
settings, out, executor, options = map(json.loads, sys.argv[1:])
distributed.prepare(Settings(**settings), out, executor=executor, tasks=2, options=options)
"""


def call(settings: Settings, out: Path, executor: str, **options) -> list[str]:
    arguments = asdict(settings), str(out), executor, options
    return [sys.executable, "-c", CALL, *map(json.dumps, arguments)]


@pytest.mark.cluster
def test_killed_at_work_the_same_call_goes_on(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    (source / "a.txt").write_text("".join(texts(20, 0)))
    (source / "b.jsonl").write_bytes(jsonl(texts(40, 1)) * 100)  # seconds of work
    settings = Settings(
        str(source), tokenizer=str(tmp_path / "tokenizer"), validation=0.1, shard_tokens=200_000
    )
    command = call(settings, out, "local", workers=2)
    child = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    encoded, deadline = tmp_path / "out.work" / "encoded", time.monotonic() + 600
    while not (
        (encoded / "00000").exists()
        and any(file.stat().st_size for file in encoded.glob(".*/train-00000.bin"))
    ):
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    assert not out.exists()
    assert not (encoded / "00001").exists()
    subprocess.run(command, check=True, capture_output=True)
    assert files_of(out) == usual_way(settings, tmp_path / "usual")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "source", "tokenizer", "usual"}


def test_a_task_that_runs_twice_does_no_harm(settings, usual, tmp_path):
    """As when a machine that was given up for lost comes back."""
    folder, parts = WorkingFolder(tmp_path / "out"), sources.parts(settings.source)
    distributed._start(folder, settings, parts, tasks=2)
    (first, *others), second_runs = parts, []

    def documents():
        second_runs.append(Encode(folder, parts)(None, 0, 2))
        return first.documents()

    Encode(folder, [sources.Part(first.name, documents), *others])(None, 0, 2)
    assert len(second_runs) == 1
    for rank in (1, 1):
        Encode(folder, parts)(None, rank, 2)
    for _ in range(2):
        Assemble(folder)(None, 0, 1)
    assert files_of(tmp_path / "out") == usual
    assert [path.name for path in folder.path.iterdir()] == ["tide-lm.txt"]


@pytest.fixture
def encoded(settings, tmp_path) -> WorkingFolder:
    """All of the text in one task, which is to be assembled."""
    folder, parts = WorkingFolder(tmp_path / "out"), sources.parts(settings.source)
    distributed._start(folder, settings, parts, tasks=1)
    Encode(folder, parts)(None, 0, 1)
    return folder


def test_what_was_encoded_in_an_earlier_format_is_not_taken_for_done(encoded, settings):
    path = encoded.path / "work.json"
    work = json.loads(path.read_text())
    del work["format"]
    path.write_text(json.dumps(work))
    with pytest.raises(ValueError, match=r"with other format: .*remove the folder"):
        distributed._start(encoded, settings, sources.parts(settings.source), tasks=1)


def test_what_was_encoded_is_kept_if_another_preparation_took_the_name(encoded, settings, usual):
    other = usual_way(replace(settings, shard_tokens=5000), encoded.out)
    with pytest.raises(ValueError, match="exists and is not an empty folder: remove it"):
        Assemble(encoded)(None, 0, 1)
    assert files_of(encoded.out) == other
    shutil.rmtree(encoded.out)
    Assemble(encoded)(None, 0, 1)
    assert files_of(encoded.out) == usual


def test_killed_after_the_result_has_its_name_the_task_still_clears(encoded, usual, monkeypatch):
    with monkeypatch.context() as killed:
        killed.setattr(WorkingFolder, "clear", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Assemble(encoded)(None, 0, 1)
    Assemble(encoded)(None, 0, 1)
    assert files_of(encoded.out) == usual
    assert [path.name for path in encoded.path.iterdir()] == ["tide-lm.txt"]


def test_a_stage_says_which_task_before_it_is_missing(settings, tmp_path):
    """As when an executor goes on after a failure."""
    folder, parts = WorkingFolder(tmp_path / "out"), sources.parts(settings.source)
    distributed._start(folder, settings, parts, tasks=3)
    Encode(folder, parts)(None, 0, 3)
    with pytest.raises(ValueError, match=r"2 of 3 tasks of 'encode'.* 1: .*logs"):
        Assemble(folder)(None, 0, 1)


@pytest.mark.cluster
def test_ray_gives_the_files_of_the_usual_way_even_after_a_failure(corpus, tmp_path, tokenizer):
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    settings, damaged, whole = part_of(corpus, tmp_path, tokenizer)
    out = tmp_path / "out"
    code = """
import json, sys
from tide_lm.data import distributed
from tide_lm.data.prepare import Settings
settings, out, damaged, whole = map(json.loads, sys.argv[1:])
def prepare():
    distributed.prepare(Settings(**settings), out, executor="ray", tasks=2, options={})
try:
    prepare()
except ValueError as error:
    print(error)
open(damaged, "w").write(whole)
prepare()
"""
    arguments = asdict(settings), str(out), str(damaged), whole.decode()
    done = subprocess.run(
        [sys.executable, "-c", code, *map(json.dumps, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "the stage 'encode' failed (ValueError: " in done.stdout
    assert "g.jsonl:41 is not JSON" in done.stdout
    assert files_of(out) == usual_way(settings, tmp_path / "usual")
    assert not (tmp_path / "out.work").exists()


def part_of(corpus: Path, folder: Path, tokenizer) -> tuple[Settings, Path, bytes]:
    """Settings for three files, the last of which is damaged: its path, and what it should hold."""
    tokenizer.save_pretrained(folder / "tokenizer")
    source = folder / "source"
    source.mkdir()
    for name in ("c.jsonl.gz", "f.parquet", "g.jsonl"):
        shutil.copy(corpus / name, source)
    tokenizer_folder = str(folder / "tokenizer")
    settings = Settings(str(source), tokenizer=tokenizer_folder, validation=0, shard_tokens=3000)
    damaged, whole = source / "g.jsonl", (source / "g.jsonl").read_bytes()
    damaged.write_bytes(whole + b'{"text": "cut')
    return settings, damaged, whole


def is_slurm_node() -> bool:
    """Whether jobs can run on this machine, so that they see its disk."""
    if not shutil.which("sbatch"):
        return False
    done = subprocess.run(["sinfo", "--noheader", "--format=%n"], capture_output=True, text=True)
    return done.returncode == 0 and socket.gethostname().split(".")[0] in done.stdout.split()


STAND_INS = {
    # Runs the tasks of a job at once, if the job it waits for ended well.
    "sbatch": """
import os, pathlib, re, subprocess, sys
script, here = pathlib.Path(sys.argv[-1]), pathlib.Path(__file__).parent
asked = " ".join(sys.argv[1:-1]) + script.read_text()
number = 1 + len(list(here.glob("job-*")))
state, last = here / f"job-{number}", int(re.search("--array=0-([0-9]+)", asked)[1])
waits_for = re.search("--dependency=afterok:([0-9]+)", asked)
ok = not waits_for or (here / f"job-{waits_for[1]}").read_text() == "ok"
for task in range(last + 1):
    variables = {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_NODELIST": "here"}
    ok = ok and not subprocess.run(["bash", script], env=os.environ | variables, stdout=sys.stderr).returncode
state.write_text("ok" if ok else "failed")
print("Submitted batch job", number)
""",
    "srun": "import os, sys; os.execvp(sys.argv[4], sys.argv[4:])",  # after -l -n 1
    "scontrol": "print('here')",
    "squeue": "",
}


@pytest.fixture(params=["real", "stand-in"])
def slurm(request, tmp_path, monkeypatch):
    """The options that the executor needs, with a real Slurm, or with commands that stand in for it."""
    if request.param == "real":
        if not is_slurm_node():
            pytest.skip("this machine is not a node of a Slurm cluster")
        partitions = subprocess.run(
            ["sinfo", "--noheader", "--format=%R"], capture_output=True, text=True, check=True
        )
        node = {"nodelist": socket.gethostname().split(".")[0]}
        return {"partition": partitions.stdout.split()[0], "time": "10:00", "sbatch_args": node}
    commands = tmp_path / "commands"
    commands.mkdir()
    for name, code in STAND_INS.items():
        (commands / name).write_text(f"#!{sys.executable}\n{code}")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(commands), prepend=os.pathsep)
    return {"partition": "any", "time": "10:00"}


def wait_for_jobs(jobs: list[str]) -> None:
    deadline = time.monotonic() + 600
    while subprocess.run(["squeue", "--noheader", f"--jobs={','.join(jobs)}"], capture_output=True).stdout:
        assert time.monotonic() < deadline
        time.sleep(0.5)


@pytest.mark.cluster
def test_slurm_gives_the_files_of_the_usual_way_even_after_a_failure(corpus, tmp_path, tokenizer, slurm):
    settings, damaged, whole = part_of(corpus, tmp_path, tokenizer)
    out = tmp_path / "out"
    submitted = distributed.prepare(settings, out, executor="slurm", tasks=2, options=slurm)
    assert isinstance(submitted, distributed.Submitted)
    assert len(submitted.jobs) == 2
    wait_for_jobs(submitted.jobs)
    assert not out.exists()
    assert "g.jsonl:41 is not JSON" in (submitted.logs / "encode" / "logs" / "task_00001.log").read_text()
    assert not (submitted.logs / "assemble" / "logs").exists()  # it waited for what failed

    damaged.write_bytes(whole)
    submitted = distributed.prepare(settings, out, executor="slurm", tasks=2, options=slurm)
    wait_for_jobs(submitted.jobs)
    assert files_of(out) == usual_way(settings, tmp_path / "usual")
    assert {path.name for path in (tmp_path / "out.work").iterdir()} == {"jobs.json", "logs", "tide-lm.txt"}


def test_slurm_is_asked_whether_jobs_are_left(settings, tmp_path, monkeypatch):
    folder = WorkingFolder(tmp_path / "out")
    folder.path.mkdir()
    folder.jobs.write_text('["7", "8"]')
    (tmp_path / "squeue").write_text("#!/bin/sh\necho 8 any out-finish\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(ValueError, match=r"out.work .*`scancel 7 8`"):
        distributed._check_no_job_is_left(folder)


@pytest.mark.cluster
def test_without_slurm_it_says_so(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="sbatch, which is not here"):
        distributed.prepare(
            settings, tmp_path / "out", executor="slurm", tasks=1, options={"partition": "a", "time": "1:00"}
        )


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("executor", "options", "message"),
    [
        ("local", {"worker": 2}, "the executor local has no option 'worker': did you mean 'workers'?"),
        ("local", {"x": 2}, "no option 'x': use one of workers, start_method"),
        ("ray", {"tasks": 2}, "the executor ray has no option 'tasks'"),
        ("slurm", {"time": "1:00"}, "slurm needs partition: add --executor-option partition=..."),
    ],
)
def test_an_option_that_is_wrong_is_named_with_its_cure(executor, options, message):
    with pytest.raises(distributed.OptionError) as caught:
        distributed.check_options(executor, options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"worker": 2}, "'worker': did you mean 'workers'"),
        ({"x": 2}, "'x': use one of workers, start_method"),
        ({"tasks": 2}, "'tasks'"),
    ],
)
def test_an_option_that_an_executor_does_not_have_is_named(monkeypatch, options, message):
    monkeypatch.setattr(distributed, "_executor", lambda name: InThisProcess)
    with pytest.raises(distributed.OptionError, match=message):
        distributed.check_options("local", options)


@pytest.mark.parametrize(
    ("executor", "package", "extra"), [("local", "datatrove", "data"), ("ray", "ray", "ray")]
)
def test_a_missing_package_is_named_with_its_install_command(
    settings, tmp_path, monkeypatch, executor, package, extra
):
    def absent(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", absent)
    message = rf"--executor {executor} needs the package {package} .*{re.escape(install(extra))}"
    with pytest.raises(ValueError, match=message):
        distributed.prepare(settings, tmp_path / "out", executor=executor, tasks=1, options={})
    assert not list(tmp_path.iterdir())
