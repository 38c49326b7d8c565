"""What the explorer says of texts, tokens and pairs is what the models compute."""

import copy
import dataclasses
import json
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tide_lm.analysis.analyze import AnalysisSettings, analyze
from tide_lm.analysis.collapse import category
from tide_lm.analysis.tables import distances, neighbours
from tide_lm.compress.pack import pack
from tide_lm.data.tokenizers import token_texts
from tide_lm.evaluation.perplexity import Windows, _held_out, losses, read
from tide_lm.explore import pairs, reader
from tide_lm.explore.explorer import ANALYSES, Explorer, Turn
from tide_lm.explore.reader import OTHER, PREDICTIONS, Reader, shares
from tide_lm.explore.vocabulary import FOUND, Vocabulary
from tide_lm.model.opened import open_model
from tide_lm.run.directory import write_result
from tide_lm.serve import Engine, Sampling
from tide_lm.serve.generate import generate
from tide_lm.serve.text import Text, stop_ids
from tide_lm.spec.config import Place, Residence
from tide_lm.spec.form import Form

TEXT = "every layer knows the token"
LONG = "the context of the token beneath the layer. " * 12


@pytest.fixture(scope="module")
def opened(trained):
    return open_model(str(trained))


@pytest.fixture(scope="module")
def base(base_run):
    return open_model(str(base_run))


@torch.no_grad()
def test_a_short_text_has_the_losses_of_both_models_and_the_routers_weights(opened, base):
    *_, found = Reader(opened, base).read(TEXT)
    assert "".join(found.texts) == f"<bos>{TEXT}"
    ids_BT = torch.tensor([found.ids])
    for model, losses_T in ((opened.model, found.losses), (base.model, found.base_losses)):
        logits_TV = model(ids_BT).logits[0, :-1]
        expected = torch.nn.functional.cross_entropy(logits_TV, ids_BT[0, 1:], reduction="none")
        assert losses_T[0] is None
        assert losses_T[1:] == pytest.approx(expected.tolist(), abs=1e-5)
    assert found.loss == pytest.approx(float(torch.tensor(found.losses[1:]).mean()))
    weights = opened.model(ids_BT, output_router_weights=True).router_weights
    null_T = torch.stack([weights_BTS[0, :, -1] for weights_BTS in weights]).mean(0)
    assert found.on_memory == pytest.approx((1 - null_T).tolist(), abs=1e-6)
    bins = opened.bins.bins_V
    assert found.deciles == [None if bins[id] == -1 else bins[id] for id in found.ids]
    assert {None} < set(found.deciles)


def test_a_long_text_grows_and_ends_with_the_loss_that_evaluate_finds(opened, tmp_path):
    steps = [(found.done, found) for found in Reader(opened).read(LONG)]
    (tmp_path / "long.txt").write_text(LONG)
    batches = read(tmp_path / "long.txt", opened.tokenizer, opened.vocabulary, Windows(32, 16))
    expected = losses(opened.model, batches)
    done, found = steps[-1]
    assert len(steps) > 5
    assert [count for count, _ in steps] == sorted({count for count, _ in steps})
    assert done == len(found.ids)
    assert found.loss == pytest.approx(expected["loss"], abs=1e-5)
    assert None not in found.losses[1:] + found.on_memory


def test_reading_can_be_given_up_and_begun_again(opened):
    reader = Reader(opened)
    some = reader.read(LONG)
    for _ in range(3):
        reached = next(some).done
    some.close()
    assert 1 < reached < len(reader.begin(LONG).ids)
    steps = [found.done for found in reader.read(LONG)]  # from where it was left
    assert steps[0] == reached
    assert steps[-1] == len(reader.begin(LONG).ids)
    losses = reader.begin(LONG).losses
    for number in range(40):
        reader.begin(f"{number} others")
    assert reader.begin(LONG).done == 1  # forgotten
    assert reader.known(LONG).losses == losses  # and read again


def test_only_so_much_of_a_text_is_read_and_nothing_of_none(opened, monkeypatch):
    monkeypatch.setattr(reader, "LIMIT", 50)
    *_, found = Reader(opened).read(LONG)
    assert len(found.ids) == 51
    assert found.left_out == 84
    *_, nothing = Reader(opened).read("")
    assert nothing.ids == [0]
    assert nothing.loss is None


