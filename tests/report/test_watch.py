"""`tide-lm report --watch`: the page of a run that goes on."""

import json
import signal
import subprocess
import time

import pytest
from command import call

from tide_lm.report import watch


@pytest.fixture
def watched(plant, tmp_path):
    """A run that has begun, and a real process that watches it: an interrupt ends it."""
    run = plant(tmp_path / "x", only=())
    (run / "metrics.jsonl").unlink()
    process = subprocess.Popen(
        call("report", run, "--watch"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    yield run, process
    process.kill()
    process.wait()


def test_the_page_follows_a_run_until_an_interrupt(watched):
    run, process = watched
    page = run / "report" / "index.html"

    def until(text: str) -> None:
        given_up = time.monotonic() + 600
        while not page.exists() or text not in page.read_text():
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < given_up, f"the page never said {text!r}"
            time.sleep(0.1)
        assert page.read_text().endswith("</html>")  # at every look

    until("is at step 0 of 100")
    assert '<body data-reload="5">' in page.read_text()
    log = run / "metrics.jsonl"
    log.write_text(json.dumps({"step": 10, "tokens": 100, "loss": 5.0}) + "\n")
    until("is at step 10 of 100")
    log.write_text(json.dumps({"step": 20, "tokens": 200, "loss": 5.0}) + "\n")
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=600)
    assert (process.returncode, stdout.split()) == (0, [str(page)])
    assert page.as_uri() in stderr
    assert "Traceback" not in stderr
    assert "is at step 20 of 100" in page.read_text()
    assert "<body>" in page.read_text()
    assert "shows new results by itself" not in page.read_text()


def test_an_interrupt_before_the_first_page_leaves_none(monkeypatch, tmp_path):
    def interrupt(*arguments, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr(watch, "write_report", interrupt)
    with pytest.raises(KeyboardInterrupt):
        watch.watch([], tmp_path / "page.html", print)
