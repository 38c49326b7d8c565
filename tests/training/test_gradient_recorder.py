import pytest
import torch

from tide_lm.training.gradient_recorder import GradientRecorder

PAIRS = {"num_memory_blocks": 4, "memory_pair_rows": 19}


@pytest.mark.parametrize(("tied", "pairs"), [(True, {}), (False, {}), (True, PAIRS)])
def test_parts_of_the_gradient_are_told_apart(tiny_model, token_ids, tied, pairs):
    """The input's part is that of a model whose head is cut off from E; the rest is the head's."""
    model = tiny_model(tie_word_embeddings=tied, **pairs).train()
    recorder = GradientRecorder(model)
    for ids in token_ids.split(1):  # two micro-batches of one step
        model(ids, labels=ids).loss.backward()
    recorder.collect()

    untied = tiny_model(tie_word_embeddings=False, **pairs).train()
    untied.load_state_dict(model.state_dict())
    for ids in token_ids.split(1):
        untied(ids, labels=ids).loss.backward()
    expected = {
        "embedding_input": untied.model.embed_tokens.weight.grad.square().sum(-1),
        "embedding_head": untied.lm_head.weight.grad.square().sum(-1),
        "tables": untied.model.memory.weight.grad[:53].square().sum(-1),  # and not those of pairs
    }
    for name, squared in recorder.squared.items():
        assert squared.dtype == torch.float64
        assert torch.allclose(squared.float(), expected[name], rtol=1e-4, atol=1e-9), name
    present = torch.zeros(53, dtype=torch.bool)
    present[token_ids[:, :-1].flatten()] = True  # the last of a row predicts nothing
    assert torch.equal(recorder.squared["embedding_input"] > 0, present)
    assert torch.equal(recorder.squared["tables"][:, 0] > 0, present)


def test_steps_add_up(tiny_model, token_ids):
    model = tiny_model().train()
    recorder = GradientRecorder(model)
    totals = []
    for _ in range(2):
        model.zero_grad()
        model(token_ids, labels=token_ids).loss.backward()
        recorder.collect()
        totals.append(recorder.squared["embedding_input"].clone())
    assert torch.allclose(totals[1], 2 * totals[0])


def test_a_base_model_has_no_tables(tiny_model):
    assert set(GradientRecorder(tiny_model(num_memory_blocks=0)).squared) == {
        "embedding_input",
        "embedding_head",
    }
