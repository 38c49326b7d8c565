"""The paper's propositions and bounds, on this code, within the domains in which they are true.

Shapes: B batch, T tokens, V vocabulary, K blocks, S = K + 1 slots (the null bank is last), D hidden.
"""

import functools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from tide_lm import EmbeddingMemory, MemoryRouter, TideConfig, TideForCausalLM, ops
from tide_lm.spec import estimate

VOCAB, HIDDEN, BLOCKS = 23, 16, 4
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}
examples = functools.partial(settings, deadline=None, derandomize=True, database=None)
seeds = st.integers(0, 2**32 - 1)
shares = st.floats(0.01, 1)


def normal(seed: int, *size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit_rows(seed: int, *size: int) -> torch.Tensor:
    return torch.nn.functional.normalize(normal(seed, *size), dim=-1)


def tiny_config(blocks: int = BLOCKS, **changes: object) -> TideConfig:
    return TideConfig(**{**LLAMA, "num_memory_blocks": blocks, **changes})


# Asymptotic generalisation (prop:gen, app:proof)


def null_logit(K: int, C: float, eps: float) -> float:
    """s*, at which the blocks' joint weight times C is eps (eq:sstar)."""
    return math.log(K * (C - eps) / eps)


def memory_norm(rows_KD: torch.Tensor, null: float) -> float:
    """||m|| when every block's logit is 0 and the null bank's is given."""
    K, D = rows_KD.shape
    logits_S = torch.zeros(K + 1, dtype=rows_KD.dtype)
    logits_S[-1] = null
    m = ops.memory_mix(torch.zeros(1, 1, D, dtype=rows_KD.dtype), logits_S.view(1, 1, -1), rows_KD[None])
    return m.norm().item()


@examples(max_examples=200)
@given(
    seed=seeds,
    K=st.integers(1, 24),
    D=st.integers(1, 40),
    C=st.floats(1e-3, 1e3),
    share=st.floats(1e-6, 0.999),
    above=st.floats(0, 5),
)
def test_from_the_null_logit_s_star_on_no_rows_of_norm_c_add_more_than_eps(
    seed: int, K: int, D: int, C: float, share: float, above: float
) -> None:
    eps = share * C
    norms = torch.rand(K, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows_KD = C * norms * unit_rows(seed, K, D)
    assert memory_norm(rows_KD, null_logit(K, C, eps) + above) <= eps * (1 + 1e-12)


@examples(max_examples=100)
@given(seed=seeds, K=st.integers(1, 24), C=st.floats(1e-3, 1e3), share=st.floats(1e-6, 0.99))
def test_s_star_is_tight(seed: int, K: int, C: float, share: float) -> None:
    """Equal rows of norm C reach eps at s*, and exceed it below."""
    eps = share * C
    rows_KD = C * unit_rows(seed, 1, 8).expand(K, -1)
    s = null_logit(K, C, eps)
    assert memory_norm(rows_KD, s) == pytest.approx(eps, rel=1e-9)
    assert memory_norm(rows_KD, s - 0.01) > eps * (1 + 1e-5)


@examples(max_examples=50)
@given(seed=seeds, K=st.integers(1, 8), scale=st.floats(0.01, 100))
def test_no_router_keeps_the_null_bank_above_its_equal_share_for_both_n_and_minus_n(
    seed: int, K: int, scale: float
) -> None:
    """Without a bias the logits of -n are those of n negated, so prop:gen is tested on logits."""
    router = MemoryRouter(tiny_config(K)).double()
    router.weight.data = scale * normal(seed, K + 1, HIDDEN)
    n_D = unit_rows(seed + 1, HIDDEN) * math.sqrt(HIDDEN)
    null = [ops.router_weights(router(sign * n_D))[-1].item() for sign in (1, -1)]
    assert min(null) <= (1 + 1e-12) / (K + 1)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_gain_zero_is_exactly_the_base_model(tied: bool) -> None:
    tide = TideForCausalLM(tiny_config(memory_gain_init=0.0, tie_word_embeddings=tied))
    base = LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=tied))
    added = ("model.memory.", ".router.")
    shared = {k: v for k, v in tide.state_dict().items() if not any(part in k for part in added)}
    base.load_state_dict(shared, strict=True)
    ids = torch.arange(VOCAB).view(1, -1)

    assert torch.equal(tide(ids).logits, base(ids).logits)
    tide.model.memory.norm.weight.data.fill_(0.1)
    assert not torch.allclose(tide(ids).logits, base(ids).logits)


# K-pathway amplification and starvation (prop:k_pathway, eq:sparsity)


@functools.cache
def gradient_model(blocks: int, tied: bool) -> TideForCausalLM:
    return TideForCausalLM(tiny_config(blocks, tie_word_embeddings=tied))


