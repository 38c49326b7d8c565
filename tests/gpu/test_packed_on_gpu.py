"""A packed model on a GPU: the same rows wherever they are kept, and none of its tables on the device."""

import pytest
import torch

from tide_lm import TideConfig, TideForCausalLM
from tide_lm.compress.pack import pack
from tide_lm.spec.form import Form

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
CONFIG = TideConfig(
    vocab_size=20_000,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_memory_blocks=8,
    memory_gain_init=0.5,
)


def _opened(folder, place):
    return TideForCausalLM.from_pretrained(folder, memory=place, dtype=torch.bfloat16).cuda().eval()


@pytest.mark.parametrize("form", [Form(16), Form(8), Form(4), Form(3), Form(2), Form(8, rank=0.5)], ids=str)
def test_rows_are_the_same_bit_for_bit_wherever_they_are(tmp_path, form):
    torch.manual_seed(0)
    pack(TideForCausalLM(CONFIG), tmp_path / "packed", form)
    ids = torch.randint(CONFIG.vocab_size, (4, 300), device="cuda")
    models = {place: _opened(tmp_path / "packed", place) for place in ("device", "cpu", "store")}
    with torch.no_grad():
        rows = {place: model.model.memory(ids).of_positions() for place, model in models.items()}
        logits = {place: model(ids).logits for place, model in models.items()}
    on_host = TideForCausalLM.from_pretrained(tmp_path / "packed", memory="cpu").eval()
    on_host = on_host.model.memory(ids.cpu()).of_positions()
    for place in models:
        if form.rank == 1:  # a product of matrices is rounded otherwise on a GPU
            assert torch.equal(rows[place].cpu(), on_host)
        assert torch.equal(rows[place], rows["device"])
        assert torch.equal(logits[place], logits["device"])


def test_a_store_takes_no_memory_of_the_device_and_generates_the_same(tmp_path):
    torch.manual_seed(0)
    pack(TideForCausalLM(CONFIG), tmp_path / "packed", Form(4))
    prompt = torch.randint(CONFIG.vocab_size, (2, 40), device="cuda")
    found, taken = {}, {}
    for place in ("device", "cpu", "store"):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        model = _opened(tmp_path / "packed", place)
        taken[place] = torch.cuda.memory_allocated() - before
        found[place] = model.generate(prompt, max_new_tokens=24, do_sample=False)
        del model
    tables = CONFIG.vocab_size * 8 * 256 // 2
    assert torch.equal(found["cpu"], found["device"])
    assert torch.equal(found["store"], found["device"])
    assert taken["device"] > taken["store"] + tables
    assert abs(taken["cpu"] - taken["store"]) < 2**20
