"""`tide-lm generate` as a user calls it, on a CPU."""

import json
import shutil

import pytest
from command import result_of, tide_lm

ARGUMENTS = ("--max-new-tokens", "12")


def text_of(*arguments: str) -> str:
    (generation,) = result_of("generate", *arguments, *ARGUMENTS)["generations"]
    return generation["text"]


def test_the_prompt_and_what_follows_it_are_one_text(trained):
    done = tide_lm("generate", str(trained), "every layer", *ARGUMENTS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"every layer{text_of(str(trained), 'every layer')}\n"
    assert "12 tokens in" in done.stderr
    assert done.stderr.endswith(f"Next: tide-lm serve {trained}\n")


def test_a_checkpoint_is_not_offered_to_a_server(trained):
    checkpoint = trained / "checkpoints" / "00000004"
    done = tide_lm("generate", checkpoint, "every layer", *ARGUMENTS)
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith(f"Next: tide-lm evaluate {checkpoint}\n")


def test_a_run_that_has_not_ended_names_the_checkpoint_that_generates(trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run, ignore=shutil.ignore_patterns("export"))
    done = tide_lm("generate", run, "every layer", "--json", *ARGUMENTS)
    assert json.loads(done.stdout)["generations"]
    assert done.stderr.count(f"{run} has not ended: this is its checkpoint of step 4\n") == 1
    for whole in trained, run / "checkpoints" / "00000004":
        assert "has not ended" not in tide_lm("generate", whole, "every layer", *ARGUMENTS).stderr

    next((run / "checkpoints" / "00000004").glob("*.safetensors")).write_bytes(b"")
    done = tide_lm("generate", run, "every layer", *ARGUMENTS)
    assert done.returncode == 1
    other = run / "checkpoints" / "00000002"
    assert done.said.endswith(f": give {other}, or train again")
    assert tide_lm("generate", other, "every layer", *ARGUMENTS).returncode == 0


@pytest.mark.parametrize("stdin", ["every layer", "every layer\n"])
def test_a_prompt_may_come_from_stdin(trained, stdin):
    """With the line feed that `echo` adds, or without."""
    done = tide_lm("generate", str(trained), *ARGUMENTS, stdin=stdin)
    assert done.stdout == f"every layer{text_of(str(trained), 'every layer')}\n"


def test_without_a_prompt_there_is_an_example(trained):
    done = tide_lm("generate", trained)
    assert done.returncode == 2
    assert f'there is no prompt: give one, as in tide-lm generate {trained} "The tide comes in"' in done.said


def test_several_prompts_are_written_under_headings(trained):
    one, other = (text_of(str(trained), prompt) for prompt in ("every", "layer"))
    done = tide_lm("generate", str(trained), "every", "layer", *ARGUMENTS)
    assert done.stdout == f"Prompt 1 of 2:\nevery{one}\n\nPrompt 2 of 2:\nlayer{other}\n\n"


def test_of_a_demo_the_tide_run_generates(trained, tmp_path):
    demo = tmp_path / "a demo"
    (demo / "results").mkdir(parents=True)
    (demo / "results" / "demo.json").write_text("{}")
    (demo / "tide").symlink_to(trained)
    done = tide_lm("generate", demo, "every layer", *ARGUMENTS)
    assert done.stdout == f"every layer{text_of(str(trained), 'every layer')}\n"
    assert f"{demo} is a demo: this is its TIDE run, {demo / 'tide'}" in done.stderr
    assert done.stderr.endswith(f"Next: tide-lm serve '{demo / 'tide'}'\n")


def test_a_seed_draws_the_same_text_again(trained):
    drawn = ("--temperature", "1.5", "--top-k", "50", "--top-p", "0.95", "--seed")
    first, again, other = (text_of(str(trained), "every", *drawn, seed) for seed in "774")
    assert first == again != other


def test_a_packed_model_generates_from_its_store(trained, tmp_path):
    result_of("pack", str(trained), "--out", str(tmp_path / "packed"), "--bits", "16")
    done = tide_lm("generate", str(tmp_path / "packed"), "every layer", "--memory", "store", *ARGUMENTS)
    assert done.stdout == f"every layer{text_of(str(tmp_path / 'packed'), 'every layer')}\n"
    assert "rows from the store" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (("every", "--temperature", "-1"), 2, "--temperature"),
        (("every", "--temperature", "1", "--top-p", "0"), 2, "top_p is 0.0"),
        (("every", "--top-k", "5"), 2, "--top-k does nothing at temperature 0"),
        (("every", "--temperature", "1", "--seed", "-1"), 2, "seed is -1"),
        (("bad\udcff",), 2, "is not UTF-8"),
        (("every", "--device", "gpu"), 2, "'gpu' is no device: use cpu, cuda, cuda:1 or mps"),
        (("every", "--device", "cuda:99"), 2, "cuda:99 is not here: PyTorch finds cpu"),
        (("every", "--max-new-tokens", "5000"), 1, "ask for fewer"),
    ],
)
def test_what_cannot_be_is_told(trained, arguments, status, told):
    done = tide_lm("generate", trained, *arguments)
    assert done.returncode == status
    assert told in done.stderr
