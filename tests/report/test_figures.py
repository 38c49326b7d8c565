"""Every figure from planted results: its values, its files, and what it says when something is missing."""

import json
import re
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import pytest
from command import tide_lm
from report.conftest import SCRIPT
from report.test_drawn import drawn

from tide_lm.report import overview, paper
from tide_lm.report.catalogue import FIGURES
from tide_lm.report.drawing import inline_svg, write
from tide_lm.report.figures import benchmarks, collapse, compression, loss, memory, tokens, training
from tide_lm.report.formatting import MINUS, short
from tide_lm.report.results import MissingError, open_runs

OF_TIDE_ALONE = {"routing", "layer-drop", "bits", "ranks", "distances", "neighbours"}


def usable(figure, paths):
    return open_runs(paths[1:] if figure.name in OF_TIDE_ALONE else paths)


def texts(svg: str) -> list[str]:
    return [
        "".join(node.itertext()) for node in ElementTree.fromstring(svg).iter() if node.tag.endswith("text")
    ]


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_a_readable_svg_and_a_png(name, two_runs, tmp_path):
    figure = FIGURES[name]
    runs = usable(figure, two_runs)
    svg, png = write(figure, runs, tmp_path)
    assert (svg.name, png.name) == (f"{name}.svg", f"{name}.png")
    assert png.read_bytes().startswith(b"\x89PNG")
    found = texts(svg.read_text())
    for panel in figure.panels(runs):
        assert panel.title.split(":")[0][:20] in " ".join(found)
    assert "mathdefault" not in " ".join(found)
    assert SCRIPT not in svg.read_text()
    assert "dc:date" not in svg.read_text()


def test_a_figure_is_the_same_each_time(two_runs, tmp_path):
    once, again = (write(FIGURES["distances"], open_runs(two_runs[1:]), tmp_path / part) for part in "ab")
    assert [path.read_bytes() for path in once] == [path.read_bytes() for path in again]


@pytest.mark.parametrize("name", FIGURES)
def test_the_papers_numbers_stand_beside_one_of_each_run(name, two_runs):
    figure = FIGURES[name]
    runs = usable(figure, two_runs)
    for row in figure.compare(runs):
        assert len(row.ours) == len(runs)
        assert row.what
        assert row.paper
    for table in figure.tables(runs):
        assert all(len(row) == len(table.columns) for row in table.rows)


def test_every_figure_and_table_of_the_paper_has_its_place():
    places = [place for figure in FIGURES.values() for place in figure.place.split(" and ")]
    places += [place for place, _, _ in paper.ELSEWHERE]
    wanted = {f"Figure {number}" for number in range(1, 15)} | {
        f"Table {number}" for number in (1, 2, 4, 5, 6)
    }
    assert wanted | {"Proposition 3.2"} == set(places)
    assert len(places) == len(set(places))


def told(name: str, runs) -> dict[str, list[str]]:
    return {row.what: list(row.ours) for row in FIGURES[name].compare(runs)}