batches = npst.arrays(np.int64, (2, 5), elements=st.integers(0, VOCAB - 1))


def backward(model: TideForCausalLM, tokens: np.ndarray) -> torch.Tensor:
    """Leaves the gradients of the next-token loss; returns which of the V tokens the model was given."""
    tokens_BT = torch.from_numpy(tokens)
    inputs, targets = tokens_BT[:, :-1], tokens_BT[:, 1:]
    model.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten()).backward()
    present_V = torch.zeros(VOCAB, dtype=torch.bool)
    present_V[inputs.flatten()] = True
    return present_V


def reached(gradient: torch.Tensor | None) -> torch.Tensor:
    """Which rows of a table have any gradient at all."""
    assert gradient is not None
    return (gradient != 0).any(-1)


@examples(max_examples=30)
@given(tokens=batches, tied=st.booleans())
def test_all_k_tables_of_every_token_in_the_batch_get_gradient_and_no_others(
    tokens: np.ndarray, tied: bool
) -> None:
    model = gradient_model(BLOCKS, tied)
    present_V = backward(model, tokens)
    reached_VK = reached(model.model.memory.weight.grad)
    assert torch.equal(reached_VK, present_V[:, None].expand(-1, BLOCKS))


@examples(max_examples=30)
@given(tokens=batches, blocks=st.sampled_from([0, BLOCKS]))
def test_with_an_untied_head_only_tokens_in_the_batch_get_gradient_in_the_embedding(
    tokens: np.ndarray, blocks: int
) -> None:
    model = gradient_model(blocks, tied=False)
    present_V = backward(model, tokens)
    assert torch.equal(reached(model.model.embed_tokens.weight.grad), present_V)


@examples(max_examples=30)
@given(tokens=batches, blocks=st.sampled_from([0, BLOCKS]))
def test_with_a_tied_head_every_token_gets_gradient_in_the_embedding(tokens: np.ndarray, blocks: int) -> None:
    """The head raises or lowers every token's logit, so the starvation bound is for the input side only."""
    model = gradient_model(blocks, tied=True)
    backward(model, tokens)
    assert reached(model.model.embed_tokens.weight.grad).all()


# Gradient starvation (eq:bernoulli, eq:expected_updates, eq:kappa_def)

frequencies = st.floats(1e-12, 0.999)
sizes = st.integers(1, 64)


@examples(max_examples=200)
@given(f=frequencies, batch=sizes, sequence=sizes, steps=st.integers(1, 10**7))
def test_a_token_is_updated_at_most_at_each_step_and_at_most_at_each_occurrence(
    f: float, batch: int, sequence: int, steps: int
) -> None:
    """1 - (1 - f)^BT <= min(1, f BT), with equality where a step holds a single token."""
    updates, occurrences = estimate.expected_updates(f, steps * batch * sequence, batch, sequence)
    assert 0 < updates <= min(steps, occurrences) * (1 + 1e-12)
    if batch * sequence == 1:
        assert updates == pytest.approx(occurrences, rel=1e-12)


@examples(max_examples=100)
@given(f=frequencies, batch=st.integers(1, 8), sequence=st.integers(1, 8))
def test_expected_updates_are_the_exact_formula_even_for_the_rarest_tokens(
    f: float, batch: int, sequence: int
) -> None:
    """Exact fractions: in floats, 1 - (1 - f)^BT loses every digit of a small f."""
    updates, _ = estimate.expected_updates(f, 1000 * batch * sequence, batch, sequence)
    assert updates == pytest.approx(float(1000 * (1 - (1 - Fraction(f)) ** (batch * sequence))), rel=1e-12)


@examples(max_examples=100)
@given(f=frequencies, more=st.floats(1.01, 100), batch=sizes, sequence=sizes)
def test_updates_a_step_grow_with_the_frequency_and_with_the_batch(
    f: float, more: float, batch: int, sequence: int
) -> None:
    def updates_per_step(frequency: float, batch: int) -> float:
        return estimate.expected_updates(frequency, batch * sequence, batch, sequence)[0]

    here = updates_per_step(f, batch)
    assert updates_per_step(min(f * more, 0.9999), batch) >= here
    assert updates_per_step(f, 2 * batch) >= here
    if here < 0.9:  # a token in nearly every batch cannot be in more
        assert updates_per_step(min(f * more, 0.9999), batch) > here
        assert updates_per_step(f, 2 * batch) > here


