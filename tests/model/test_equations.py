"""`TideForCausalLM` computes the paper's equations: logits and gradients equal loops written from them."""

from collections.abc import Mapping

import pytest
import torch
from reference import tide_forward

from tide_lm import Memory, TideConfig, TideForCausalLM

# Against the largest element of a tensor: Llama's norm and rotary angles are float32 even in a float64 model.
TOLERANCE = 1e-5
REPEATED = torch.tensor([[3, 11, 3, 3, 20], [11, 0, 22, 3, 11]])
ATTENTION = {
    "grouped": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6},
    "multi-head": {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 4},
    "rows in values": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "memory_values": True,
    },
    "larger rows in values": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "memory_values": True,
        "memory_value_scale": 3.5,
        "num_hidden_layers": 9,  # so that layers share a block, and those that do not have each its own
    },
}


def tiny_model(blocks: int, attention: str = "grouped", tied: bool = True) -> TideForCausalLM:
    """A float64 model in which every weight matters.

    Gains differ from one, routers are sharp, and eps and the rotary base are large enough to be seen.
    """
    config = TideConfig(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=20,
        num_memory_blocks=blocks,
        tie_word_embeddings=tied,
        rms_norm_eps=0.05,
        rope_parameters={"rope_type": "default", "rope_theta": 10.0},
        **{"num_hidden_layers": 2, **ATTENTION[attention]},
    )
    model = TideForCausalLM(config).double()
    generator = torch.Generator().manual_seed(blocks)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if "norm" in name:
            drawn = 1 + 0.4 * drawn
        elif "router" in name:
            drawn = 0.9 * drawn
        elif "memory" not in name and "value_gate" not in name:
            drawn = drawn / parameter.shape[-1] ** 0.5
        parameter.data.copy_(drawn)
    return model


def leaves_of(model: TideForCausalLM) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}


def assert_close(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    assert found.shape == wanted.shape, what
    error = (found - wanted).abs().max() / wanted.abs().max()
    assert error <= TOLERANCE, f"{what}: off by {error:.1e} of its largest element"


def assert_same_gradients(model: TideForCausalLM, leaves: Mapping[str, torch.Tensor]) -> None:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert found.keys() == leaves.keys()
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        assert leaf.grad.abs().max() > 0, name
        assert found[name] is not None, name
        assert_close(found[name], leaf.grad, name)


def random_weights(logits_BTV: torch.Tensor) -> torch.Tensor:
    """Weights for a sum of logits whose gradient reaches every position and every token."""
    return torch.randn(logits_BTV.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("blocks", [1, 3, 8])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("attention", ATTENTION)
def test_logits_and_every_gradient_equal_the_equations(attention: str, tied: bool, blocks: int) -> None:
    model = tiny_model(blocks, attention, tied)
    leaves = leaves_of(model)
    ids = torch.randint(23, (2, 5), generator=torch.Generator().manual_seed(blocks))

    found = model(ids).logits
    wanted = tide_forward(leaves, model.config, ids).logits_BTV
    (found * random_weights(found)).sum().backward()
    (wanted * random_weights(wanted)).sum().backward()

    assert_close(found, wanted, "logits")
    assert_same_gradients(model, leaves)


def test_a_token_that_repeats_sums_its_gradient_over_the_loss_at_each_place() -> None:
    model = tiny_model(blocks=3)
    leaves = leaves_of(model)

    loss = model(REPEATED, labels=REPEATED).loss
    log_p_BTV = tide_forward(leaves, model.config, REPEATED).logits_BTV.log_softmax(-1)
    terms = [-log_p_BTV[b, t, REPEATED[b, t + 1]] for b in range(2) for t in range(4)]
    wanted = sum(terms) / len(terms)
    loss.backward()
    wanted.backward()

    assert_close(loss.detach().double(), wanted.detach(), "loss")
    assert_same_gradients(model, leaves)


@pytest.mark.parametrize("attention", ["grouped", "rows in values", "larger rows in values"])
def test_memory_fetched_outside_once_per_distinct_token_gives_the_same_logits_and_row_gradients(
    attention: str,
) -> None:
    plain, fetched = tiny_model(3, attention), tiny_model(3, attention)
    unique_U, index_BT = torch.unique(REPEATED, return_inverse=True)
    assert len(unique_U) < REPEATED.numel()
    table_VKD = fetched.model.memory.weight
    raw_UKD = table_VKD.detach()[unique_U].requires_grad_()

    wanted = plain(REPEATED).logits
    found = fetched(REPEATED, memory=Memory(fetched.model.memory.norm(raw_UKD), index_BT)).logits
    (wanted * random_weights(wanted)).sum().backward()
    (found * random_weights(found)).sum().backward()

    assert_close(found, wanted, "logits")
    assert raw_UKD.grad is not None
    assert_close(raw_UKD.grad, plain.model.memory.weight.grad[unique_U], "row gradients")
    assert table_VKD.grad is None, "the table must not get a dense gradient"
    for (name, one), other in zip(fetched.named_parameters(), plain.parameters(), strict=True):
        if one is not table_VKD:
            assert_close(one.grad, other.grad, name)


@pytest.mark.parametrize("dropped", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("attention", ["grouped", "rows in values", "larger rows in values"])
def test_dropped_layers_add_no_memory(attention: str, dropped: tuple[int, ...]) -> None:
    model = tiny_model(3, attention)
    leaves = leaves_of(model)

    found = model(REPEATED, drop_memory_layers=dropped).logits
    wanted = tide_forward(leaves, model.config, REPEATED, drop_memory_layers=dropped).logits_BTV

    assert_close(found, wanted, "logits")
    assert not torch.allclose(found, model(REPEATED).logits, rtol=0.01)


@pytest.mark.parametrize("attention", ["grouped", "larger rows in values"])
@pytest.mark.parametrize("blocks", [1, 3, 8])
def test_router_weights_are_the_equations_alpha_with_the_null_bank_last(blocks: int, attention: str) -> None:
    model = tiny_model(blocks, attention)
    outputs = model(REPEATED, output_router_weights=True)
    wanted = tide_forward(leaves_of(model), model.config, REPEATED).alpha_LBTS

    assert len(outputs.router_weights) == len(wanted) == model.config.num_hidden_layers
    for found_BTS, wanted_BTS in zip(outputs.router_weights, wanted, strict=True):
        assert found_BTS.shape == (2, 5, blocks + 1)
        assert_close(found_BTS, wanted_BTS, "alpha")
        assert wanted_BTS.max() > 0.8, "weights this uniform would hide a wrong order of the slots"


def test_asking_for_router_weights_does_not_change_the_logits_by_a_bit() -> None:
    model = tiny_model(blocks=3)
    assert torch.equal(model(REPEATED, output_router_weights=True).logits, model(REPEATED).logits)


def test_router_weights_can_be_asked_for_in_the_config() -> None:
    model = tiny_model(blocks=3)
    asked = model(REPEATED, output_router_weights=True).router_weights
    model.config.output_router_weights = True
    for found, wanted in zip(model(REPEATED).router_weights, asked, strict=True):
        assert torch.equal(found, wanted)
