"""The files of docs/pictures: the report and the explorer of a demo, as a browser shows them."""

import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from tide_lm.run.files import write_atomically
from tide_lm.run.optional import require

if TYPE_CHECKING:
    from playwright.sync_api import Page

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
WIDTH = 1000
COLOURS = 256  # of a picture, so that it is small
TEXT = "The function returns a list of strings, and the mutex is released before the iterator ends."


def take(demo: Path, folder: Path, log: Callable[[str], None]) -> None:
    """Write PNG files of what a reader of the README sees."""
    sync_api = require("playwright.sync_api", "a picture", "dev")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    folder.mkdir(parents=True, exist_ok=True)
    with sync_api.sync_playwright() as playwright, _explorer(demo) as address:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
        drawn = {"write": _write, "text": _text, "tokens": _tokens, "pairs": _pairs}
        for name, draw in drawn.items():
            page.goto("about:blank")
            page.goto(address)
            draw(page)
            log(str(_keep(page, folder / f"explore-{name}.png")))
        page.goto((demo / "report" / "index.html").absolute().as_uri())
        page.set_viewport_size({"width": WIDTH, "height": 1500})
        log(str(_keep(page, folder / "report.png", whole=False)))
        browser.close()


@contextmanager
def _explorer(demo: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tide_lm", "explore", str(demo), "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}/"
    try:
        while process.poll() is None:
            try:
                urllib.request.urlopen(address, timeout=5).close()
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.3)
        else:
            raise ValueError(f"{' '.join(command)} ended with {process.returncode}: see what it says")
        yield address
    finally:
        process.terminate()
        process.wait()


def _write(page: "Page") -> None:
    page.get_by_role("button", name="Write", exact=True).click()
    page.get_by_text("Click a token to look into it").wait_for()
    page.wait_for_timeout(1000)


def _text(page: "Page") -> None:
    page.get_by_role("tab", name="Text").click()
    page.get_by_label("Text", exact=True).fill(TEXT)
    page.get_by_role("button", name="Read").click()
    page.locator(".tokens [role=button]", has_text="list").click()
    page.get_by_text("What is predicted to follow").wait_for()
    page.wait_for_timeout(1000)


def _tokens(page: "Page") -> None:
    page.get_by_role("tab", name="Tokens").click()
    page.get_by_text("8,192 tokens of").wait_for()
    page.locator(".found button").first.click()
    page.get_by_text("overlap with E").wait_for()
    page.wait_for_timeout(500)


def _pairs(page: "Page") -> None:
    page.get_by_role("tab", name="Pairs").click()
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("img", name="Distance by layer").wait_for()
    page.wait_for_timeout(500)


def _keep(page: "Page", path: Path, whole: bool = True) -> Path:
    from PIL import Image

    picture = Image.open(BytesIO(page.screenshot(full_page=whole))).convert("RGB").quantize(COLOURS)
    content = BytesIO()
    picture.save(content, "PNG", optimize=True)
    write_atomically(path, content.getvalue())
    return path
