"""What the explorer says of texts, tokens and pairs is what the models compute."""

import dataclasses

import pytest
import torch

from tide_lm.analysis.collapse import category
from tide_lm.analysis.tables import neighbours
from tide_lm.evaluate.perplexity import TextSize, Windows, losses, read
from tide_lm.evaluate.subject import open_subject
from tide_lm.explore import pairs, reading
from tide_lm.explore.reading import Reader, shares
from tide_lm.explore.vocabulary import Vocabulary

TEXT = "every layer knows the token"
LONG = "the context of the token beneath the layer. " * 12


@pytest.fixture(scope="module")
def subject(trained):
    return open_subject(str(trained))


@pytest.fixture(scope="module")
def base(base_run):
    return open_subject(str(base_run))


@torch.no_grad()
def test_a_short_text_has_the_losses_of_both_models_and_the_routers_weights(subject, base):
    (found,) = Reader(subject, base).read(TEXT)
    assert "".join(found.texts) == f"<bos>{TEXT}"
    ids_BT = torch.tensor([found.ids])
    for model, losses_T in ((subject.model, found.losses), (base.model, found.compared)):
        logits_TV = model(ids_BT).logits[0, :-1]
        expected = torch.nn.functional.cross_entropy(logits_TV, ids_BT[0, 1:], reduction="none")
        assert losses_T[0] is None
        assert losses_T[1:] == pytest.approx(expected.tolist(), abs=1e-5)
    assert found.loss == pytest.approx(float(torch.tensor(found.losses[1:]).mean()))
    weights = subject.model(ids_BT, output_router_weights=True).router_weights
    null_T = torch.stack([weights_BTS[0, :, -1] for weights_BTS in weights]).mean(0)
    assert found.drawn == pytest.approx((1 - null_T).tolist(), abs=1e-6)
    bins = subject.bins.bins_V
    assert found.deciles == [None if bins[id] == -1 else bins[id] for id in found.ids]
    assert {None} < set(found.deciles)


def test_a_long_text_grows_and_ends_with_the_loss_that_evaluate_finds(subject, tmp_path):
    steps = [(found.done, found) for found in Reader(subject).read(LONG)]
    (tmp_path / "long.txt").write_text(LONG)
    batches = read(
        tmp_path / "long.txt", "text", subject.tokenizer, subject.vocabulary, Windows(32, 16), TextSize()
    )
    expected = losses(subject.model, batches)
    done, found = steps[-1]
    assert len(steps) > 5
    assert [count for count, _ in steps] == sorted({count for count, _ in steps})
    assert done == len(found.ids)
    assert found.loss == pytest.approx(expected["loss"], abs=1e-5)
    assert None not in found.losses[1:] + found.drawn


def test_reading_can_be_given_up_and_begun_again(subject):
    reader = Reader(subject)
    some = reader.read(LONG)
    next(some)
    some.close()
    whole = list(reader.read(LONG))
    assert len(whole) > 5
    assert [found.done for found in reader.read(LONG)] == [whole[-1].done]  # remembered


def test_only_so_much_of_a_text_is_read_and_nothing_of_none(subject, monkeypatch):
    monkeypatch.setattr(reading, "LIMIT", 50)
    *_, found = Reader(subject).read(LONG)
    assert len(found.ids) == 51
    assert found.left_out == 84
    (nothing,) = Reader(subject).read("")
    assert nothing.ids == [0]
    assert nothing.loss is None


def test_models_of_two_tokenizers_are_not_compared(subject, base):
    other = subject.tokenizer.from_pretrained(subject.tokenizer.name_or_path)
    other.add_tokens(["more"])
    with pytest.raises(ValueError, match="has another tokenizer than run"):
        Reader(subject, dataclasses.replace(base, tokenizer=other))


@pytest.mark.parametrize(
    "changes", [{}, {"memory_own_block": True, "num_memory_blocks": 2}, {"memory_gate": True}]
)
@torch.no_grad()
def test_what_memory_adds_is_what_is_missing_without_it(tiny_model, changes):
    """In the last layer, after which nothing else depends on it."""
    model = tiny_model(**changes).eval()
    ids_T = torch.tensor([0, 5, 9, 7, 9])
    weights_LS, added_L, state_L = shares(model, ids_T)
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
def test_a_tokens_predictions_are_the_models_with_memory_and_without(subject):
    reader = Reader(subject)
    *_, found = reader.read(LONG)
    place, layer = 100, 1
    detail = reader.detail(found, place, layer)
    ids_BT = torch.tensor([found.ids[place - 31 : place + 1]])
    layers = list(range(subject.config.num_hidden_layers))
    for predictions, dropped in zip(detail.predictions.values(), ([], layers, [layer]), strict=True):
        chances_V = subject.model(ids_BT, drop_memory_layers=dropped).logits[0, -1].softmax(-1)
        best = chances_V.topk(len(predictions))
        assert [one.probability for one in predictions] == pytest.approx(best.values.tolist(), abs=1e-6)
        assert predictions[0].text == subject.tokenizer.decode([int(best.indices[0])])


def test_a_base_model_has_losses_and_predictions_alone(base):
    reader = Reader(base)
    (found,) = reader.read(TEXT)
    assert set(found.drawn) == {None}
    detail = reader.detail(found, 2, 0)
    assert (detail.weights, len(detail.predictions)) == ([], 1)


def test_tokens_are_found_and_have_their_rows_and_neighbours(subject):
    vocabulary = Vocabulary(subject)
    ids, total = vocabulary.search("LAYER")
    assert total == len(ids) > 0
    assert all("layer" in vocabulary.texts[id].lower() for id in ids)
    assert vocabulary.search("#7") == ([7], 1)
    assert vocabulary.search("#99999999") == vocabulary.search("") == ([], 0)
    one = vocabulary.entry(ids[0])
    assert one.count == subject.bins.counts_V[ids[0]]
    rows_KD = subject.model.model.memory.weight[ids[0]]
    assert [one.norms["M1"], one.norms["M2"]] == pytest.approx(rows_KD.norm(dim=-1).tolist())
    word = one.text.strip()
    assert vocabulary.neighbours(ids[0]) == neighbours(subject, [word])["words"][word]


def test_a_pair_is_as_far_apart_as_analyze_says(subject, base):
    words = "layer", "token"
    found = pairs.distances(subject, base, words, "every")
    expected = category(subject.model, subject.tokenizer, [words], ["every"], 0.1)["relative"][0]
    assert found["with memory"] == pytest.approx(expected, abs=1e-6)
    assert found["without memory"] != pytest.approx(expected, abs=1e-3)
    assert len(found["base"]) == len(expected)
    with pytest.raises(ValueError, match="are not two different single tokens"):
        pairs.distances(subject, base, ("layer", "unheardof"), "every")