def test_models_of_two_tokenizers_are_not_compared(opened, base):
    other = opened.tokenizer.from_pretrained(opened.tokenizer.name_or_path)
    other.add_tokens(["more"])
    with pytest.raises(ValueError, match="has another tokenizer than run"):
        Reader(opened, dataclasses.replace(base, tokenizer=other))


@torch.no_grad()
def test_what_memory_adds_is_what_is_missing_without_it(tiny_model):
    """In the last layer, after which nothing else depends on it."""
    model = tiny_model().eval()
    ids_T = torch.tensor([0, 5, 9, 7, 9])
    weights_LS, added_L, state_L, logits_V = shares(model, ids_T)
    torch.testing.assert_close(logits_V, model(ids_T[None]).logits[0, -1])
    last = model.config.num_hidden_layers - 1
    ends = []
    hook = model.model.layers[last].register_forward_hook(lambda module, given, out: ends.append(out[0, -1]))
    model(ids_T[None])
    model(ids_T[None], drop_memory_layers=[last])
    hook.remove()
    assert float(added_L[last]) == pytest.approx(float((ends[0] - ends[1]).norm()), rel=1e-4)
    assert float(state_L[last]) == pytest.approx(float(ends[1].norm()), rel=1e-4)
    assert weights_LS.shape == (last + 1, model.config.num_memory_blocks + 1)
    assert weights_LS.sum(-1).tolist() == pytest.approx([1.0] * (last + 1), abs=1e-5)


@torch.no_grad()
def test_a_tokens_predictions_are_the_models_with_memory_and_without(opened, base):
    reader = Reader(opened, base)
    *_, found = reader.read(LONG)
    place, layer = 111, 1
    detail = reader.detail(LONG, place, layer)
    chance = float(torch.tensor(-found.losses[place + 1]).exp())  # of the token that does follow
    follows = [share for text, share in detail.predictions["with memory"] if text == found.texts[place + 1]]
    assert follows in ([], [pytest.approx(chance, rel=1e-4)])
    ids_BT = torch.tensor([found.ids[80 : place + 1]])  # windows of 32 begin at every 16th
    layers = list(range(opened.config.num_hidden_layers))
    assert [share for _, share in detail.predictions[OTHER]] == pytest.approx(
        base.model(ids_BT).logits[0, -1].softmax(-1).topk(PREDICTIONS).values.tolist(), abs=1e-6
    )
    ours = [shown for name, shown in detail.predictions.items() if name != OTHER]
    for predictions, dropped in zip(ours, ([], layers, [layer]), strict=True):
        chances_V = opened.model(ids_BT, drop_memory_layers=dropped).logits[0, -1].softmax(-1)
        best = chances_V.topk(len(predictions))
        assert [share for _, share in predictions] == pytest.approx(best.values.tolist(), abs=1e-6)
        likeliest = int(best.indices[0])
        assert predictions[0][0] == (opened.tokenizer.decode([likeliest]) or f"#{likeliest}")


def test_a_base_model_has_losses_and_predictions_alone(base):
    reader = Reader(base)
    *_, found = reader.read(TEXT)
    assert set(found.on_memory) == {None}
    detail = reader.detail(TEXT, 2, 0)
    assert (detail.weights, len(detail.predictions)) == ([], 1)


def test_tokens_are_found_and_have_their_rows_and_neighbours(opened):
    vocabulary = Vocabulary(opened)
    ids, total = vocabulary.search("LAYER")
    assert total == len(ids) > 0
    assert all("layer" in vocabulary.texts[id].lower() for id in ids)
    for wanted in "e", "LA":
        found, total = vocabulary.search(wanted)
        lengths = [len(vocabulary.texts[id].strip()) for id in found]
        assert lengths == sorted(lengths)
        assert total == sum(wanted.lower() in text.lower() for text in vocabulary.texts)
        assert len(found) == min(total, FOUND) > 2
    assert vocabulary.search("#7") == ([7], 1)
    for nothing in "#99999999", "", "#" + "9" * 5000:
        assert vocabulary.search(nothing) == ([], 0)
    one = vocabulary.entry(ids[0])
    assert one.count == opened.bins.counts_V[ids[0]]
    rows_KD = opened.model.model.memory.weight[ids[0]]
    assert [one.norms["M1"], one.norms["M2"]] == pytest.approx(rows_KD.norm(dim=-1).tolist())
    word = one.text.strip()
    *_, found = vocabulary.neighbours(ids[0])
    expected = neighbours(opened, [word])["words"][word]
    assert (found.texts, found.jaccard) == (expected["neighbours"], expected["jaccard"])
    assert found.searched == found.candidates


