"""The explorer says of a model on a GPU what it says of it on a CPU."""

import pytest
import torch

from tide_lm.analysis.tables import distances
from tide_lm.compress.pack import pack
from tide_lm.explore import pairs
from tide_lm.explore.explorer import Explorer, Turn
from tide_lm.explore.reader import Reader
from tide_lm.explore.vocabulary import Vocabulary
from tide_lm.model.opened import open_model
from tide_lm.spec.config import Place, Residence
from tide_lm.spec.form import Form

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
TEXT = "the context of the token beneath the layer. " * 6


@pytest.fixture(params=["as trained", *Place])
def opened_models(request, trained, tmp_path):
    """One model on each."""
    model, memory = trained, None
    if request.param != "as trained":
        opened = open_model(str(trained))
        model, memory = tmp_path / "packed", Residence(request.param)
        pack(opened.model, model, Form(8))
        opened.tokenizer.save_pretrained(model)
    on_gpu, on_cpu = (open_model(str(model), memory=memory, writes=False) for _ in range(2))
    on_cpu.model.cpu()
    assert (on_gpu.model.device.type, on_cpu.model.device.type) == ("cuda", "cpu")
    return on_gpu, on_cpu


def test_a_text_a_token_and_a_pair(opened_models, tmp_path):
    (*_, ours), (*_, theirs) = (Reader(opened).read(TEXT) for opened in opened_models)
    assert ours.losses[1:] == pytest.approx(theirs.losses[1:], abs=1e-3)
    assert ours.on_memory == pytest.approx(theirs.on_memory, abs=1e-3)
    ours, theirs = (Reader(opened).detail(TEXT, 40, 1) for opened in opened_models)
    assert ours.added == pytest.approx(theirs.added, rel=1e-2)
    assert ours.state == pytest.approx(theirs.state, rel=1e-2)
    for name, words in theirs.predictions.items():
        found = [share for _, share in ours.predictions[name]]
        assert found == pytest.approx([share for _, share in words], abs=1e-3)
    (*_, ours), (*_, theirs) = (Vocabulary(opened).neighbours(7) for opened in opened_models)
    assert ours.texts[0] == theirs.texts[0]
    assert ours.jaccard == pytest.approx(theirs.jaccard, abs=0.2)  # a near tie may fall otherwise
    ours, theirs = (torch.tensor(distances(opened)["distance"]) for opened in opened_models)
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)
    endings = pairs.endings_of(opened_models[0].tokenizer, ("layer", "token"), opened_models[0].vocabulary)
    ours, theirs = (pairs.distances(opened, endings, "every") for opened in opened_models)
    for name, line in theirs.items():
        assert ours[name] == pytest.approx(line, abs=1e-2)
    explorer = Explorer(opened_models[0], opened_models[1], tmp_path)
    explorer.warm_up()
    assert "overlap with E" in list(explorer.token(7, Turn()))[-1]
