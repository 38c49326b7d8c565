"""The report as text: what is on it, and what is escaped."""

import functools
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from command import tide_lm
from report.conftest import SCRIPT

from tide_lm.report.answers import ANSWERS
from tide_lm.report.catalogue import FIGURES
from tide_lm.report.formatting import MINUS
from tide_lm.report.page import write_report
from tide_lm.report.results import open_runs

FEW = ("routing", "distances", "updates", "validation", "perplexity")  # results that are quick to draw


class Outline(HTMLParser):
    """Tags, ids, headings and addresses of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.labels: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.append(tag)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [value for name, value in attributes if name in ("href", "src", "xlink:href")]
        if tag == "svg":
            self.labels.append(found.get("aria-label", ""))


@pytest.fixture(scope="module")
def planted(plant, made_once):
    """Two runs with all results, and their page beside them."""

    def make(folder):
        runs = [plant(folder / "base", 0), plant(folder / "tide", 3)]
        write_report(runs, folder / "page.html")

    folder = made_once("report", make)
    return [folder / "base", folder / "tide"]


@pytest.fixture(scope="module")
def page(planted):
    return (planted[0].parent / "page.html").read_text()


def test_the_page_needs_nothing_but_itself(page):
    outline = Outline(page)
    assert outline.tags.count("script") == outline.tags.count("style") == 1
    for link in outline.links:
        assert link.startswith(("#", "data:")), link
    assert "@import" not in page
    assert "http://" not in page.replace("http://www.w3.org/", "")
    assert "https://" not in page


def test_links_lead_somewhere_and_ids_are_unique(page):
    outline = Outline(page)
    assert len(outline.ids) == len(set(outline.ids))
    assert {link[1:] for link in outline.links if link.startswith("#")} <= set(outline.ids)


def test_headings_are_in_order_and_drawings_have_words(page):
    outline = Outline(page)
    levels = [int(tag[1]) for tag in outline.tags if tag in ("h1", "h2", "h3", "h4")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert len(outline.labels) > 20
    assert all(outline.labels)


def test_tokens_and_commands_are_escaped(page):
    assert SCRIPT not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_the_runs_stand_side_by_side(page):
    for text in (
        "base-tiny",
        "tide-3e-tiny",
        "gains from 0.1, learning rate x5, decay 0, row-lazy AdamW",
        f"tide {MINUS} base",
        f"{MINUS}0.200",
        "123.457",
        "0.530 to 0.889",
        "6.671 at K = 0, 6.250",
        "TIDE-24E-1B (paper)",
        "tide-lm analyze x",
        "0123abc",
        "torch 2.11.0",
        "docs/architecture.svg",
    ):
        assert text in page, text


def test_the_page_answers_a_readers_questions_in_order(page):
    """It was ordered by the paper's figure numbers, and the training loss came last."""
    outline = Outline(page)
    asked = ["trained", "helped", "whom", "cost", "memory", "paper", "again"]
    assert [name for name in outline.ids if name in asked] == asked
    assert outline.links[1 : 1 + len(asked)] == [f"#{name}" for name in asked]  # behind the icon
    order = ["training-loss", "loss-by-decile", "footprint", "routing", "collapse"]
    assert [name for name in outline.ids if name in order] == order
    sections = re.split(r"<h2 ", page)[1:]
    answers = [re.findall(r'<p class="answer">([^<]+)</p>', section) for section in sections]
    assert [len(found) for found in answers] == [1] * len(asked)
    for text in (
        "3 tables",
        "0.155 nats less loss on the held-out text than base",
        "rare tokens",
        "of GPU memory",
        "routers give",
    ):
        assert text in str(answers), text


def test_equal_losses_are_said_to_be_the_same(plant, tmp_path):
    runs = open_runs([plant(tmp_path / name, 0, only=("validation",)) for name in ("base", "again")])
    assert "again has the same loss on the held-out text as base (" in ANSWERS["helped"](runs)


def test_a_gain_is_told_with_the_parameters_of_both_runs(page):
    """A green number was there without a word of one model's being larger."""
    tiles = re.findall(r'<strong class="lower">.*?</li>', page)
    assert len(tiles) == 4
    for tile in tiles:
        assert re.search(r"[\d.]+[KM] parameters against [\d.]+[KM]</span>", tile)