def test_the_values_are_those_of_the_results(two_runs):
    runs = base, tide = open_runs(two_runs)
    deciles = told("loss-by-decile", runs)
    assert deciles["loss on the rarest decile against the first run, nats"] == [
        "the first run",
        f"{MINUS}0.200 ({MINUS}2.2 %)",
    ]
    rare, common = 0.2 * (1 - 1 / 20), 0.2 * (1 - 8 / 20)
    assert deciles["gain on rare tokens over that on common ones"][1] == f"{rare / common:.2f}"
    blocks = told("loss-by-blocks", runs)["loss on rare tokens, nats, and its difference to K = 0"]
    assert blocks == ["8.500 (+0.000)", f"8.310 ({MINUS}0.190)"]
    assert told("routing", [tide])["null bank, last layer, rarest to commonest decile"] == ["0.200 to 0.650"]
    assert told("distances", [tide])["mean cosine distance of the tables to E"] == ["0.700 to 0.900"]
    assert told("distances", [tide])["mean cosine distance between tables"] == ["0.400 to 0.600"]
    assert told("layer-drop", [tide])["perplexity without layer 0"] == ["wiki +2,000.0 %"]
    assert told("layer-drop", [tide])["perplexity without layer 13"] == ["not measured: it has fewer layers"]
    assert told("bits", [tide])["perplexity in 4 bits"] == ["wiki +1.00 %"]
    assert told("ranks", [tide])["perplexity with half the rank"] == ["wiki +50.00 %"]
    assert told("neighbours", [tide])["overlap of the tables with E for “asynchronously”"] == ["0.11 to 0.43"]
    assert told("neighbours", [tide])["overlap of the tables with E for “fred”"] == ["not measured"]
    assert told("footprint", runs)["tables on SSD at K = 24, 4 bits"] == ["9.600 GB", "9.600 GB"]
    assert told("norms", runs)["mean norm rises from decile to decile"] == ["at 9 of 9 steps"] * 2
    assert told("perplexity", runs)["perplexity on wiki at the last checkpoint"] == ["45.000", "44.800"]
    amplified = told("gradients", runs)["gradient of all tables over that of E's input, decile 0"]
    assert amplified == ["no tables", "1.5 (K = 3)"]
    assert benchmarks.scores(base)[:2] == pytest.approx([30, 31])
    assert tokens.gradient_lines(tide)["all 3 tables together"] == [1.5] * 10
    assert memory.null_bank(tide.result("routing")["by_layer"][0])[0] == pytest.approx(0.1)


def test_curves_are_means_over_the_pairs_that_all_runs_have(two_runs):
    runs = base, tide = open_runs(two_runs)
    assert collapse.curves(runs, "homophones", "distance") == {base: [2.0, 3.0], tide: [4.0, 6.0]}
    tide.result("collapse")["categories"]["homophones"]["pairs"][1] = ["other", "pair"]
    assert collapse.curves(runs, "homophones", "distance") == {base: [1.0, 2.0], tide: [2.0, 4.0]}


def test_a_long_training_curve_is_drawn_by_its_means(two_runs, monkeypatch):
    _, tide = open_runs(two_runs)
    tokens_seen, losses = training.training_curve(tide)
    assert len(losses) == 59  # one step was left out
    monkeypatch.setattr(training, "CURVE_POINTS", 29)
    tokens_seen, losses = training.training_curve(tide)
    assert (len(losses), tokens_seen[-1]) == (30, 6000)
    assert losses[0] == pytest.approx(8 - 1.5 / 20)


def test_every_loss_of_a_run_that_logs_rarely_is_in_its_curve(two_runs):
    """A demo of 300 steps logs every 50 of them; it had a curve of 6 points."""
    _, tide = open_runs(two_runs)
    lines = [{"step": step, "tokens": 10 * step, "loss": 2.0, "losses": [3.0] * 50} for step in (50, 100)]
    tide.metrics[:] = lines
    tokens_seen, losses = training.training_curve(tide)
    assert (losses, tokens_seen[:2], tokens_seen[-1]) == ([3.0] * 100, [10, 20], 1000)


def test_ranks_and_bits_cut_nothing_off_and_name_only_what_is_drawn(two_runs):
    """A series ended above the axes, and two names in the legend had no points."""
    (tide,) = open_runs(two_runs[1:])
    forms = tide.result("compression")["forms"]
    forms[:] = [form for form in forms if not form["weighted"]]
    for name in ("ranks", "bits"):
        canvas, axes = plt.subplots()
        FIGURES[name].panels([tide])[0].draw(axes)
        plt.close(canvas)
        low, high = axes.get_ylim()
        drawn_lines, _ = axes.get_legend_handles_labels()
        for line in drawn_lines:
            assert len(line.get_ydata()) > 0
            assert all(low < value < high for value in line.get_ydata())


def test_what_rare_tokens_lose_is_told_beside_what_all_do(two_runs):
    (tide,) = open_runs(two_runs[1:])
    (table,) = FIGURES["bits"].tables([tide])
    assert table.columns == ["form", "bytes", "wiki", "rare tokens"]
    lost = 0.04 * (1 - 1 / 20)
    assert table.rows[-1] == ("2 bits", "12.5 %", "+40.000 %", f"{lost:+.3f}")
    form = tide.result("compression")["forms"][2]
    assert compression.by_decile(tide.result("compression"), form)[9] == pytest.approx(0.04 * (1 - 9 / 20))