def test_of_a_long_template_the_end_counts(opened, monkeypatch):
    def apart(template):
        return pairs.distances(opened, endings, template)["with memory"]

    endings = pairs.endings_of(opened.tokenizer, ("layer", "token"), opened.vocabulary)
    assert apart("context every") != pytest.approx(apart("knows every"), abs=1e-4)
    end = opened.tokenizer(" every", add_special_tokens=False).input_ids
    monkeypatch.setattr(pairs, "LONGEST", len(end))
    assert apart("context every") == apart("knows every") == apart(" every")


def test_a_pair_is_as_far_apart_as_analyze_says(opened, base):
    words = "layer", "token"
    endings = pairs.endings_of(opened.tokenizer, words, opened.vocabulary)
    found = pairs.distances(opened, endings, "every")
    expected = category(opened.model, opened.tokenizer, [words], ["every"], 0.1)["relative"][0]
    assert found["with memory"] == pytest.approx(expected, abs=1e-6)
    assert found["without memory"] != pytest.approx(expected, abs=1e-3)
    assert [len(line) for line in pairs.distances(base, endings, "every").values()] == [len(expected)]
    with pytest.raises(ValueError, match="are not two different single tokens"):
        pairs.endings_of(opened.tokenizer, ("layer", "unheardof"), opened.vocabulary)
    by_id = f"#{endings[0][0]}"
    assert pairs.endings_of(opened.tokenizer, (by_id, "token"), opened.vocabulary) == endings
    with pytest.raises(ValueError, match=f"{by_id} is not there.* {endings[0][0]} tokens"):
        pairs.endings_of(opened.tokenizer, (by_id, "token"), endings[0][0])
    for two, message in ((by_id, "layer"), "are the same"), (("", "layer"), "a token is missing"):
        with pytest.raises(ValueError, match=message):
            pairs.endings_of(opened.tokenizer, two, opened.vocabulary)