@examples(max_examples=100)
@given(rare=st.floats(1e-12, 1e-6), common=st.floats(1e-4, 0.9), batch=sizes, sequence=sizes)
def test_the_gradient_ratio_bound_holds_for_every_token_at_least_as_common(
    rare: float, common: float, batch: int, sequence: int
) -> None:
    bound = estimate.gradient_ratio_bound(rare, common, batch, sequence)
    steps = 1000
    tokens = steps * batch * sequence
    updates = {f: estimate.expected_updates(f, tokens, batch, sequence)[0] for f in (rare, common, 0.95)}
    assert updates[rare] / updates[common] <= bound * (1 + 1e-12)
    assert updates[rare] / updates[0.95] <= bound * (1 + 1e-12)
    assert estimate.gradient_ratio_bound(rare, common, batch, sequence, spread=10) == pytest.approx(
        10 * bound
    )


# Separation of collapsed tokens (prop:zero-collapse)


def memory_with_gains(gains_KD: torch.Tensor) -> EmbeddingMemory:
    K, D = gains_KD.shape
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2}  # valid beside any D
    memory = EmbeddingMemory(tiny_config(K, hidden_size=D, **heads))
    memory.norm.weight.data = gains_KD.float()
    memory.weight.data.zero_()
    return memory


def largest_separation(gains_D: torch.Tensor) -> float:
    """2 sqrt(D) max|gain|: normalised rows lie within an ellipsoid with the axes sqrt(D) |gain|."""
    return 2 * math.sqrt(len(gains_D)) * gains_D.abs().max().item()