def test_forms_may_be_few_and_frequencies_unknown(two_runs, tmp_path):
    (tide,) = open_runs(two_runs[1:])
    result = tide.result("compression")
    result["forms"] = [form for form in result["forms"] if form["rank"] == 1]
    assert "has no form that the figure shows: run `tide-lm compress" in FIGURES["ranks"].missing(tide)
    for texts in (result["as_trained"], *(form["texts"] for form in result["forms"])):
        for name in texts:
            texts[name] = {"perplexity": texts[name]["perplexity"], "loss": 1.0, "tokens": 9}
    result["forms"][0]["texts"]["wiki"]["perplexity"] = None  # larger than any number
    assert write(FIGURES["bits"], [tide], tmp_path)
    (table,) = FIGURES["bits"].tables([tide])
    assert table.rows[0][2:] == ("not measured", "not measured")


def test_benchmarks_are_in_the_papers_order_with_its_rows_below(two_runs):
    (table,) = FIGURES["benchmarks"].tables(open_runs(two_runs))
    assert " ".join(table.columns[2:]) == "ARC-C ARC-E BoolQ HellaSwag LAMBADA OBQA PIQA SciQ Average"
    assert table.rows[0] == ("base", "98.765", *(f"{30 + place:.1f}" for place in range(8)), "33.5")
    assert table.rows[2][0] == "LLaMA-Base 750M (paper)"
    assert table.rows[-1][-1] == "68.3"


def test_the_papers_averages_are_those_of_its_scores():
    """Within its rounding, so that no number was copied wrongly."""
    for row in paper.TABLE_2:
        assert sum(row.scores) / 8 == pytest.approx(row.average, abs=0.11), row.model


def test_tokens_are_shown_as_they_are(two_runs, tmp_path):
    (table,) = FIGURES["neighbours"].tables(open_runs(two_runs[1:]))
    assert table.rows[0][2] == rf"␣Fred, {SCRIPT}, $x$, \n\x00"
    (svg,) = write(FIGURES["collapse"], open_runs(two_runs), tmp_path, ["svg"])
    assert "a$b$ / <script…rt(1)</script>" in texts(svg.read_text())


def test_a_panel_says_in_words_what_is_drawn(two_runs):
    runs = open_runs(two_runs)

    def said(name: str, panel: int = 0) -> str:
        return re.search('aria-label="([^"]*)"', inline_svg(FIGURES[name].panels(runs[-1:])[panel], "x"))[1]

    axes = "loss, nats over frequency decile (0 rarest, 9 commonest)"
    assert said("loss-by-decile") == f"Loss by decile: held-out text; {axes}; tide from 8.8 to 4.39"
    assert said("distances") == "Distance between tables: tide; heat map from 0 to 0.9"
    assert said("footprint").endswith(
        "GB over memory blocks K; VRAM, 8 bits from 1 to 1; tables on SSD, 4 bits from 0 to 9.6"
    )
    assert said("layer-drop").endswith("layer whose memory is taken out; wiki from 2e+03 to 1")
    assert said("norms", 1).endswith("; mean L2 norm of the rows of E; rare 0.600; common 0.600")
    assert "; rare from " in said("neighbours")
    assert re.search(r"; tide [\d.]+$", said("benchmarks"))


def test_panels_on_one_page_share_no_id(two_runs):
    runs = open_runs(two_runs)
    pages = [inline_svg(panel, f"p{number}") for number, panel in enumerate(FIGURES["norms"].panels(runs))]
    ids = [found for page in pages for found in re.findall(r'\bid="([^"]+)"', page)]
    assert len(ids) == len(set(ids)) > 20
    for page in pages:
        used = set(re.findall(r"url\(#([^)]+)\)", page)) | set(re.findall(r'href="#([^"]+)"', page))
        assert used <= set(ids)