def test_a_command_stands_on_the_page_once(page):
    """A demo's command was there for each of its 17 results."""
    commands = re.findall(r"<pre[^>]*>(.*?)</pre>", page)
    assert [command.split("&#39;")[0] for command in commands] == ["tide-lm analyze x "]
    made = dict(re.findall(r"<strong>(\w+, seed 0)</strong>: (.*)</p>", page))
    assert made["base, seed 0"].split(", ")[-2:] == ["validation", "perplexity of wiki"]
    assert "routing" in made["tide, seed 0"]


def test_a_command_that_ran_in_two_environments_stands_on_the_page_once(plant, tmp_path):
    """A demo during which something was committed was there twice."""
    run = plant(tmp_path / "x", only=("distances", "updates", "footprint"))
    path = run / "results" / "updates.json"
    path.write_text(path.read_text().replace("0123abc", "4567def"))
    page = write_report([run], tmp_path / "page.html").read_text()
    assert page.count("<pre") == 1
    assert page.count("<dd>0123abc</dd>") == page.count("<dd>4567def</dd>") == 1
    assert re.search(r"<strong>x, seed 0</strong>: (.*)</p>", page)[1].count(", ") == 2


def test_the_words_that_gain_most_are_shown_in_their_sentences(page):
    assert "Of 611 words that occur 5 times or more, tide predicts 579 better than base." in page
    (word,) = re.findall(r"<li><strong>learnt</strong>.*</li>", page)
    assert f"{MINUS}5.25 nats" in word
    assert "7 times" in word
    assert re.search(r"<q>… [^<]*its end, she had <mark>learnt</mark> it\.", word)
    assert "At the beginning" not in word


def test_the_page_is_folded_but_for_the_first_figure_of_each_question(page):
    """It was 21,862 px long."""
    cards = re.findall(r'<details class="card" id="([^"]+)"( open)?>', page)
    assert set(FIGURES) <= {name for name, _ in cards}
    assert [name for name, is_open in cards if is_open] == [
        "training-loss",
        "words",
        "loss-by-decile",
        "footprint",
        "routing",
    ]


def test_the_values_of_every_chart_are_in_a_table(page):
    charts = page.split('<div class="chart">')[1:]
    assert len(charts) == Outline(page).tags.count("svg") > 20
    assert all('<tr data-at="0.' in chart for chart in charts)
    losses = next(chart for chart in charts if "Loss by decile: held-out text" in chart)
    assert '<th scope="row">0</th><td>9</td><td>8.8</td></tr>' in losses
    training = charts[0].split("</table>")[0]
    assert "training tokens" in training
    assert training.count("<tr ") == 59
    slots = next(chart for chart in charts if "Router weights" in chart)
    assert re.search(r'data-by="xy".*<th scope="col" data-at="0\.\d+">null</th>', slots, re.DOTALL)
    assert '<th scope="row">9</th><td>0.1167</td><td>0.1167</td><td>0.1167</td><td>0.65</td>' in slots
    deciles = next(chart for chart in charts if "Growth over training" in chart)
    assert ">0, rarest</th>" in deciles  # of ten lines, two are in the legend and all in the table
    assert ">5</th>" in deciles


def test_a_run_in_progress_says_how_far_it_is(plant, tmp_path):
    run = plant(tmp_path / "x", only=())
    timing = {"tokens_per_s": 1234.5, "memory_gb": 1.5, "seconds_left": 3661}
    line = {"step": 61, "tokens": 6100, "loss": 5.5, "learning_rate": 3e-4, "timing": timing}
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    page = write_report([run], tmp_path / "page.html").read_text()
    assert "is at step 61 of 100" in page
    for value in ("5.500", f"3.00e{MINUS}04", "1,234", "1:01:01"):
        assert f"<dd>{value}</dd>" in page, value
    (run / "metrics.jsonl").unlink()  # it has begun and logged nothing yet
    page = write_report([run], tmp_path / "page.html").read_text()
    assert "is at step 0 of 100" in page
    assert "no tokens yet" in page


