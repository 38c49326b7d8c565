"""`tide-lm explore` where there is nothing to show; what it shows is tested in tests/explore."""

import shutil
import subprocess
import sys

import pytest


def told(code, *arguments):
    """What the command says as it fails, within a process of its own."""
    command = [sys.executable, "-c", f"{code}; from tide_lm.cli import main; main()", "explore"]
    done = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())


def test_without_gradio_the_extra_is_named(trained):
    said = told("import sys; sys.modules['gradio'] = None", trained)
    assert "the explorer needs the package gradio" in said
    assert "tide-lm[explore]" in said


def test_a_model_that_is_not_there_is_named(tmp_path):
    assert f"{tmp_path / 'nowhere'}" in told("pass", tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--results", "nowhere"], "--results nowhere is not a folder"),
        (["--host", ""], "--host is empty"),
        (["--host", "203.0.113.1"], "203.0.113.1:7860 cannot be listened at"),
    ],
)
def test_options_that_cannot_be_are_told_before_anything_is_loaded(trained, options, message):
    assert message in told("import sys; sys.modules['gradio'] = None", trained, *options)


def test_a_model_of_another_tokenizer_is_not_compared(trained, tokenizer, tmp_path):
    pytest.importorskip("gradio", reason="gradio is missing: pip install 'tide-lm[explore]'")
    other = tmp_path / "other"
    shutil.copytree(trained / "export", other)
    more = tokenizer.from_pretrained(other)
    more.add_tokens(["more"])
    more.save_pretrained(other)
    assert "other has another tokenizer than" in told("pass", trained, "--compare", other)