@pytest.mark.parametrize(
    ("name", "without", "message"),
    [
        ("routing", "routing", "has no results/routing.json: run `tide-lm analyze routing "),
        ("layer-drop", "layer-drop", "run `tide-lm analyze layer-drop "),
        ("perplexity", "checkpoints", "--all-checkpoints`"),
        ("benchmarks", "benchmarks", "--benchmarks DIR`"),
        ("norms", "norms", "run `tide-lm analyze norms "),
        ("bits", "compression", "run `tide-lm compress "),
    ],
)
def test_a_figure_without_its_results_names_the_command(name, without, message, plant, tmp_path):
    runs = open_runs([plant(tmp_path / "x", without=(without,))])
    with pytest.raises(MissingError) as raised:
        write(FIGURES[name], runs, tmp_path / "out")
    assert message in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_what_else_a_figure_may_lack(plant, tmp_path):
    path = plant(tmp_path / "x", without=("validation", "perplexity"))
    (path / "metrics.jsonl").unlink()
    (path / "results" / "gradients.json").write_text("{}")
    (run,) = open_runs([path])
    assert "no loss by decile" in FIGURES["loss-by-decile"].missing(run)
    (path / "config.json").unlink()  # as of a model from elsewhere
    cure = f"tide-lm evaluate MODEL --run {path} --counts DATA --text FILE"
    assert cure in FIGURES["loss-by-decile"].missing(open_runs([path])[0])
    assert "no metrics.jsonl" in FIGURES["training-loss"].missing(run)
    assert "gradients.json is damaged (gradients has no 'embedding_input')" in FIGURES["gradients"].missing(
        run
    )
    with pytest.raises(MissingError, match=r"1 is given.*at least 2"):
        FIGURES["separation"].demand([run])
    for category in run.result("collapse")["categories"].values():
        category["pairs"] = []
    assert "take a model with a larger vocabulary" in FIGURES["collapse"].missing(run)


def test_deciles_and_rows_may_be_empty(plant, tmp_path):
    """A small vocabulary or text leaves some without tokens."""
    (run,) = open_runs([plant(tmp_path / "x")])
    run.result("norms")["embedding"][0] = None
    run.result("updates")["rows"]["0"] = None
    run.result("routing")["by_layer"][-1][0] = None
    run.losses["validation"]["loss_by_decile"][0] = None
    run.result("gradients")["tables"][0][0] = None
    for name in ("norms", "updates", "routing", "loss-by-decile", "gradients"):
        assert write(FIGURES[name], [run], tmp_path / "out", ["svg"])
        FIGURES[name].compare([run])


def test_the_command_writes_beside_the_first_run_or_where_it_is_told(two_runs, tmp_path):
    done = tide_lm("figure", "updates", *two_runs)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(two_runs[0] / "report" / f"updates.{kind}") for kind in ("svg", "png")]
    assert tide_lm("figure", "updates", *two_runs, "--out", tmp_path / "out").returncode == 0
    assert (tmp_path / "out" / "updates.png").exists()


def test_the_command_fails_in_one_line(two_runs):
    done = tide_lm("figure", "routing", *two_runs)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {two_runs[0]} has no memory")
    assert "give a TIDE model" in done.stderr
    assert done.stderr.count("\n") == 1
    assert tide_lm("figure", "nothing", *two_runs).returncode == 2


