"""What forms cost: that it is measured with the rows of a form, and that the model is as before."""

import pytest
import torch

from tide_lm.compress.encode import Encoder
from tide_lm.compress.forms import FORMS
from tide_lm.compress.measure import held, measure
from tide_lm.compress.pack import pack
from tide_lm.evaluation.perplexity import Windows, perplexity
from tide_lm.evaluation.texts import TextSettings
from tide_lm.model import TideForCausalLM
from tide_lm.model.opened import open_model
from tide_lm.spec.form import Form


@pytest.fixture(scope="module")
def opened(trained):
    return open_model(str(trained))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("every layer knows the token beneath the context. " * 20)
    return {"mine": path}


def test_a_form_costs_what_the_packed_model_loses(opened, text, tmp_path):
    found = measure(
        opened, TextSettings(text, window=32, stride=16), [Form(2), Form(8, rank=0.5, blocks="joint")]
    )
    assert found["as_trained"]["mine"]["perplexity"] == pytest.approx(
        perplexity(opened.model, opened.tokenizer, text["mine"], Windows(32, 16))["perplexity"]
    )
    for number, (record, form) in enumerate(
        zip(found["forms"], (Form(2), Form(8, rank=0.5, blocks="joint")), strict=True)
    ):
        header = pack(opened.model_with_memory, tmp_path / str(number), form, opened.bins.counts_V)
        assert record["bytes"] == header.file_bytes == (tmp_path / str(number) / "memory.tide").stat().st_size
        in_16_bits = 2 * opened.model_with_memory.model.memory.weight.numel()
        assert record["relative_bytes"] == pytest.approx(record["bytes"] / in_16_bits)
        packed = TideForCausalLM.from_pretrained(tmp_path / str(number)).to(opened.model.device)
        same = perplexity(packed, opened.tokenizer, text["mine"], Windows(32, 16))["perplexity"]
        assert record["texts"]["mine"]["perplexity"] == pytest.approx(same, rel=1e-6)
        assert len(record["texts"]["mine"]["loss_by_decile"]) == 10
        assert same != found["as_trained"]["mine"]["perplexity"]


def test_the_model_is_as_it_was_even_after_an_error(opened, text, monkeypatch):
    memory = opened.model_with_memory.model.memory
    measure(opened, TextSettings(text, window=32), [Form(8)])
    assert opened.model_with_memory.model.memory is memory
    calls = iter(range(9))

    def fail_later(*arguments):
        if next(calls):
            raise KeyboardInterrupt
        return {"perplexity": 1.0, "loss": 0.0}

    monkeypatch.setattr("tide_lm.compress.measure.losses", fail_later)
    with pytest.raises(KeyboardInterrupt):
        measure(opened, TextSettings(text, window=32), [Form(8)])
    assert opened.model_with_memory.model.memory is memory


def test_all_forms_have_names_of_their_own_and_can_be_encoded(opened):
    assert len({str(form) for form in FORMS}) == len(FORMS)
    known = {}
    for form in FORMS:
        memory = [
            held(Encoder(opened.model_with_memory.model.tables, form, "0" * 64, opened.bins.counts_V, reused))
            for reused in (known, None)
        ]
        rows, same = (each(torch.arange(9, device=opened.model.device)[None])[0] for each in memory)
        assert rows.isfinite().all()
        assert torch.equal(rows, same)
    assert known.keys() == {"even", "joint"}