@pytest.mark.slow
def test_one_run_is_not_compared_and_three_are_each(plant, tmp_path):
    runs = [plant(tmp_path / name, blocks, only=FEW) for name, blocks in (("base", 0), ("a", 3), ("b", 3))]
    page = write_report(runs[1:2], tmp_path / "page.html").read_text()
    assert "a second run would show whether that is good" in page
    assert '<strong class="lower">' not in page
    page = write_report(runs, tmp_path / "page.html").read_text()
    for name in "ab":
        assert f"{name} has 0.155 nats less loss" in page


def test_a_small_page_is_the_same_each_time(plant, tmp_path):
    runs = [plant(tmp_path / "tide", 3, only=("routing", "updates"))]
    once, again = (write_report(runs, tmp_path / f"{part}.html").read_text() for part in "ab")
    assert once == again


@pytest.mark.slow
def test_the_page_is_the_same_each_time(page, planted, tmp_path):
    assert write_report(planted, tmp_path / "again.html").read_text() == page


def test_what_is_missing_is_said_with_its_command(plant, tmp_path):
    run = plant(tmp_path / "lonely", only=("distances", "updates"))
    page = write_report([run], tmp_path / "page.html").read_text()
    assert f"<code>tide-lm analyze routing {run} --text FILE</code>" in page
    assert 'id="routing"' not in page
    assert 'id="distances"' in page
    assert 'id="losses"' not in page


def test_what_is_damaged_is_said_on_the_page_once(plant, tmp_path):
    run = plant(tmp_path / "x", only=("distances", "updates"))
    for name in ("updates", "demo"):
        (run / "results" / f"{name}.json").write_text("{")
    page = write_report([run], tmp_path / "page.html").read_text()
    for name in ("updates", "demo"):
        assert page.count(f"results/{name}.json is damaged") == 1


