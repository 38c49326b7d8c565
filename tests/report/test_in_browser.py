"""The report in a real browser: every drawing is there, nothing leaves the page, phones and dark rooms."""

import json
import os
from io import BytesIO

import pytest
from PIL import Image

from tide_lm.report.page import write_report

pytestmark = pytest.mark.browser
TIMEOUT = 300_000  # ms: a busy machine is no fault


@pytest.fixture(scope="module")
def address(plant, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    runs = [
        plant(folder / "base", 0),
        plant(folder / "a-run-with-a-name-that-is-rather-long-for-a-column", 3),
    ]
    return write_report(runs, folder / "index.html").as_uri()


@pytest.fixture
def visit(browser, address, tmp_path):
    """Opens the report so wide, light or dark; fails if it said anything or asked for anything."""
    said, asked, contexts = [], [], []

    def open_page(width: int, scheme: str = "light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        context.set_default_timeout(TIMEOUT)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(dialog.message))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(address)
        page.evaluate("document.querySelectorAll('main details').forEach(one => { one.open = true; })")
        folder = os.environ.get("TIDE_LM_SCREENSHOTS", str(tmp_path))
        page.screenshot(path=f"{folder}/report-{width}-{scheme}.png", full_page=True)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []
    assert {url.split(":")[0] for url in asked} <= {"file", "about", "data"}


def test_every_drawing_is_seen(visit):
    page = visit(1200)
    boxes = page.eval_on_selector_all(
        "svg.panel",
        "found => found.map(one => [one.getBoundingClientRect().width, one.getBoundingClientRect().height,"
        " one.querySelectorAll('path, image, use').length])",
    )
    assert len(boxes) > 20
    assert all(width > 200 and height > 100 and shapes > 5 for width, height, shapes in boxes), boxes


def test_nothing_sticks_out_of_a_drawing(visit):
    """Labels are drawn with the reader's own font, which may be wider than the one they were laid out for."""
    page = visit(1200)
    outside = page.eval_on_selector_all(
        "svg.panel",
        """found => found.flatMap(svg => {
            const frame = svg.getBoundingClientRect();
            return [...svg.querySelectorAll('text')].filter(text => {
                const box = text.getBoundingClientRect();
                return box.left < frame.left - 2 || box.right > frame.right + 2
                    || box.top < frame.top - 2 || box.bottom > frame.bottom + 2;
            }).map(text => text.textContent);
        })""",
    )
    assert outside == []


@pytest.mark.parametrize("width", [320, 390, 768])
def test_the_page_is_no_wider_than_the_screen(width, visit):
    page = visit(width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    wide = page.evaluate(
        """[...document.querySelectorAll('main *')].filter(one => !one.closest('.scroll, svg')
            && one.getBoundingClientRect().right > innerWidth + 1).map(one => one.outerHTML.slice(0, 80))"""
    )
    assert wide == []


def test_tables_are_readable_on_a_phone(visit):
    page = visit(390)
    found = page.eval_on_selector_all(
        "table",
        """tables => tables.map(table => {
            const box = table.closest('.scroll');
            const cells = [...table.querySelectorAll('th, td, caption')];
            return [Math.min(...cells.map(cell => parseFloat(getComputedStyle(cell).fontSize))),
                    getComputedStyle(box).overflowX, box.getBoundingClientRect().width];
        })""",
    )
    assert len(found) > 5
    assert all(size >= 12 and overflow == "auto" and width <= 390 for size, overflow, width in found), found


@pytest.mark.parametrize(
    ("width", "scheme"), [(390, "light"), (390, "dark"), (1200, "light"), (1200, "dark")]
)
def test_a_table_that_goes_on_has_a_shaded_edge_and_no_other(width, scheme, visit):
    """In the last pixels of its caption, where no words are; at the table's end the shade is gone."""
    page = visit(width, scheme)

    def is_shaded(box) -> bool:
        box.evaluate("one => one.scrollIntoView({behavior: 'instant'})")
        frame = box.bounding_box()
        spot = {"x": frame["x"] + frame["width"] - 9, "y": frame["y"] + 9, "width": 9, "height": 1}
        pixels = Image.open(BytesIO(page.screenshot(clip=spot))).convert("RGB")
        colours = [pixels.getpixel((place, 0)) for place in range(8)]  # and then the border
        return max(abs(a - b) for a, b in zip(colours[0], colours[6], strict=True)) > 10

    for box in page.query_selector_all(".scroll:not(.long)"):
        assert is_shaded(box) == box.evaluate("one => one.scrollWidth > one.clientWidth")
        box.evaluate("one => { one.scrollLeft = one.scrollWidth; }")
        assert not is_shaded(box)


@pytest.mark.parametrize("width", [320, 390, 768, 1200])
def test_captions_fit_their_tables(width, visit):
    page = visit(width)
    outside = page.eval_on_selector_all(
        ".scroll caption",
        """found => found.filter(one => one.getBoundingClientRect().right >
            one.closest('.scroll').getBoundingClientRect().right + 1).map(one => one.textContent)""",
    )
    assert outside == []


def test_a_short_table_of_two_runs_is_seen_whole_on_a_phone(first_seen, plant, tmp_path):
    """Its second run was beyond the edge, since the names of rows were not broken."""
    runs = [
        plant(tmp_path / name, blocks, only=("validation",)) for name, blocks in (("base", 0), ("tide", 3))
    ]
    for run in runs:
        timing = {"tokens_per_s": 2112.0, "memory_gb": 0.7, "seconds_left": 0}
        line = {"step": 100, "tokens": 204_800, "loss": 5.0, "timing": timing}
        (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    page = first_seen(390, 844)
    page.goto(write_report(runs, tmp_path / "page.html").as_uri())
    box = page.locator(".scroll[aria-label='What the training took']")
    assert box.evaluate("one => one.scrollWidth <= one.clientWidth")


def luminance(colour: str) -> float:
    parts = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_what_is_behind_them(scheme, visit):
    page = visit(1200, scheme)
    pairs = page.evaluate(
        """() => {
            const behind = one => {
                for (; one; one = one.parentElement) {
                    const colour = getComputedStyle(one).backgroundColor;
                    if (!colour.endsWith(', 0)')) return colour;
                }
            };
            const plain = 'p, h1, h2, h3, th, td, dt, dd, a, figcaption, caption, li, strong, code, small';
            const words = [...document.querySelectorAll(plain)].map(one =>
                [getComputedStyle(one).color, behind(one), one.tagName]);
            const ticks = [...document.querySelectorAll('svg.panel text')]
                .map(one => [getComputedStyle(one).fill, behind(one.closest('.card')), 'text']);
            return words.concat(ticks);
        }"""
    )
    dark = luminance(next(behind for _, behind, tag in pairs if tag == "H1")) < 0.1
    assert dark == (scheme == "dark")
    written_on_cells = ("rgb(0, 0, 0)", "rgb(255, 255, 255)")
    for front, behind, tag in pairs:
        if tag == "text" and front in written_on_cells:
            continue
        light, dim = sorted((luminance(front), luminance(behind)), reverse=True)
        assert (light + 0.05) / (dim + 0.05) >= 4.5, (tag, front, behind)


@pytest.fixture
def first_seen(browser, address):
    """Opens the report as it is first seen, so wide."""
    contexts = []

    def open_page(width: int, height: int = 900):
        contexts.append(browser.new_context(viewport={"width": width, "height": height}))
        contexts[-1].set_default_timeout(TIMEOUT)
        page = contexts[-1].new_page()
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()


def test_the_page_is_short_until_it_is_unfolded(first_seen):
    assert first_seen(1280).evaluate("document.documentElement.scrollHeight") < 8000


def test_the_contents_stay_on_a_desktop_and_are_folded_on_a_phone(first_seen):
    """On a phone, the first screen was nothing but links."""
    page = first_seen(1280)
    page.locator("nav a", has_text="What does it cost?").click()
    page.wait_for_function("document.querySelector('nav [aria-current]').hash === '#cost'")
    assert page.locator("nav a").first.bounding_box()["y"] > 0
    page = first_seen(390, 844)
    assert not page.locator("nav a").first.is_visible()
    assert page.locator(".answer").first.bounding_box()["y"] < 300
    page.locator("nav summary").click()
    page.locator("nav a", has_text="What does it cost?").click()
    assert not page.locator("nav a").first.is_visible()
    page.set_viewport_size({"width": 1280, "height": 900})
    page.locator("nav a").first.wait_for()


def test_a_link_to_a_folded_figure_opens_it(first_seen):
    page = first_seen(1280)
    assert not page.locator("#norms svg").first.is_visible()
    page.evaluate("location.hash = '#norms'")
    page.locator("#norms svg").first.wait_for()


@pytest.mark.parametrize(
    ("figure", "said"),
    [("training-loss", ["training tokens", "base", "a-run"]), ("routing", ["frequency decile", "M2"])],
)
def test_a_chart_shows_its_values_under_the_pointer(figure, said, first_seen):
    page = first_seen(1280)
    chart = page.locator(f"#{figure} svg").first
    chart.evaluate("one => one.scrollIntoView({behavior: 'instant', block: 'center'})")
    box, tip = chart.bounding_box(), page.locator("#tip")
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 0.3 * box["height"])
    tip.wait_for()
    shown = tip.inner_text().split("\n")
    assert [line[: len(part)] for line, part in zip(shown, said, strict=True)] == said
    assert all(float(line.rsplit(" ", 1)[1]) > 0 for line in shown[1:])
    page.mouse.move(1, 1)
    tip.wait_for(state="hidden")


def test_a_watched_page_loads_itself_again_and_keeps_the_readers_place(first_seen, plant, tmp_path):
    run, out = plant(tmp_path / "x", only=("updates", "validation")), tmp_path / "page.html"
    write_report([run], out, reload=1)
    page = first_seen(600, 500)
    page.goto(out.as_uri())
    # A change just before the page loads itself again is lost: make it until a page begins with it.
    page.wait_for_function(
        """() => {
            const card = document.getElementById('updates');
            if (document.readyState !== 'complete') return false;
            if (card.open && scrollY === 700 && !window.changed) return true;
            window.changed = card.open = true;
            scrollTo({top: 700, behavior: 'instant'});
        }"""
    )
    (run / "metrics.jsonl").write_text('{"step": 77, "tokens": 7700, "loss": 4.5}\n')
    write_report([run], out, reload=1)
    page.wait_for_function(
        """() => document.readyState === 'complete' && scrollY === 700
            && document.getElementById('updates').open
            && document.body.textContent.includes('is at step 77 of 100')"""
    )
