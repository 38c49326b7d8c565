"""Checkpoints are whole or not there, and damage is seen."""

import shutil
import signal
import subprocess
import sys

import pytest
import torch
from disk import files_of_at_most

from tide_lm.run import checkpoint


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"model.w": torch.full((7, 5), value), "optimizer.exp_avg.w": torch.full((3,), value + 1)}


def load(path) -> tuple[dict[str, torch.Tensor], dict]:
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors(0.0).items()}
    checkpoint.load(path, found)
    return found, checkpoint.read_state(path)


def test_what_is_saved_is_loaded(tmp_path):
    path = checkpoint.save(tmp_path, 30, tensors(2.5), {"step": 30, "loader": {"windows": 9}})
    assert path.name == "00000030"
    found, state = load(path)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors(2.5).items())
    assert state == {"step": 30, "loader": {"windows": 9}}
    assert not list(tmp_path.glob(".*"))
    assert not [file for file in path.iterdir() if file.suffix not in (".json", ".safetensors")]


def test_a_checkpoint_cut_or_changed_at_any_place_is_passed_over(tmp_path):
    older = checkpoint.save(tmp_path, 10, tensors(1), {"step": 10})
    newer = checkpoint.save(tmp_path, 20, tensors(2), {"step": 20})
    whole = tmp_path / "whole"
    shutil.copytree(newer, whole)
    for file in sorted(whole.iterdir()):
        size = file.stat().st_size
        for place in {0, 1, size // 2, size - 1}:
            for damage in ("cut", "flip", "missing"):
                shutil.rmtree(newer)
                shutil.copytree(whole, newer)
                target = newer / file.name
                data = bytearray(target.read_bytes())
                if damage == "cut":
                    target.write_bytes(data[:place])
                elif damage == "flip":
                    data[place] ^= 255
                    target.write_bytes(data)
                else:
                    target.unlink()
                told: list[str] = []
                assert checkpoint.newest(tmp_path, told.append) == older, (file.name, place, damage)
                assert "00000020 is damaged" in told[0]


def test_damage_at_the_end_of_a_large_file_is_seen(tmp_path):
    path = checkpoint.save(tmp_path, 10, {"model.w": torch.ones(2**19)}, {"step": 10})
    (weights,) = path.glob("*.safetensors")
    with weights.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    with pytest.raises(ValueError, match="is damaged"):
        checkpoint.newest(tmp_path, print)


def test_an_unfinished_checkpoint_is_never_seen(tmp_path):
    (tmp_path / ".00000020.tmp").mkdir()
    assert checkpoint.newest(tmp_path, print) is None
    assert checkpoint.newest(tmp_path / "nothing", print) is None
    checkpoint.remove_after(tmp_path, 0)
    assert not list(tmp_path.iterdir())


def test_if_all_are_damaged_none_is_taken_and_nothing_begins_again(tmp_path):
    for step in (10, 20):
        path = checkpoint.save(tmp_path, step, tensors(1), {"step": step})
        (path / "state.json").write_text("{}")
        with pytest.raises(ValueError, match=r"every checkpoint in .* is damaged: put one back"):
            checkpoint.newest(tmp_path, print)


@pytest.mark.parametrize("manifest", ["{}", "[]", "3", ""])
def test_a_manifest_that_names_no_files_is_damaged(tmp_path, manifest):
    path = checkpoint.save(tmp_path, 10, tensors(1), {"step": 10})
    (path / "manifest.json").write_text(manifest)
    assert "manifest.json" in checkpoint.find_fault(path)


@pytest.mark.parametrize(
    "remove",
    [lambda folder: checkpoint.prune(folder, 1, 0), lambda folder: checkpoint.remove_after(folder, 0)],
)
def test_a_checkpoint_that_is_half_removed_is_none(tmp_path, monkeypatch, remove):
    for step in (10, 20):
        checkpoint.save(tmp_path, step, tensors(step), {"step": step})
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.shutil, "rmtree", lambda path: (path / "manifest.json").unlink() or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            remove(tmp_path)
    (step,) = checkpoint.steps(tmp_path)
    assert checkpoint.find_fault(checkpoint.at(tmp_path, step)) is None
    checkpoint.remove_after(tmp_path, step)
    assert [path.name for path in tmp_path.iterdir()] == [f"{step:08d}"]


def test_saving_again_at_a_step_replaces_it(tmp_path):
    checkpoint.save(tmp_path, 10, tensors(1), {"step": 10})
    path = checkpoint.save(tmp_path, 10, tensors(4), {"step": 10})
    assert load(path)[0]["model.w"][0, 0] == 4


@pytest.mark.parametrize(
    ("keep", "keep_every", "left"),
    [(2, 0, [40, 50]), (1, 20, [20, 40, 50]), (9, 0, [10, 20, 30, 40, 50])],
)
def test_old_checkpoints_are_removed_but_milestones_stay(tmp_path, keep, keep_every, left):
    for step in (10, 20, 30, 40, 50):
        checkpoint.save(tmp_path, step, tensors(step), {"step": step})
    checkpoint.prune(tmp_path, keep, keep_every)
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == left


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path):
    checkpoint.save(tmp_path, 10, tensors(1), {"step": 10})
    with files_of_at_most(50_000), pytest.raises(OSError, match=r"00000020.*File too large"):
        checkpoint.save(tmp_path, 20, {"model.w": torch.ones(200_000)}, {"step": 20})
    assert checkpoint.newest(tmp_path, print).name == "00000010"
    assert [path.name for path in tmp_path.iterdir()] == ["00000010"]


@pytest.mark.parametrize("saved", [3, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 6))])
def test_a_writer_killed_at_any_time_leaves_whole_checkpoints(tmp_path, saved):
    code = """
import sys, pathlib, torch
from tide_lm.run import checkpoint
for step in range(1, 10**6):
    tensors = {"model.w": torch.full((300_000,), float(step))}
    checkpoint.save(pathlib.Path(sys.argv[1]), step, tensors, {"step": step})
    print(step, flush=True)
"""
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    for _ in range(saved):
        writer.stdout.readline()
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    told: list[str] = []
    newest = checkpoint.newest(tmp_path, told.append)
    assert not told
    found = {"model.w": torch.zeros(300_000)}
    checkpoint.load(newest, found)
    state = checkpoint.read_state(newest)
    assert state["step"] >= saved
    assert torch.all(found["model.w"] == state["step"])