def test_a_result_of_an_earlier_checkpoint_is_said_on_the_page_and_not_drawn(plant, tmp_path):
    run = plant(tmp_path / "x", only=("distances", "updates", "benchmarks"))
    for name in ("updates", "benchmarks"):
        file = run / "results" / f"{name}.json"
        subject = {"model": str(run), "step": None, "tokens": 2048}
        file.write_text(json.dumps({**json.loads(file.read_text()), "subject": subject}))
    done = tide_lm("report", run, "--out", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.html").read_text()
    assert {"distances", "updates", "benchmarks"} & set(Outline(page).ids) == {"distances"}
    for name, command in {"updates": "analyze updates", "benchmarks": "evaluate"}.items():
        said = f"{run}/results/{name}.json was measured at 2,048 of 6,000 tokens: run "
        assert f"warning: {said}`tide-lm {command} {run}" in done.stderr
        assert f"{said}<code>tide-lm {command} {run}" in page


def test_a_run_with_little_has_a_page_too(tmp_path):
    (tmp_path / "little").mkdir()
    (tmp_path / "little" / "metrics.jsonl").touch()
    page = write_report([tmp_path / "little"], tmp_path / "page.html").read_text()
    assert "Not known yet: no loss on held-out text is measured." in page
    assert "0 of the paper\N{RIGHT SINGLE QUOTATION MARK}s 19 figures and tables are on this page." in page
    assert "No result says how it was made." in page


@pytest.mark.parametrize("arguments", [["report"], ["figure", "norms"]])
def test_a_folder_without_results_is_an_error(arguments, tmp_path):
    (tmp_path / "empty").mkdir()
    done = tide_lm(*arguments, tmp_path / "empty")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {tmp_path / 'empty'} holds no results")
    assert list(tmp_path.rglob("*")) == [tmp_path / "empty"]


def test_a_base_is_not_told_to_measure_memory(plant, tmp_path):
    base = plant(tmp_path / "base", 0, only=FEW)
    page = write_report([base], tmp_path / "page.html").read_text()
    assert "has no memory, which routing shows" in page
    assert "tide-lm analyze routing" not in page


@pytest.fixture(scope="module")
def drawn(plant, tmp_path_factory):
    """Return `drawn(only)`: the names of the figures of a run with so many results, all of them sound."""

    @functools.cache
    def names(only: tuple[str, ...] | None) -> set[str]:
        folder = tmp_path_factory.mktemp("sound")
        page = write_report([plant(folder / "x", only=only)], folder / "page.html")
        return set(Outline(page.read_text()).ids) & set(FIGURES)

    return names


@pytest.mark.parametrize(
    ("what", "content", "left_out", "only"),
    [
        ("routing", "{", {"routing"}, FEW),
        pytest.param("routing", "{", {"routing"}, None, marks=pytest.mark.slow),
        ("routing", '{"by_layer": [[[1.0, "x"]]], "tokens": [1], "text": "x"}', {"routing"}, FEW),
        ("validation", '{"loss": "x"}', {"loss-by-decile"}, FEW),
        ("perplexity", '{"texts": {"x": {}}}', {"loss-by-decile"}, FEW),
    ],
    ids=["no JSON", "no JSON, of all results", "routing", "validation", "perplexity"],
)
def test_a_damaged_result_is_listed_and_all_else_is_drawn(
    what, content, left_out, only, plant, drawn, tmp_path
):
    path = plant(tmp_path / "x", only=only)
    (path / "results" / f"{what}.json").write_text(content)
    done = tide_lm("report", path, "--out", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    (warning,) = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert f"results/{what}.json" in warning
    page = (tmp_path / "page.html").read_text()
    assert drawn(only) - set(Outline(page).ids) == left_out
    listed = [line for line in page.split("\n") if f"results/{what}.json is damaged" in line]
    assert all(any(FIGURES[name].title in line for line in listed) for name in left_out)


def test_a_figure_is_drawn_of_the_runs_whose_results_are_sound(plant, tmp_path):
    paths = [plant(tmp_path / name, only=("norms", "updates")) for name in "abc"]
    (paths[1] / "results" / "norms.json").write_text(
        '{"embedding": ["x"], "tables": [], "spread": {}, "growth": []}'
    )
    (paths[2] / "results" / "norms.json").write_text("{")
    said: list[str] = []
    page = write_report(paths, tmp_path / "page.html", said.append).read_text()
    assert "Rare and common rows: a" in page
    assert "Rare and common rows: b" not in page
    assert len(said) == 2
    for path, line in zip(paths[1:], said, strict=True):
        assert f"{path}/results/norms.json is damaged" in line


def test_a_damaged_figure_is_an_error_and_others_are_not(plant, tmp_path):
    path = plant(tmp_path / "x")
    (path / "results" / "norms.json").write_text("{")
    done = tide_lm("figure", "norms", path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "norms.json is damaged" in done.stderr
    assert tide_lm("figure", "updates", path).returncode == 0


@pytest.mark.parametrize(
    "only", [FEW, pytest.param(None, marks=pytest.mark.slow)], ids=["of few results", "of all results"]
)
def test_names_of_runs_are_escaped(only, plant, tmp_path):
    run = plant(tmp_path / "<b>&\"'$x$", only=only)
    page = write_report([run], tmp_path / "page.html").read_text()
    assert "<b>" not in page
    assert "b" not in Outline(page).tags


@pytest.mark.parametrize(
    ("arguments", "written"), [(["report"], "index.html"), (["figure", "updates"], "updates.png")]
)
def test_the_commands_write_beside_the_first_run_without_torch(arguments, written, plant, tmp_path):
    runs = [plant(tmp_path / name, blocks, only=("updates",)) for name, blocks in (("base", 0), ("tide", 3))]
    path = runs[0] / "report" / written
    code = f"""
import sys
from tide_lm.cli import main
sys.argv = ["tide-lm", *{arguments!r}, *{[str(run) for run in runs]!r}]
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
assert "matplotlib" in sys.modules
assert not {{"torch", "transformers", "triton"}} & set(sys.modules)
print("light")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split()[-2:] == [str(path), "light"], done.stderr
    assert path.exists()


def test_help_does_not_load_matplotlib():
    code = "import tide_lm.cli, sys; assert not {'matplotlib', 'jinja2', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