def test_texts_that_differ_under_one_name_are_not_compared(plant, tmp_path):
    runs = open_runs([plant(tmp_path / name) for name in ("a", "b")])
    for what in ("perplexity", "checkpoints"):
        runs[1].result(what)["texts"]["wiki"]["stride"] = 32
    assert loss.sources(runs) == ["validation"]
    assert FIGURES["perplexity"].panels(runs) == []
    (row,) = [row for row in overview.facts(runs).rows if row[0] == "perplexity on wiki"]
    assert row[2] == "123.257 (of 4,000 bytes, window 128, stride 32)"
    assert told("perplexity", runs)["perplexity on wiki at the last checkpoint"] == [
        "44.800 (of 4,000 bytes, window 128, stride 64)",
        "44.800 (of 4,000 bytes, window 128, stride 32)",
    ]


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ("WikiText-2-raw", "10.088 (TIDE-8E-1B, 16 bits)"),
        ("wikitext2", "10.088 (TIDE-8E-1B, 16 bits)"),
        ("pubmed_abstracts", "11.100 (TIDE-8E-1B, 16 bits)"),
        ("dclm", "16.108 (TIDE-8E-1B, 16 bits)"),
        ("wikitext-103", None),
        ("held-out", None),
    ],
)
def test_the_papers_perplexity_stands_beside_its_own_text_alone(text, stated, plant, tmp_path):
    runs = open_runs([plant(tmp_path / "x")])
    for what in ("perplexity", "checkpoints"):
        texts = runs[0].result(what)["texts"]
        texts[text] = texts.pop("wiki")
    for point in runs[0].result("checkpoints")["points"]:
        point["perplexity"] = {text: 50.0}
    (row,) = FIGURES["perplexity"].compare(runs)
    assert row.paper == (stated or "not stated")
    assert overview.facts(runs).rows[-1] == (
        f"perplexity on {text}" + (f"; the paper: {stated}" if stated else ""),
        "123.257",
    )


@pytest.mark.parametrize("values", [[None, 50.0], [None, None]])
def test_a_perplexity_may_be_too_large_to_write(values, plant, tmp_path):
    runs = open_runs([plant(tmp_path / "x")])
    for point, value in zip(runs[0].result("checkpoints")["points"], values, strict=True):
        point["perplexity"]["wiki"] = value
    assert write(FIGURES["perplexity"], runs, tmp_path / "out", ["svg"])
    drawn_of = inline_svg(FIGURES["perplexity"].panels(runs)[0], "x")
    assert "; x" in re.search('aria-label="([^"]*)"', drawn_of)[1]
    last = "too large" if values[-1] is None else "50.000"
    assert told("perplexity", runs)["perplexity on wiki at the last checkpoint"] == [last]


@pytest.mark.parametrize(
    ("rare", "common", "said"),
    [
        (-0.2, -0.1, "2.00"),
        (-0.1, 0.1, f"not both gain: rare {MINUS}0.100, common +0.100"),
        (0.2, 0.1, "not both gain: rare +0.200, common +0.100"),
        (-0.1, 0.0, f"not both gain: rare {MINUS}0.100, common +0.000"),
    ],
)
def test_gains_are_divided_only_where_both_are_gains(rare, common, said, two_runs):
    base, tide = open_runs(two_runs)
    for group, change in (("rare", rare), ("common", common)):
        tide.losses["validation"][group]["loss"] = base.losses["validation"][group]["loss"] + change
    assert told("loss-by-decile", [base, tide])["gain on rare tokens over that on common ones"][1] == said


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1e-4, "0.0001"), (0.24951, "0.25"), (1.0004, "1.01"), (7.9868, "7.99"), (1234.5, "1,240")],
)
def test_a_bound_is_rounded_up(value, shown, plant, tmp_path):
    runs = open_runs([plant(tmp_path / "x")])
    runs[0].result("updates")["rows"]["0"]["ratio_bound"] = value
    (table,) = FIGURES["updates"].tables(runs)
    assert table.rows[0][-1] == shown


def test_the_ffn_of_collapsed_pairs_is_told_by_layer(two_runs):
    runs = open_runs(two_runs)
    tables = FIGURES["collapse"].tables(runs)
    assert [table.caption.split(":")[0] for table in tables] == ["base", "tide"]
    assert tables[0].rows == [("homophones, layer 0", "1", "0.25", "4", "1", "0.5")]
    category = runs[0].result("collapse")["categories"]["homophones"]
    category["ffn"]["members"] = [[]] + [[0, 1]] * 11
    for values in list(category["ffn"].values())[1:]:
        values[:] = [[1.0] * 12, [3.0] * 12]
    (first, middle, last) = FIGURES["collapse"].tables(runs)[0].rows
    assert [row[0].split()[-1] for row in (first, middle, last)] == ["1", "6", "11"]
    assert middle[1:] == ("2", "2", "2", "2", "2")
    category["ffn"] = None
    assert len(FIGURES["collapse"].tables(runs)) == 1