def rows_at_distance(C: float, gains_D: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows of one length whose normalised values are C apart, for any C up to the largest separation.

    One lies on the longest axis, of gain a, and the other is turned from it by an angle towards an axis of
    gain b. With w = 1 - cos(angle), C^2 = D (a^2 w^2 + b^2 w (2 - w)), of which w is the root in [0, 2].
    The rows are long, so that eps is nothing beside their mean square.
    """
    D = len(gains_D)
    long, other = gains_D.abs().topk(2).indices.tolist()
    a2, b2, s = gains_D[long].item() ** 2, gains_D[other].item() ** 2, C**2 / D
    w = min(2.0, s / (b2 + math.sqrt(b2**2 + (a2 - b2) * s)))
    row_u, row_v = torch.zeros(D), torch.zeros(D)
    row_u[long] = 1e4
    row_v[long], row_v[other] = 1e4 * (1 - w), 1e4 * math.sqrt(w * (2 - w))
    return row_u, row_v


def separations(memory: EmbeddingMemory, u: int, v: int) -> list[float]:
    rows_UKD = memory(torch.tensor([[u, v]])).rows_UJD
    return (rows_UKD[0] - rows_UKD[1]).norm(dim=-1).tolist()


gains = st.integers(2, 12).flatmap(
    lambda D: npst.arrays(
        np.float64,
        st.tuples(st.integers(1, 4), st.just(D)),
        elements=st.floats(0.01, 10) | st.floats(-10, -0.01),
    )
)


@examples(max_examples=200)
@given(gains_KD=gains.map(torch.from_numpy), share=shares)
def test_every_block_can_hold_two_tokens_at_any_distance_up_to_its_largest(
    gains_KD: torch.Tensor, share: float
) -> None:
    C_K = [share * largest_separation(gains_D) for gains_D in gains_KD]
    memory = memory_with_gains(gains_KD)
    for k, (C, gains_D) in enumerate(zip(C_K, gains_KD, strict=True)):
        memory.weight.data[3, k], memory.weight.data[7, k] = rows_at_distance(C, gains_D)
    assert separations(memory, 3, 7) == pytest.approx(C_K, rel=1e-4)


@examples(max_examples=200)
@given(gains_KD=gains.map(torch.from_numpy), seed=seeds, log_scale=st.floats(-6, 6), opposite=st.booleans())
def test_no_two_rows_are_further_apart_than_twice_the_longest_axis(
    gains_KD: torch.Tensor, seed: int, log_scale: float, opposite: bool
) -> None:
    """Any C is more than the paper's proposition can give: RMSNorm bounds its rows."""
    memory = memory_with_gains(gains_KD)
    row_KD = 10**log_scale * normal(seed, *gains_KD.shape).float()
    memory.weight.data[3] = row_KD
    memory.weight.data[7] = -row_KD if opposite else normal(seed + 1, *gains_KD.shape).float()
    bounds = [largest_separation(gains_D) for gains_D in gains_KD]
    assert all(np.array(separations(memory, 3, 7)) <= np.array(bounds) * (1 + 1e-6))


@pytest.mark.parametrize("share", [0.01, 0.5, 1.0])
def test_two_tokens_with_one_embedding_are_one_to_the_base_and_differ_by_the_memory_in_tide(
    share: float,
) -> None:
    """delta = 0 is the worst collapse; the first layer then separates by alpha times C, whatever the FFN."""
    base, tide = TideForCausalLM(tiny_config(0)), TideForCausalLM(tiny_config(1))
    u, v, context = 3, 7, [1, 5, 2]
    for model in (base, tide):
        model.model.embed_tokens.weight.data[v] = model.model.embed_tokens.weight.data[u]
    memory = tide.model.memory
    C = share * largest_separation(memory.norm.weight[0])
    memory.weight.data[u, 0], memory.weight.data[v, 0] = rows_at_distance(C, memory.norm.weight[0].detach())
    ids = torch.tensor([[*context, u], [*context, v]])

    logits = base(ids).logits
    assert torch.equal(logits[0], logits[1])
    outputs = tide(ids, output_hidden_states=True, output_router_weights=True)
    h_u, h_v = outputs.hidden_states[1][:, -1]
    alpha = outputs.router_weights[0][:, -1, 0]
    assert alpha[0] == alpha[1]
    assert (h_u - h_v).norm().item() == pytest.approx(alpha[0].item() * C, rel=1e-4)


# The FFN's lower bound on collapsed tokens (prop:ffn_lower_bound)

SEGMENT = torch.linspace(0, 1, 33, dtype=torch.float64)
# Points of a segment, its ends among them, miss a largest norm between them by a term in the square of
# their spacing, 1/1024; the slack covers it.
LIPSCHITZ_SLACK = 1e-4


@functools.cache
def ffn(seed: int) -> LlamaMLP:
    mlp = LlamaMLP(tiny_config(hidden_size=8, intermediate_size=12)).double().requires_grad_(False)
    for offset, parameter in enumerate(mlp.parameters()):
        parameter.data = normal(seed + offset, *parameter.shape) / math.sqrt(parameter.shape[-1])
    return mlp


def lipschitz(mlp: LlamaMLP, n_u: torch.Tensor, n_v: torch.Tensor) -> float:
    """The largest spectral norm of the FFN's Jacobian on the segment from n_u to n_v."""
    points_PD = n_u + SEGMENT[:, None] * (n_v - n_u)
    return torch.linalg.matrix_norm(torch.func.vmap(torch.func.jacrev(mlp))(points_PD), ord=2).max().item()


@examples(max_examples=60)
@given(
    seed=seeds,
    weights=st.integers(0, 4),
    delta=st.floats(1e-4, 1),
    distance=st.floats(1e-3, 20),
    best=st.booleans(),
)
def test_no_gated_ffn_comes_nearer_to_separated_targets_than_the_lower_bound(
    seed: int, weights: int, delta: float, distance: float, best: bool
) -> None:
    mlp = ffn(weights)
    n_u = normal(seed, 8)
    n_v = n_u + delta * unit_rows(seed + 1, 8)
    f_u, f_v = mlp(n_u), mlp(n_v)
    if best:  # the targets that cost the FFN least: on the line of its outputs, around their middle
        centre, along = (f_u + f_v) / 2, (f_v - f_u) / (f_v - f_u).norm()
    else:
        centre, along = f_u + normal(seed + 2, 8), unit_rows(seed + 3, 8)
    g_u, g_v = centre - distance / 2 * along, centre + distance / 2 * along

    error = max((f_u - g_u).norm(), (f_v - g_v).norm()).item()
    L = lipschitz(mlp, n_u, n_v) * (1 + LIPSCHITZ_SLACK)
    assert error >= (distance - L * delta) / 2 - 1e-12


@examples(max_examples=30)
@given(seed=seeds, weights=st.integers(0, 4))
def test_the_lower_bound_is_reached_where_the_ffn_is_steepest(seed: int, weights: int) -> None:
    """So L is no larger than it has to be."""
    mlp, delta, distance = ffn(weights), 1e-4, 1.0
    n_u = normal(seed, 8)
    _, _, directions = torch.linalg.svd(torch.func.jacrev(mlp)(n_u))
    n_v = n_u + delta * directions[0]
    f_u, f_v = mlp(n_u), mlp(n_v)
    along = (f_v - f_u) / (f_v - f_u).norm()
    error = ((f_u + f_v) / 2 - distance / 2 * along - f_u).norm().item()
    L = lipschitz(mlp, n_u, n_v)
    assert 2 * error == pytest.approx(distance - L * delta, abs=1e-3 * L * delta)


@examples(max_examples=30)
@given(seed=seeds, weights=st.integers(0, 4))
def test_a_gated_ffn_has_no_global_lipschitz_constant(seed: int, weights: int) -> None:
    """Its slope grows with its input, so the paper's L_FFN exists only for bounded states."""
    mlp, n = ffn(weights), normal(seed, 8)
    slopes = [lipschitz(mlp, scale * n, scale * n) for scale in (100, 1000, 10_000)]
    assert slopes[1] > 5 * slopes[0]
    assert slopes[2] > 5 * slopes[1]