def byte_fallback():
    """A tokenizer as Llama 2 has it: spaces are a sign within tokens, and unknown characters are bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "the", "a"]
    backend = Tokenizer(
        models.BPE({word: id for id, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    backend.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>")


def test_tokens_keep_their_space_and_bytes_have_names():
    tokenizer = byte_fallback()
    ids = tokenizer.convert_tokens_to_ids(["▁the", "the", "▁", "<0xE2>", "<0x41>"])
    assert tokenizer.decode([ids[0]]) == tokenizer.decode([ids[1]]) == "the"
    assert token_texts(tokenizer, ids) == [" the", "the", " ", "<0xE2>", "A"]


def test_a_character_of_several_tokens_is_that_of_the_last(opened):
    *_, found = Reader(opened).read("a é🌊b")
    assert found.texts[1:] == ["a", " ", "<0xC3>", "é", "<0xF0>", "<0x9F>", "<0x8C>", "🌊", "b"]


def test_a_packed_model_is_read_as_the_one_that_it_was_packed_from(opened, tmp_path):
    pack(opened.model, tmp_path / "packed", Form(16))
    opened.tokenizer.save_pretrained(tmp_path / "packed")
    packed = open_model(str(tmp_path / "packed"), memory=Residence(Place.store), writes=False)
    *_, expected = Reader(opened).read(TEXT)
    reader = Reader(packed)
    *_, found = reader.read(TEXT)
    assert found.losses[1:] == pytest.approx(expected.losses[1:], abs=0.02)
    theirs, ours = Reader(opened).detail(TEXT, 3, 0), reader.detail(TEXT, 3, 0)
    assert ours.added == pytest.approx(theirs.added, rel=0.02)
    vocabulary = Vocabulary(packed)
    assert vocabulary.entry(5).norms.keys() == {"E"}
    *_, found = vocabulary.neighbours(5)
    assert len(found.texts) == 3


def test_texts_are_written_as_generate_does_by_several_at_once(opened, base, tmp_path):
    explorer = Explorer(opened, base, tmp_path)
    sampling = [Sampling(0.8, 40, seed=seed) for seed in range(4)]

    def written(seed):
        *_, (texts, shown) = explorer.write(TEXT, 12, 0.8, 40, seed, Turn())
        assert "of 12 tokens written" in shown
        return texts

    with ThreadPoolExecutor(4) as pool:
        at_once = list(pool.map(written, range(4)))
    ids = explorer.reader.encoded(TEXT).ids
    for column, model, memory in (0, opened, True), (1, opened, False), (2, base, True):
        for texts, one in zip(at_once, sampling, strict=True):
            stop = stop_ids(opened.tokenizer, model.model)
            text = Text(opened.tokenizer, ids[-1], stop)
            steps = Engine(model.model, memory=memory).generate([ids], 12, one, stop)
            text.ids += [token for (token,) in steps]
            assert texts[column] == f"{TEXT}{text}"
    assert {len(column._idle) for column in explorer.columns} <= {1, 2}  # each has memory of its own
    (alone,) = generate(opened.model, opened.tokenizer, [TEXT], 12, sampling[3])
    assert at_once[3][0] == f"{TEXT}{alone}"


def test_a_writing_ends_when_it_is_stopped_or_replaced(opened, tmp_path, monkeypatch):
    monkeypatch.setattr("tide_lm.explore.explorer._STREAMED", 0)
    explorer = Explorer(opened, None, tmp_path)
    for turn in Turn(), Turn():
        states = explorer.write(TEXT, 30, 0.8, None, 3, turn)
        shown = [next(states)[1] for _ in range(3)]
        assert "3 of 30 tokens written" in shown[-1]
        assert all("data-stop" in state and "Click a token" not in state for state in shown)
        turn.stopped = True
        *_, (_texts, last) = states
        assert "Stopped: 4 of 30 tokens written" in last
        assert "data-stop" not in last
    states = explorer.write(TEXT, 30, 0.8, None, 3, turn := Turn())
    next(states)
    turn.replaced = True
    assert list(states) == []


@pytest.mark.parametrize("asked", [15, pytest.param(60, marks=pytest.mark.slow)])
def test_visitors_at_once_are_told_what_one_alone_is(opened, base, tmp_path, asked):
    explorer = Explorer(opened, base, tmp_path)
    questions = [
        lambda: explorer.pair("layer", "token", "every"),
        lambda: list(explorer.write(TEXT, 9, 0.8, 40, 5, Turn()))[-1],
        lambda: explorer.detail(TEXT, 3, 1),
        lambda: list(explorer.read(LONG, Turn()))[-1],
        lambda: list(explorer.token(7, Turn()))[-1],
    ]
    expected = [question() for question in questions]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: questions[number % 5](), range(asked)))
    for number, answer in enumerate(found):
        assert answer == expected[number % 5]


def test_a_base_of_another_depth_is_compared_as_far_as_it_goes(opened, base, tmp_path):
    shallow = copy.deepcopy(base.model)
    shallow.model.layers = shallow.model.layers[:1]
    shallow.config.num_hidden_layers = 1
    other = dataclasses.replace(base, name=opened.name, load=lambda: shallow)
    shown = Explorer(opened, other, tmp_path).pair("layer", "token", "every")
    assert shown.count('scope="row"') == opened.config.num_hidden_layers
    assert f'<th scope="col">{base.path}</th>' in shown  # both models have one name


@torch.no_grad()
def test_the_words_that_memory_helps_most_are_those_of_the_held_out_text(opened, base, tmp_path, monkeypatch):
    monkeypatch.setattr("tide_lm.explore.gains.TOKENS", 64)
    monkeypatch.setattr("tide_lm.explore.gains.FEWEST", 1)
    texts = Vocabulary(opened).texts
    ids_T = next(_held_out(opened.data, opened.tokenizer))[:257]  # in windows of 32, 8 of them at once
    ids_BT = torch.stack([torch.from_numpy(ids_T[start : start + 33]) for start in range(0, 256, 32)])

    def losses(model, **options):
        logits_BTV = model(ids_BT[:, :-1], **options).logits
        return torch.nn.functional.cross_entropy(logits_BTV.mT, ids_BT[:, 1:], reduction="none")

    own = losses(opened.model)
    alone = losses(opened.model, drop_memory_layers=[*range(opened.config.num_hidden_layers)])
    for other, gain_BT in (base, losses(base.model) - own), (None, alone - own):
        explorer = Explorer(opened, other, tmp_path)
        *_, shown = explorer.search("", Turn())
        (found,) = explorer._gains
        assert found.read == 256
        assert found.words
        for id, mean, count in found.words:
            at = ids_BT[:, 1:] == id
            assert (mean, count) == (pytest.approx(float(gain_BT[at].mean()), abs=1e-4), int(at.sum()))
            assert texts[id].startswith(" ")
            assert f'data-place="{id}"' in shown
        assert [mean for _, mean, _ in found.words] == sorted((word[1] for word in found.words), reverse=True)
        assert "that memory helps most" in shown
        assert ("the other model" if other else "this model without memory") in shown
        assert list(explorer.search("", Turn())) == [shown]  # at once, when it is known
        assert list(explorer.search("", Turn(replaced=True))) == []


def test_where_no_data_are_the_words_are_those_of_the_examples(opened, base, tmp_path):
    from_nowhere = dataclasses.replace(base, data=tmp_path / "gone")
    *_, shown = Explorer(from_nowhere, None, tmp_path).search("", Turn())
    assert "the examples of the Text tab" in shown
    assert "The hardest words" in shown
    assert "data-place" in shown
    *_, shown = Explorer(from_nowhere, opened, tmp_path).search("", Turn())
    assert "The words that this model predicts better than the other" in shown  # which has no memory


def analysed(explorer, what):
    """Start an analysis, and return what the page shows until it has ended."""
    return list(explorer.watch(Turn(), explorer.analyse(ANALYSES.index(what))))


def test_analyses_are_started_and_show_what_they_found(trained, tmp_path, monkeypatch):
    monkeypatch.setattr("tide_lm.explore.explorer._BETWEEN", 0.02)
    shutil.copytree(trained, tmp_path / "run")
    opened = open_model(str(tmp_path / "run"), writes=False)
    explorer = Explorer(opened, None, opened.run, opened.data)
    assert "Run routing" in explorer.model()
    assert "tide-lm analyze routing" not in explorer.model()
    *_, (said, shown) = analysed(explorer, "routing")
    assert "routing has ended" in said
    assert "Run routing" not in shown
    assert "<svg" in shown
    expected = analyze("routing", opened, AnalysisSettings())
    written = json.loads((tmp_path / "run" / "results" / "routing.json").read_text())
    assert written["by_layer"] == expected["by_layer"]
    assert written["subject"]["model"] == str(tmp_path / "run")
    made_by = f"tide-lm analyze routing {tmp_path / 'run'} --counts {opened.data}"
    assert written["provenance"]["command"] == made_by
    explorer.analyse(ANALYSES.index("footprint"))
    while explorer.work.running:
        time.sleep(0.01)
    *_, (said, _) = explorer.watch(Turn(), "footprint")  # though it ended before anyone looked
    assert "footprint has ended" in said
    for number in -1, 99:
        with pytest.raises(ValueError, match="there is no analysis"):
            explorer.analyse(number)


def test_one_analysis_runs_at_a_time_and_can_be_stopped(opened, tmp_path, monkeypatch):
    monkeypatch.setattr("tide_lm.explore.explorer._BETWEEN", 0.02)
    explorer = Explorer(opened, None, tmp_path)
    begun, logged, go_on = threading.Event(), threading.Event(), threading.Event()

    def slow(log):
        begun.wait(600)
        log("half of it")
        logged.set()
        go_on.wait(600)
        log("all of it")

    explorer.work.start("routing", slow)
    shown = explorer.watch(Turn())
    assert next(shown)[0] == '<p role="status">routing is running.</p>'  # and notices no stop yet
    begun.set()
    logged.wait(600)
    number = ANALYSES.index("routing")
    assert f'running: half of it. <button type="button" class="small" data-stop="{number}">' in next(shown)[0]
    with pytest.raises(ValueError, match="routing is running: wait"):
        explorer.work.start("norms", slow)
    explorer.detail(TEXT, 1, 0)  # visitors are not kept waiting
    left = explorer.watch(turn := Turn())
    next(left)
    turn.replaced = True
    assert list(left) == []
    explorer.stop(number)
    for other in -1, 99, ANALYSES.index("norms"):
        explorer.stop(other)
    go_on.set()
    *_, (said, figures) = shown
    assert said == ""
    assert "It did not end: it was stopped" in figures

    def fails(log):
        raise RuntimeError("<b>no</b>")

    explorer.work.start("norms", fails)
    *_, (_, figures) = explorer.watch(Turn())
    assert "It did not end: &lt;b&gt;no" in figures
    explorer.stop(number)  # it has ended
    explorer.work.start("norms", lambda log: log("all of it"))
    assert "norms has ended" in list(explorer.watch(Turn(), "norms"))[-1][0]


@pytest.mark.parametrize("what", ["distances", "neighbours"])
def test_a_search_of_all_tokens_says_how_far_it_is(opened, what, monkeypatch):
    monkeypatch.setattr("tide_lm.analysis.tables.CHUNK_NUMBERS", 1)
    said = []
    analyze(what, opened, log=said.append)
    assert re.fullmatch(r"(\d+) of \1 tokens", said[-1])
    assert len(said) > 1


def test_an_analysis_does_not_replace_the_results_of_another_model(base_run, tmp_path, monkeypatch):
    monkeypatch.setattr("tide_lm.explore.explorer._BETWEEN", 0.02)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(base_run / "export", tmp_path / "alone")
    write_result(tmp_path / "runs" / "alone", "norms", {"subject": {"model": "elsewhere/alone"}})
    opened = open_model("alone", writes=False)
    explorer = Explorer(opened, None, opened.run)
    *_, (_, figures) = analysed(explorer, "updates")
    assert "holds results of elsewhere/alone" in figures


def test_results_that_are_damaged_or_new_are_seen(opened, tmp_path):
    explorer = Explorer(opened, None, tmp_path)
    assert "tide-lm analyze routing" in explorer.model()
    assert "Run routing" not in explorer.model()  # the results are those of another run
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "routing.json").write_text('{"tokens": []}')
    (tmp_path / "results" / "distances.json").write_text("{")
    shown = explorer.model()
    assert "routing.json" in shown
    assert "<svg" not in shown
    write_result(tmp_path, "distances", distances(opened))
    (tmp_path / "results" / "layer-drop.json").symlink_to("nowhere")
    assert "<svg" in explorer.model()


def test_damaged_weights_are_named(opened, tmp_path):
    damaged = copy.deepcopy(opened.model)
    token = opened.tokenizer(" layer", add_special_tokens=False).input_ids[-1]
    damaged.model.memory.weight.data[token] = torch.nan
    explorer = Explorer(dataclasses.replace(opened, load=lambda: damaged), None, tmp_path)
    with pytest.raises(ValueError, match=r"run has a loss .*not finite"):
        list(explorer.read(TEXT, Turn()))
    assert "are not finite" in explorer.pair("layer", "token", "every")
    assert "not finite" not in list(explorer.read("the token", Turn()))[-1][1]


def test_a_model_that_no_run_made_has_a_page_too(base_run, tmp_path):
    shutil.copytree(base_run / "export", tmp_path / "alone")
    explorer = Explorer(open_model(str(tmp_path / "alone"), writes=False), None, tmp_path / "nowhere")
    explorer.warm_up()
    assert "Not there yet" in explorer.model()
    assert [str(colour) for colour in explorer.colours] == ["loss"]
    assert [column.name for column in explorer.columns] == ["alone"]
    assert "with memory" not in explorer.pair("layer", "token", "every")


def test_a_model_of_another_family_without_special_tokens_has_a_page_too(tokenizer, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    bare = copy.deepcopy(tokenizer)
    bare.bos_token = bare.eos_token = None
    bare.save_pretrained(tmp_path / "gpt2")
    GPT2LMHeadModel(GPT2Config(vocab_size=len(bare), n_embd=32, n_layer=2, n_head=2)).save_pretrained(
        tmp_path / "gpt2"
    )
    opened = open_model(str(tmp_path / "gpt2"), writes=False)
    explorer = Explorer(opened, None, tmp_path)
    explorer.warm_up()
    assert explorer.columns == []  # the engine takes Llamas and TIDE models
    *_, found = explorer.reader.read(TEXT)
    assert "".join(found.texts) == TEXT
    assert (found.losses[0], found.of_text, len(found.ids)) == (None, 5, 5)
    *_, nothing = explorer.read("", Turn())
    assert "There is nothing to read" in nothing[1]
    assert explorer.pair("layer", "token", "").count('scope="row"') == 2
    assert "decile" not in list(explorer.token(7, Turn()))[-1].replace("no decile", "")


def test_a_search_grows_and_ends_when_it_is_stopped_or_replaced(opened, tmp_path, monkeypatch):
    monkeypatch.setattr("tide_lm.analysis.tables.CHUNK_NUMBERS", 1)  # one token at a time
    monkeypatch.setattr("tide_lm.explore.explorer._BETWEEN", 0)
    explorer = Explorer(opened, None, tmp_path)
    whole = list(explorer.token(7, Turn()))
    assert "Nearest" not in whole[0]
    total = len(opened.bins.counts_V.nonzero()[0])
    assert len(whole) == total + 1
    assert f"5 of {total} tokens searched" in whole[5]
    assert "Stopped" not in "".join(whole)
    monkeypatch.setattr("tide_lm.analysis.tables.CHUNK_NUMBERS", 2**19)
    assert whole[-1] == list(explorer.token(7, Turn()))[-1]
    monkeypatch.setattr("tide_lm.analysis.tables.CHUNK_NUMBERS", 1)
    for turn in Turn(), Turn(colour="frequency decile"):
        answers = explorer.token(7, turn)
        assert "3 of" in [next(answers) for _ in range(4)][-1]
        turn.stopped, turn.replaced = turn.colour is None, turn.colour is not None
        assert [f"Stopped: 4 of {total} tokens searched" in answer for answer in answers] == [
            True
        ] * turn.stopped
    assert list(explorer.token(7, Turn(replaced=True))) == []


def test_a_reading_that_is_replaced_says_no_more(opened, tmp_path, monkeypatch):
    monkeypatch.setattr("tide_lm.explore.explorer._BETWEEN", 0)
    turn = Turn()
    answers = Explorer(opened, None, tmp_path).read(LONG, turn)
    next(answers)
    turn.colour, turn.chosen = "frequency decile", 0  # as it may be changed meanwhile
    _, summary, tokens = next(answers)
    assert "the rarer the token" in summary
    assert tokens.count('aria-pressed="true"') == 1
    turn.replaced = True
    assert list(answers) == []


def test_a_reading_that_was_stopped_stays_so_in_another_colour(opened, tmp_path, monkeypatch):
    monkeypatch.setattr("tide_lm.explore.explorer._BETWEEN", 0)
    explorer = Explorer(opened, None, tmp_path)
    answers = explorer.read(LONG, turn := Turn())
    next(answers)
    turn.stopped = True
    *_, (_, stopped, _) = answers
    summary, _ = explorer.shade(LONG, "frequency decile", None)
    for shown in stopped, summary:
        assert "Stopped: " in shown
        assert "data-stop" not in shown


def test_a_colour_that_is_chosen_while_the_last_state_is_made_is_shown(opened, tmp_path):
    turn = Turn(colour="loss")
    answers = Explorer(opened, None, tmp_path).read("the token", turn)
    _, summary, _ = next(answers)
    assert "loss of the token" in summary
    turn.colour = "frequency decile"
    assert turn.reading
    assert ["the rarer the token" in summary for _, summary, _ in answers] == [True]
    assert not turn.reading


@pytest.mark.slow
def test_what_a_browser_may_send_does_no_harm(opened, tmp_path):
    explorer = Explorer(opened, None, tmp_path)
    for text in "\ud800", None, "x" * 300_000, "\x00":
        assert all(len(shown) <= 100_000 for shown, _, _ in explorer.read(text, Turn()))
        assert list(explorer.search(text, Turn()))
    for place in "1", 1.5, None, -1, 10**9, True:
        assert explorer.detail(TEXT, place, 0) == ""
        assert list(explorer.token(place, Turn())) == []
    assert explorer.detail(TEXT, 1, 99) == ""
    assert "are not two different single tokens" in explorer.pair("\ud800", "y" * 10**6, "z" * 10**6)
