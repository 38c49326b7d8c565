"""`tide-lm generate` as a user calls it, on a CPU."""

import pytest
from command import result_of, tide_lm

ARGUMENTS = ("--max-new-tokens", "12")


def text_of(*arguments: str) -> str:
    (generation,) = result_of("generate", *arguments, *ARGUMENTS)["generations"]
    return generation["text"]


def test_text_is_written_as_json_has_it(trained):
    done = tide_lm("generate", str(trained), "every layer", *ARGUMENTS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == text_of(str(trained), "every layer") + "\n"
    assert "12 tokens in" in done.stderr


def test_a_prompt_may_come_from_stdin(trained):
    done = tide_lm("generate", str(trained), *ARGUMENTS, stdin="every layer")
    assert done.stdout == text_of(str(trained), "every layer") + "\n"


def test_several_prompts_are_written_with_what_follows_them(trained):
    one, other = (text_of(str(trained), prompt) for prompt in ("every", "layer"))
    done = tide_lm("generate", str(trained), "every", "layer", *ARGUMENTS)
    assert done.stdout == f"every{one}\n\nlayer{other}\n\n"


def test_a_seed_draws_the_same_text_again(trained):
    drawn = ("--temperature", "1.5", "--top-k", "50", "--top-p", "0.95", "--seed")
    first, again, other = (text_of(str(trained), "every", *drawn, seed) for seed in "774")
    assert first == again != other


def test_a_packed_model_generates_from_its_store(trained, tmp_path):
    result_of("pack", str(trained), "--out", str(tmp_path / "packed"), "--bits", "16")
    done = tide_lm("generate", str(tmp_path / "packed"), "every layer", "--memory", "store", *ARGUMENTS)
    assert done.stdout == text_of(str(tmp_path / "packed"), "every layer") + "\n"
    assert "rows from the store" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (("every", "--temperature", "-1"), 2, "--temperature"),
        (("every", "--top-p", "0"), 2, "top_p is 0.0"),
        (("every", "--top-k", "5"), 2, "--top-k does nothing at temperature 0"),
        (("every", "--temperature", "1", "--seed", "-1"), 2, "seed is -1"),
        (("bad\udcff",), 2, "is not UTF-8"),
        (("every", "--max-new-tokens", "5000"), 1, "ask for fewer"),
    ],
)
def test_what_cannot_be_is_told(trained, arguments, status, told):
    done = tide_lm("generate", trained, *arguments)
    assert done.returncode == status
    assert told in done.stderr
