"""The site is built without a warning, is searched in a browser, and asks no other host for anything."""

import functools
import http.server
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        importlib.util.find_spec("material") is None, reason="mkdocs is missing: pip install -e '.[docs]'"
    ),
]


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    plain = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(call, cwd=root, capture_output=True, text=True, env=plain)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def address(site):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def page(browser, address):
    """Return a page that fails the test if it asks another host for something, or meets an error."""
    wrong: list[str] = []
    context = browser.new_context(viewport={"width": 390, "height": 844})
    opened = context.new_page()
    local = (address, "data:", "blob:")
    opened.on("request", lambda sent: sent.url.startswith(local) or wrong.append(sent.url))
    opened.on("console", lambda message: message.type == "error" and wrong.append(message.text))
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    yield opened
    context.close()
    assert not wrong


def test_a_word_is_found(page, address):
    page.goto(f"{address}/index.html")
    page.locator("label[for=__search]").first.click()
    page.get_by_text("Type to start searching").wait_for()  # until then the index is being read
    page.get_by_placeholder("Search").press_sequentially("null bank")
    found = page.locator(".md-search-result__link", has_text="Where the null bank is").first
    found.click()
    page.wait_for_url("**/concepts.html**")
    assert page.get_by_role("heading", name="Where the null bank is").is_visible()


def test_every_page_opens_and_fits_a_phone(page, address, site):
    for path in sorted(site.glob("*.html")):
        page.goto(f"{address}/{path.name}")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path.name
        assert page.locator("h1").is_visible(), path.name


def test_references_come_from_the_code(page, address):
    page.goto(f"{address}/commands.html#pack")
    assert page.get_by_role("heading", name="bench decode").is_visible()
    assert page.locator("td", has_text="--bits").first.is_visible()
    page.goto(f"{address}/api.html")
    assert page.locator("code", has_text="max_new_tokens").first.is_visible()
    assert page.get_by_text("TIDE decoder with a language-modelling head").is_visible()


@pytest.mark.parametrize(
    ("link", "said"),
    [
        ("[a](gone.md)", "gone.md"),
        ("[a](training.md#gone)", "#gone"),
        ("[a](../src/gone.py)", "mend the link"),
    ],
)
def test_a_broken_link_fails(link, said, tmp_path):
    for path in ROOT.iterdir():
        if path.name != "docs" and not path.name.startswith("."):
            (tmp_path / path.name).symlink_to(path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (tmp_path / "docs/concepts.md").open("a") as file:
        file.write(f"\n{link}\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert said in done.stderr + done.stdout, done.stderr