def test_pairs_are_counted_with_those_left_out_and_under_each_runs_delta(two_runs):
    runs = open_runs(two_runs)
    found = told("collapse", runs)
    assert found["homophones: pairs left out, as they are not single tokens"] == ["1 of 3"] * 2
    assert found["numbers: pairs left out, as they are not single tokens"] == ["2 of 2"] * 2
    runs[1].result("collapse")["delta"] = 0.05
    assert told("collapse", runs)["homophones: pairs nearer than δ of their norm, first layer"] == [
        "1 of 2 (δ = 0.1)",
        "1 of 2 (δ = 0.05)",
    ]


def test_a_benchmark_on_few_samples_says_so_in_its_cell(two_runs):
    runs = open_runs(two_runs)
    runs[1].result("benchmarks")["limit"] = 50
    del runs[1].result("benchmarks")["tasks"]["sciq"]
    (table,) = FIGURES["benchmarks"].tables(runs)
    assert table.rows[0][2] == "30.0"
    assert table.rows[1][2] == "30.0 ± 1.0 (50)"
    assert table.rows[1][-2] == "not measured"
    assert "tide: only the first samples" in table.caption


def test_a_layer_drop_without_a_perplexity_is_not_measured(two_runs, tmp_path):
    runs = open_runs(two_runs[1:])
    runs[0].result("layer-drop")["texts"]["wiki"]["full"] = 0
    assert told("layer-drop", runs)["perplexity without any"] == ["wiki not measured"]
    assert write(FIGURES["layer-drop"], runs, tmp_path, ["svg"])


def test_long_names_that_are_shortened_alike_stay_apart(plant, tmp_path):
    names = ["base", *(f"a-run-whose-name-is-{letter}-so-long-that-it-is-cut" for letter in "xy")]
    runs = open_runs([plant(tmp_path / name, only=("validation", "compression")) for name in names])
    assert short(names[1]) == short(names[2])
    changes = FIGURES["loss-by-decile"].panels(runs)[1]
    assert len(drawn(changes)["bars"]) == 2 * 10
    (tide, *_) = runs
    result = tide.result("compression")
    for texts in (result["as_trained"], *(form["texts"] for form in result["forms"])):
        for letter in "xy":
            texts[f"a-text-whose-name-is-{letter}-so-long-that-it-is-cut-too"] = texts["wiki"]
    assert len(drawn(FIGURES["bits"].panels([tide])[0])["lines"]) == 3 + 1  # and one at zero


def test_routing_says_what_it_was_measured_on(two_runs, tmp_path):
    (svg,) = write(FIGURES["routing"], open_runs(two_runs[1:]), tmp_path, ["svg"])
    assert "slots, on 100 tokens of wiki" in texts(svg.read_text())


@pytest.mark.parametrize("layers", ["x", [], [[[1.0, "x"]] * 11]])
def test_a_result_of_the_wrong_shape_is_named(plant, tmp_path, layers):
    path = plant(tmp_path / "x")
    (path / "results" / "routing.json").write_text(json.dumps({"text": "", "tokens": [], "by_layer": layers}))
    with pytest.raises(ValueError, match=r"results/routing\.json is damaged .*make it again"):
        write(FIGURES["routing"], open_runs([path]), tmp_path / "out")


@pytest.mark.parametrize("key", ["tokens", "tokens_by_decile"])
def test_losses_on_other_tokens_are_not_compared(two_runs, key):
    from tide_lm.report import overview

    base, tide = open_runs(two_runs)
    assert {item.text for item in overview.headlines([base, tide])} == {"the held-out text"}
    other = tide.losses["validation"]
    other[key] = 77 if key == "tokens" else [7] * 10
    assert {item.text for item in overview.headlines([base, tide])} == {"wiki"}
    tide.losses["wiki"]["sha256"] = "cd" * 32
    assert overview.headlines([base, tide]) == []
