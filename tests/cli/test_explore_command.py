"""`tide-lm explore` where there is nothing to show; what it shows is tested in tests/explore."""

import shutil
import socket
import sys
import types

import pytest
from command import tide_lm

from tide_lm.run.optional import install


def told(*arguments):
    """Return what the command says as it fails."""
    done = tide_lm("explore", *arguments)
    assert done.returncode == 1
    return done.said


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture
def no_gradio(monkeypatch):
    """Have gradio, and the page that is made with it, look as if they had never been imported."""
    for name in [name for name in sys.modules if name.split(".")[0] == "gradio"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("page", "server"):
        monkeypatch.delitem(sys.modules, f"tide_lm.explore.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "gradio", None)


def test_without_gradio_the_extra_is_named(trained, no_gradio):
    said = told(trained, "--port", free_port())
    assert "the explorer needs the package gradio" in said
    assert install("explore") in said


def test_a_model_that_is_not_there_is_named(tmp_path):
    assert f"{tmp_path / 'nowhere'}" in told(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--results", "nowhere"], "--results nowhere is not a folder"),
        (["--host", ""], "--host is empty"),
        (["--host", "203.0.113.1"], "cannot listen at 203.0.113.1:7860"),
    ],
)
def test_options_that_cannot_be_are_told_before_anything_is_loaded(trained, no_gradio, options, message):
    assert message in told(trained, *options)


@pytest.fixture
def served(monkeypatch):
    """Record what the page is asked to show, and where, without serving it."""
    noted = {}
    notes = {name: types.ModuleType(f"tide_lm.explore.{name}") for name in ("page", "server")}

    def serve(page, host, port, names, tell):
        noted.update(at=(host, port), names=names)
        tell(f"http://{host}:{port}")

    notes["page"].build = lambda explorer: noted.update(explorer=explorer)
    notes["server"].serve = serve
    for module in notes.values():
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return noted


def test_a_model_of_another_tokenizer_is_not_compared(trained, tokenizer, tmp_path, served):
    other = tmp_path / "other"
    shutil.copytree(trained / "export", other)
    more = tokenizer.from_pretrained(other)
    more.add_tokens(["more"])
    more.save_pretrained(other)
    assert "other has another tokenizer than" in told(trained, "--compare", other, "--port", free_port())


def test_the_page_shows_both_models_of_a_demo_and_the_results_of_the_first(trained, tmp_path, served):
    for kind in ("tide", "base"):
        shutil.copytree(trained, tmp_path / kind)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "demo.json").write_text("{}")
    port = free_port()
    done = tide_lm("explore", tmp_path, "--port", port)
    assert done.returncode == 0, done.stderr
    explorer = served["explorer"]
    assert (explorer.opened.path, explorer.base.path) == (str(tmp_path / "tide"), str(tmp_path / "base"))
    assert explorer.results == tmp_path / "tide"
    assert served["at"] == ("127.0.0.1", port)
    assert {"127.0.0.1", "localhost"} <= set(served["names"])
    assert "warning" not in done.stderr
    assert f"http://127.0.0.1:{port}" in done.stdout.splitlines()  # alone on its line
    assert "Ctrl-C" in done.stderr


def test_other_results_may_be_shown_and_an_open_address_is_warned_of(trained, tmp_path, served):
    port = free_port()
    done = tide_lm("explore", trained, "--results", tmp_path, "--host", "0.0.0.0", "--port", port)
    assert done.returncode == 0, done.stderr
    assert "warning" in done.stderr
    assert (served["explorer"].results, served["explorer"].base) == (tmp_path, None)
    assert (served["at"], served["names"]) == (("0.0.0.0", port), ())
