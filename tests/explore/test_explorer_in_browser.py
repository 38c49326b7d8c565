"""The explorer in a real browser: its numbers are the library's, and it bears abuse."""

import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import closing, contextmanager

import pytest

from tide_lm.analysis.tables import distances
from tide_lm.explore import pairs
from tide_lm.explore.reader import LIMIT, Reader
from tide_lm.explore.vocabulary import Vocabulary
from tide_lm.model.opened import open_model
from tide_lm.serve import Sampling
from tide_lm.serve.generate import generate

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        importlib.util.find_spec("gradio") is None, reason="gradio is missing: pip install -e '.[explore]'"
    ),
]
# Parts of the page that would have to be scrolled sideways, and the page itself.
WIDER_THAN_THEIR_BOX = """[...document.querySelectorAll("html, .tide, .tide *")]
    .filter((one) => one.checkVisibility() && !one.matches("code, svg *"))
    .filter((one) => getComputedStyle(one).display !== "inline")
    .filter((one) => one.scrollWidth > one.clientWidth + 1)
    .map((one) => one.outerHTML.slice(0, 200))"""
BROKEN_NUMBERS = """[...document.querySelectorAll(".tide td")]
    .filter((one) => one.checkVisibility() && /^[-+]?[0-9.,]+$/.test(one.textContent))
    .filter((one) => {
        const range = document.createRange();
        range.selectNodeContents(one);
        return range.getBoundingClientRect().height > 25;
    })
    .map((one) => one.outerHTML)"""
TEXT = "every layer knows the token <b onclick=alert(1)>{{beneath}}</b>"
UNFINISHED = r"^(\S+) of (?!\1 )\S+ tokens "


@pytest.fixture(scope="module")
def run(trained, tmp_path_factory):
    """With one result, of all that the page can show."""
    run = tmp_path_factory.mktemp("browsed") / "mine"
    shutil.copytree(trained, run)
    opened = open_model(str(run))
    opened.write("distances", distances(opened))
    return run


SLOWLY = """
import time
from tide_lm.cli import main
from tide_lm.explore import gains, work
from tide_lm.explore.reader import Reader
from tide_lm.explore.vocabulary import Vocabulary
from tide_lm.serve.engine import Engine
reader = (Reader, "detail"), (Reader, "_read_on")
for place, name in *reader, (Vocabulary, "entry"), (gains, "_gain"), (work.Work, "_log"):
    def slow(*given, function=getattr(place, name)):
        time.sleep(0.7)
        return function(*given)
    setattr(place, name, slow)
def generate(*given, function=Engine.generate):
    for step in function(*given):
        time.sleep(0.05)
        yield step
Engine.generate = generate
main()
"""


@contextmanager
def explored(log, *arguments, program=("-m", "tide_lm")):
    """The real server, in a process of its own; in the end it is stopped as a person would."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, *program, "explore", *map(str, arguments), "--port", str(port)]
    careless = {**os.environ, "GRADIO_ALLOWED_PATHS": "/"}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=careless, cwd=log.parent)
    try:
        given_up = time.monotonic() + 600
        while True:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < given_up, log.read_text()
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5)
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.3)
        yield f"http://127.0.0.1:{port}"
        process.send_signal(signal.SIGINT)
        assert process.wait(600) == 130
        assert "Traceback" not in log.read_text()
    finally:
        process.kill()


@pytest.fixture(scope="module")
def address(run, base_run, tmp_path_factory):
    with explored(tmp_path_factory.mktemp("log") / "log", run, "--compare", base_run) as address:
        yield address


@pytest.fixture(scope="module")
def slow_address(run, tmp_path_factory):
    with explored(tmp_path_factory.mktemp("log") / "log", run, program=("-c", SLOWLY)) as address:
        yield address


@pytest.fixture
def visit(browser, request, tmp_path):
    """Opens the page; fails if it complained, or asked for anything of another host."""
    said, asked, contexts = [], [], []

    def open_page(width=1200, scheme="light", address=None, link="#tab=text"):
        address = address or request.getfixturevalue("address")
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        context.set_default_timeout(300_000)  # ms: a busy machine is no fault
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(dialog.message))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{address}/{link}")
        page.get_by_role("tab", selected=True).wait_for()
        if "tab=text" in link:
            page.get_by_text("tokens read").wait_for()  # of a text that is there for a start
        folder = os.environ.get("TIDE_LM_SCREENSHOTS", str(tmp_path))
        page.kept = lambda name: page.screenshot(
            path=f"{folder}/explore-{name}-{width}-{scheme}.png", full_page=True
        )
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []
    hosts = {url.split("/")[2] for url in asked if not url.startswith(("data:", "blob:"))}
    assert {host.split(":")[0] for host in hosts} == {"127.0.0.1"}


def ask_to_read(page, text):
    page.get_by_label("Text", exact=True).fill(text)
    page.get_by_role("button", name="Read").click()


def wait_for_all(page, text):
    """Wait until all of a text is read; what is said of it comes at the same moment."""
    is_there = "text => [...document.querySelectorAll('.tokens')].some((one) => one.textContent === text)"
    page.wait_for_function(is_there, arg=f"<bos>{text}")


def read(page, text):
    ask_to_read(page, text)
    wait_for_all(page, text)


def search(page, words):
    """Search the vocabulary, and return the buttons that were found."""
    page.get_by_label("Search tokens").fill(words)
    page.get_by_text(re.compile(r"^[\d,]+ tokens?(\.|, of which)")).wait_for()
    return page.locator(".found button")


def numbers(page, table):
    """The cells of a table, by its name."""
    rows = page.get_by_role("table", name=re.compile(table)).locator("tbody tr")
    return [row.locator("td").all_inner_texts() for row in rows.all()]


def test_a_text_is_read_and_a_token_looked_into(visit, run, base_run):
    opened, base = open_model(str(run)), open_model(str(base_run))
    reader = Reader(opened, base)
    *_, found = reader.read(TEXT)
    page = visit(1000)
    assert page.locator(".tide").first.bounding_box()["width"] > 900  # tables have the window's width
    read(page, TEXT)
    page.kept("text")
    buttons = page.locator(".tokens [role=button]")
    assert "".join(buttons.all_inner_texts()) == f"<bos>{TEXT}"
    assert f"loss {found.losses[3]:.3f}, other model {found.base_losses[3]:.3f}" in buttons.nth(
        3
    ).get_attribute("title")
    told = page.get_by_text("Mean loss of").inner_text()
    assert f"{found.of_text} of {found.of_text} tokens read." in told
    assert f"{found.loss:.4f} nats; of base: {found.base_loss:.4f}." in told
    for layer in 0, 1:
        detail = reader.detail(TEXT, 5, layer)
        if layer:
            page.get_by_role("button", name="1", exact=True).click()
        else:
            buttons.nth(5).click()
        page.get_by_role("table", name=f"without memory in layer {layer}").wait_for()
        for name, expected in detail.predictions.items():
            shown = [row[0] for row in numbers(page, f"^{name}$")]
            assert shown == [f"{share:.4f}" for _, share in expected]
    weights, *norms = numbers(page, "^By layer")[0]
    assert weights.split()[1::2] == [f"{value:.3f}" for value in detail.weights[0]]
    values = detail.added[0], detail.state[0], detail.added[0] / detail.state[0]
    assert norms == [f"{value:.3f}" for value in values]
    page.kept("token")
    for width in 390, 1000:  # what is told of a token comes into view
        page.set_viewport_size({"width": width, "height": 500})
        page.evaluate("scrollTo(0, 0)")
        buttons.nth(4 if width == 390 else 5).evaluate("one => one.click()")
        page.wait_for_function("() => document.querySelector('h2.token').getBoundingClientRect().top < 450")
    page.get_by_role("radio", name="frequency decile").check()
    page.get_by_text("The darker, the rarer").wait_for()
    assert buttons.nth(5).get_attribute("aria-pressed") == "true"  # still chosen
    read(page, "every layer")
    assert page.get_by_text("What is predicted to follow").count() == 0


def test_a_shade_is_of_the_text_that_was_read(visit):
    page = visit()
    read(page, TEXT)
    page.get_by_text("Blue: less loss").wait_for()  # where there is another model
    page.get_by_label("Text", exact=True).fill("another, which has not been read")
    shades = set()
    for name, legend in {
        "loss": "The darker, the higher the loss",
        "frequency decile": "The darker, the rarer",
        "weight on memory": "The darker, the more of the routers",
        "gain over the other model": "Blue: less loss",
    }.items():
        page.get_by_role("radio", name=name).check()
        page.get_by_text(legend).wait_for()
        shades.add(page.locator(".tokens").inner_html())
    assert len(shades) == 4
    assert "".join(page.locator(".tokens [role=button]").all_inner_texts()) == f"<bos>{TEXT}"


def test_tokens_are_searched_and_looked_up(visit, run):
    vocabulary = Vocabulary(open_model(str(run)))
    page = visit()
    page.get_by_role("tab", name="Tokens").click()
    page.get_by_role("heading", name="The words that memory helps most").wait_for()
    page.locator(".found button").first.wait_for()
    page.get_by_label("Search tokens").fill("layer")
    ids, total = vocabulary.search("layer")
    page.get_by_text(re.compile(rf"^{total} tokens?\.$")).wait_for()
    page.locator(f".found button[data-place='{ids[0]}']").click()
    page.get_by_text("overlap with E").wait_for()
    *_, nearest = vocabulary.neighbours(ids[0])
    overlaps = [f"{value:.3f}" for value in nearest.jaccard]
    assert [overlap for _, overlap in numbers(page, "^Nearest tokens")] == ["", *overlaps]
    norms = vocabulary.entry(ids[0]).norms.values()
    page.wait_for_function(f"location.hash.includes('&id={ids[0]}')")
    assert numbers(page, "^Norm of its row") == [[f"{norm:.4f}"] for norm in norms]
    page.kept("tokens")
    page.get_by_label("Search tokens").fill("no such token")
    page.get_by_text("No token contains this").wait_for()


def test_a_pair_is_compared(visit, run, base_run):
    page = visit()
    page.get_by_role("tab", name="Pairs").click()
    page.get_by_label("One token").fill("layer")
    page.get_by_label("Another").fill("token")
    page.get_by_label("Text before it").fill("every")
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("img", name="Distance by layer").wait_for()
    opened_models = open_model(str(run)), open_model(str(base_run))
    endings = pairs.endings_of(opened_models[0].tokenizer, ("layer", "token"), opened_models[0].vocabulary)
    found = [pairs.distances(opened, endings, "every").values() for opened in opened_models]
    lines = [line for of_model in found for line in of_model]
    assert numbers(page, "^By layer: the distance") == [
        [f"{value:.4f}" for value in layer] for layer in zip(*lines, strict=True)
    ]
    page.kept("pairs")
    page.get_by_label("Another").fill("<i>layers</i>")
    page.get_by_role("button", name="Compare").click()
    page.get_by_text("are not two different single tokens").wait_for()
    assert page.locator(".tide i").count() == 0


def test_results_are_shown_and_what_is_missing_is_named(visit):
    page = visit()
    page.get_by_role("tab", name="Model").click()
    page.get_by_text("Distance between E and the tables", exact=True).wait_for()
    assert page.locator("svg.panel").count() == 1
    page.kept("model")


def test_texts_are_written_side_by_side_and_looked_into(visit, run, base_run):
    page = visit(link="")
    page.get_by_role("button", name="Write", exact=True).wait_for()  # which is the tab that comes first
    page.get_by_role("button", name="The function returns").click()  # an example is written at once
    page.get_by_text("Click a token to look into it").wait_for()
    page.kept("write")
    shown = page.locator(".written section")
    names = ["mine, with memory", "mine, without memory", "base"]
    assert shown.locator("h3").all_inner_texts() == names
    alone = [open_model(str(one)) for one in (run, base_run)]
    prompt, sampling = "The function returns a list of", Sampling(0.8, top_k=40, seed=1)
    for number, opened in (0, alone[0]), (2, alone[1]):
        (text,) = generate(opened.model, opened.tokenizer, [prompt], 60, sampling)
        said = "".join(shown.nth(number).get_by_role("button").all_inner_texts())
        assert said.replace("↵", "") == f"{prompt}{text}"
    texts = ["".join(section.get_by_role("button").all_inner_texts()) for section in shown.all()]
    token = shown.nth(1).get_by_role("button").nth(12)
    place = token.get_attribute("data-place")
    token.click()
    page.get_by_text("What is predicted to follow").wait_for()
    assert page.get_by_role("tab", name="Text").get_attribute("aria-selected") == "true"
    chosen = page.locator(".tokens:not(.written *) [aria-pressed='true']")
    assert chosen.get_attribute("data-place") == place
    assert texts[1].replace("↵", "") in page.get_by_label("Text", exact=True).input_value()


def test_a_link_shows_the_same_again(visit, address):
    one = visit()
    read(one, f"{TEXT} 1+1=2 & more")
    one.get_by_role("radio", name="frequency decile").check()
    one.locator(".tokens [role=button]").nth(4).click()
    one.get_by_role("button", name="1", exact=True).click()
    one.get_by_role("table", name="without memory in layer 1").wait_for()
    one.wait_for_function("location.hash.includes('layer=1')")
    other = visit(link=one.url.removeprefix(f"{address}/"))
    other.get_by_role("table", name="without memory in layer 1").wait_for()
    for page in one, other:
        page.get_by_text("The darker, the rarer").wait_for()
    parts = ".tokens", "h2.token", ".layers"
    assert [one.locator(part).inner_html() for part in parts[1:]] == [
        other.locator(part).inner_html() for part in parts[1:]
    ]
    assert other.locator(".tokens").inner_text() == one.locator(".tokens").inner_text()
    assert other.locator(".tokens [aria-pressed='true']").get_attribute("data-place") == "4"
    for link, shown in {
        "#tab=write&prompt=every+layer&seed=7&length=5": "5 of 5 tokens written",
        "#tab=tokens&words=layer&id=7": "id 7, ",
        "#tab=pairs&one=layer&another=token&before=every": "By layer: the distance",
        "#tab=text&text=every+layer&token=999&layer=-1&shade=that+of+another": "2 of 2 tokens read",
        "#tab=nowhere&token=x&seed=1e999": "Prompt",
    }.items():
        page = visit(link=link)
        asked = [time.monotonic()]
        page.on("request", lambda request, asked=asked: asked.append(time.monotonic()))
        page.get_by_text(shown).first.wait_for()
        while time.monotonic() - asked[-1] < 1.5:
            assert len(asked) < 1000  # and it comes to rest
            page.wait_for_timeout(100)
    too_long = "remember('text', { text: 'x'.repeat(30000), token: 3 }), location.hash"
    assert one.evaluate(too_long) == "#tab=text"  # and no token of another text


def test_by_keyboard_alone(visit):
    page = visit()
    page.get_by_label("Text", exact=True).fill(TEXT)
    page.get_by_role("button", name="Read").focus()
    page.keyboard.press("Enter")
    wait_for_all(page, TEXT)
    page.locator(".tokens [role=button]").first.focus()
    for key in "ArrowRight", "ArrowRight", "ArrowLeft":
        page.keyboard.press(key)
    assert page.evaluate("document.activeElement.dataset.place") == "1"
    page.keyboard.press("Enter")
    page.get_by_text("What is predicted to follow").wait_for()
    assert page.locator("[role=button][aria-pressed='true']").get_attribute("data-place") == "1"
    page.keyboard.press("Tab")  # past all other tokens, to what is told of this one
    assert page.evaluate("document.activeElement.dataset.layer") == "0"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_is_wider_than_the_screen(visit, scheme):
    page = visit(390, scheme)
    read(page, TEXT)
    page.locator(".tokens [role=button]").nth(5).click()
    page.get_by_text("What is predicted to follow").wait_for()
    for tab in "Text", "Tokens", "Pairs", "Model", "Write":
        page.get_by_role("tab", name=tab).click()
        if tab == "Tokens":
            search(page, "layer").first.click()
            page.get_by_text("overlap with E").wait_for()
        if tab == "Pairs":
            page.get_by_label("One token").fill("layer")
            page.get_by_label("Another").fill("token")
            page.get_by_role("button", name="Compare").click()
            page.get_by_text("By layer: the distance").wait_for()
        if tab == "Write":
            page.get_by_role("button", name="Write", exact=True).click()
            page.get_by_text("tokens written. Click a token to look").wait_for()
        page.wait_for_timeout(500)
        page.kept(f"{tab.lower()}-tab")
        assert page.evaluate(WIDER_THAN_THEIR_BOX) == []
        assert page.evaluate(BROKEN_NUMBERS) == []
    assert len({tab.bounding_box()["y"] for tab in page.get_by_role("tab").all()}) == 1  # in one line
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    ink = page.locator("h1").evaluate("one => getComputedStyle(one).color")
    light, dim = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (background, ink))
    assert (light < 200, dim < 200) == ((True, False) if scheme == "dark" else (False, True))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_is_written_can_be_read_on_the_darkest_shade(visit, scheme):
    page = visit(scheme=scheme)
    token = page.locator(".tokens [role=button]").nth(1)
    for kind in "more", "less":
        ink, shade, behind = token.evaluate(
            """(one, kind) => {
                one.className = kind;
                one.style.setProperty("--share", 1);
                const look = getComputedStyle(one);
                return [look.color, look.backgroundColor, getComputedStyle(document.body).backgroundColor];
            }""",
            kind,
        )
        (*ink, _), (*shade, share), (*behind, _) = (parts(colour) for colour in (ink, shade, behind))
        mixed = [share * over + (1 - share) * under for over, under in zip(shade, behind, strict=True)]
        light, dark = sorted((luminance(ink), luminance(mixed)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) > 4.5  # as WCAG asks of text


def parts(colour):
    """Red, green, blue of 255 and the opacity, of what a browser calls a colour."""
    numbers = [float(part) for part in re.findall(r"[\d.]+", colour)]
    return [*numbers, 1.0] if len(numbers) == 3 else numbers


def luminance(colour):
    linear = [
        (part / 255 / 12.92 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4) for part in colour
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_many_blocks_of_a_model_with_nothing_beside_it_fit_a_phone(visit, tiny_model, tokenizer, tmp_path):
    folder = tmp_path / "many"
    tiny_model(vocab_size=len(tokenizer), num_memory_blocks=24).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with explored(tmp_path / "log", folder) as address, closing(visit(390, address=address)) as page:
        assert page.get_by_role("radio").count() == 2  # neither deciles nor another model
        page.locator(".tokens [role=button]").nth(5).click()
        page.get_by_text("What is predicted to follow").wait_for()
        heads = page.get_by_role("table", name=re.compile("^By layer")).locator("thead th").all_inner_texts()
        assert heads == ["layer", "weights", "memory", "state", "memory / state"]
        keys = page.locator(".keys").first.inner_text().split()[::2]
        assert keys == [*(f"M{block}" for block in range(1, 25)), "null"]
        page.kept("many-text")
        page.get_by_role("tab", name="Tokens").click()
        search(page, "#7").click()
        page.get_by_text("overlap with E").wait_for()
        page.kept("many-tokens")
        page.get_by_role("tab", name="Model").click()
        page.get_by_text("Not there yet").wait_for()
        assert page.locator("svg.panel").count() == 0
        page.get_by_role("button", name="Run footprint").click()  # and no command to copy
        page.get_by_text("footprint has ended").wait_for()
        page.locator("svg.panel").first.wait_for()
        assert page.get_by_role("button", name="Run footprint").count() == 0
        for tab in "Text", "Tokens", "Model":
            page.get_by_role("tab", name=tab).click()
            page.wait_for_timeout(300)
            assert page.evaluate(WIDER_THAN_THEIR_BOX) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\x00\x07\x1b[31m\r",
        "🌊🏳️‍🌈 e\u0301",
        "مد وجزر \u202e evil",
        "<script>alert(1)</script><img src=x onerror=alert(2)>",
        "{{#each value}}x{{/each}} ${alert(3)} @children",
        "x" * 100_000,
    ],
    ids=["nothing", "a space", "control", "emoji", "right to left", "html", "templates", "long"],
)
def test_hostile_texts_are_shown_as_they_are(visit, text):
    page = visit()
    ask_to_read(page, text)
    if not text:
        page.get_by_text("There is nothing to read").wait_for()
    elif len(text) == 100_000:
        page.get_by_text(re.compile(rf"{LIMIT:,} of {LIMIT:,} tokens read\..* more are left out")).wait_for()
    elif text.isascii() and text.isprintable():
        wait_for_all(page, text)
    else:
        page.locator(".tokens", has_text="The tide comes").wait_for(state="detached")
    assert page.locator(".tide script, .tide img").count() == 0
    read(page, "every layer")
    page.get_by_text("Mean loss of").wait_for()


def test_long_work_can_be_stopped(visit, slow_address):
    page = visit(address=slow_address)
    stop, read = page.get_by_role("button", name="Stop"), page.get_by_text("tokens read")
    assert stop.count() == 0
    ask_to_read(page, "the token knows every layer. " * 300)
    page.get_by_text(re.compile(f"{UNFINISHED}read")).wait_for()
    stop.click()
    page.get_by_text("Stopped: ").wait_for()
    before = read.inner_text()
    page.get_by_role("radio", name="frequency decile").check()
    page.get_by_text("The darker, the rarer").wait_for()
    assert read.inner_text() == before
    assert stop.count() == 0  # there is nothing to stop
    page.locator(".tokens [role=button]").nth(3).click()  # what was read can be looked into
    page.get_by_text("What is predicted to follow").wait_for()
    page.get_by_role("button", name="Read").click()
    stop.wait_for()  # as it goes on
    page.close()
    page = visit(address=slow_address, link="#tab=write&length=256")
    page.get_by_text(re.compile(f"{UNFINISHED}written")).wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_text(re.compile(r"Stopped: (?!256)\d+ of 256 tokens written")).wait_for()
    assert page.get_by_role("button", name="Stop").count() == 0
    page.get_by_role("tab", name="Model").click()
    page.get_by_role("button", name="Run routing").click()
    page.get_by_text("routing is running").wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("It did not end: it was stopped").wait_for()
    assert page.get_by_role("button", name="Stop").count() == 0


def test_what_is_asked_last_is_answered_though_every_answer_takes_its_time(visit, slow_address):
    page = visit(address=slow_address)
    buttons, status = page.locator(".tokens [role=button]"), page.get_by_text("tokens read")
    ask_to_read(page, "a context that is never read to its end. " * 60)
    page.get_by_text(re.compile(f"{UNFINISHED}read")).wait_for()
    page.get_by_role("radio", name="frequency decile").check()
    before = status.inner_text()
    page.get_by_text("The darker, the rarer").wait_for()
    page.wait_for_function("before => !document.body.innerText.includes(before)", arg=before)
    assert page.get_by_text("The darker, the rarer").is_visible()  # as it goes on
    read(page, "every layer knows")
    for place in 1, 3, 2:
        buttons.nth(place).click()
    page.get_by_role("heading", name="␣layer").wait_for()
    page.wait_for_timeout(2000)  # for what else may come
    assert page.get_by_role("heading", name="␣layer").is_visible()
    assert page.locator("[role=button][aria-pressed='true']").get_attribute("data-place") == "2"
    assert "3 of 3 tokens read" in status.inner_text()
    ask_to_read(page, "the token")
    page.get_by_role("radio", name="loss", exact=True).check()  # before any of it is there
    wait_for_all(page, "the token")
    page.get_by_text("The darker, the higher the loss").wait_for()
    page.wait_for_timeout(2000)
    assert page.locator(".tokens").inner_text() == "<bos>the token"
    assert page.get_by_text("The darker, the higher the loss").is_visible()
    page.get_by_label("Text", exact=True).fill("every token")
    page.evaluate(
        """() => {  // in one moment, so that the token is of the text that is still there
            [...document.querySelectorAll("button")].find((one) => one.textContent.trim() === "Read").click();
            const key = new KeyboardEvent("keydown", { key: "Enter", bubbles: true });
            document.querySelectorAll(".tokens [data-place]")[1].dispatchEvent(key);
        }"""
    )
    wait_for_all(page, "every token")
    page.wait_for_timeout(2000)
    assert not page.get_by_text("What is predicted to follow").is_visible()
    assert page.locator("[role=button][aria-pressed='true']").count() == 0
    page.get_by_role("tab", name="Tokens").click()
    page.get_by_text("of the run's held-out text read").wait_for()
    found = search(page, "e")  # while the words that gain most are sought
    page.wait_for_timeout(2000)
    assert not page.get_by_text("of the run's held-out text read").is_visible()
    for place in 0, 2, 1:
        found.nth(place).click()
    facts = page.get_by_text(f"id {found.nth(1).get_attribute('data-place')}, ")
    facts.wait_for()
    page.wait_for_timeout(2000)
    assert facts.is_visible()
    page.get_by_role("tab", name="Write").click()
    page.get_by_role("button", name="Write", exact=True).click()
    page.get_by_role("button", name="The old man").click()
    page.get_by_role("button", name="The function").click()
    page.locator(".written .tokens", has_text="The function").nth(1).wait_for()
    page.get_by_text("60 of 60 tokens written").wait_for()
    for section in page.locator(".written section").all():
        assert "".join(section.get_by_role("button").all_inner_texts()).startswith("The function")


def test_two_visitors_at_once_see_their_own(visit):
    one, other = visit(), visit()
    for page, text in (one, "every layer"), (other, "the token"):
        page.get_by_label("Text", exact=True).fill(text)
    for page in one, other:
        page.get_by_role("button", name="Read").click()
    for page, text in (one, "every layer"), (other, "the token"):
        page.locator(".tokens", has_text=text).wait_for()
        page.locator(".tokens [role=button]").nth(1).click()
        page.get_by_text("What is predicted to follow").wait_for()
        assert "".join(page.locator(".tokens [role=button]").all_inner_texts()) == f"<bos>{text}"


@pytest.mark.parametrize(
    "path",
    [
        "gradio_api/file=/etc/passwd",
        "gradio_api/file=../../../../etc/passwd",
        "static/../../../../../../etc/passwd",
        "assets/..%2f..%2f..%2f..%2fetc%2fpasswd",
        "gradio_api/file={run}/config.json",
        "gradio_api/file={run}/../outside",
        "gradio_api/proxy=http://127.0.0.1:1/",
        "gradio_api/runs",
    ],
)
def test_no_file_is_served(address, run, path):
    (run.parent / "outside").write_text("secret")
    with socket.create_connection(("127.0.0.1", int(address.rsplit(":", 1)[1]))) as line:
        line.sendall(f"GET /{path.format(run=run)} HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n".encode())
        answer = line.makefile("rb").read()
    assert re.match(rb"HTTP/1.\d 4\d\d", answer)
    assert b"Invalid host header" not in answer
    assert b"root:" not in answer
    assert b"secret" not in answer


def test_nothing_can_be_put_there_and_no_other_machine_is_answered(address):
    body = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\nsome\r\n--x--\r\n'
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(f"{address}/gradio_api/upload", body, headers))
    assert refused.value.code == 413
    question = {"data": [TEXT, "loss", 0], "fn_index": 1, "session_hash": "elsewhere"}
    for headers, code in (
        ({"Content-Type": "application/json", "Origin": "http://elsewhere.example"}, 403),
        (
            {"Origin": "http://localhost:1"},
            403,
        ),  # another program's page on this machine; no type, no preflight
        ({"Content-Type": "application/json", "Content-Length": str(2**30)}, 413),
    ):
        join = urllib.request.Request(
            f"{address}/gradio_api/queue/join", json.dumps(question).encode(), headers
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(join)
        assert refused.value.code == code
    assert urllib.request.urlopen(address).headers["X-Frame-Options"] == "DENY"
    port = int(address.rsplit(":", 1)[1])
    with pytest.raises(urllib.error.HTTPError) as refused:  # a name that someone has lead here
        urllib.request.urlopen(urllib.request.Request(address, headers={"Host": f"elsewhere.example:{port}"}))
    assert refused.value.code == 400
    if sys.platform == "linux":  # where all of 127.0.0.0/8 is this machine
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port)).close()


def test_a_place_that_is_taken_is_told_before_anything_is_loaded(address, run):
    port = address.rsplit(":", 1)[1]
    command = [sys.executable, "-m", "tide_lm", "explore", str(run), "--port", port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert f"error: cannot listen at 127.0.0.1:{port} (Address already in use" in done.stderr
