"""Sampling and the acceptance of drafts: the distributions are the model's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.sampling import SAMPLE, Sampling, draw, next_token, probabilities
from infer.speculative import accept


def sampling(rows: int, temperature: float, top_p: float = 1.0, seed: int = 0) -> Sampling:
    return Sampling.of(rows, temperature, top_p, [seed + r for r in range(rows)])


# Steps of 1/64: of logits that differ by less than float32 can tell, either may come first.
LOGITS = st.integers(-320, 320).map(lambda number: number / 64)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(LOGITS, min_size=8, max_size=8),
    st.floats(0.05, 1.0),
    st.floats(0.2, 3.0),
)
def test_the_nucleus_is_the_smallest_that_reaches_top_p(logits: list[float], top_p: float, temperature: float) -> None:
    found = np.asarray(jax.jit(probabilities)(jnp.array([logits], jnp.float32), sampling(1, temperature, top_p)))[0]
    plain = np.exp(np.array(logits, np.float64) / temperature)
    plain /= plain.sum()
    order = np.argsort(-np.float32(plain), kind="stable")
    before = np.cumsum(plain[order]) - plain[order]
    kept = found > 0
    assert kept[order[0]]
    for rank, token in enumerate(order):
        if before[rank] < top_p - 1e-5:
            assert kept[token]
        if before[rank] > top_p + 1e-5:
            assert not kept[token]
    np.testing.assert_allclose(found[kept], plain[kept] / plain[kept].sum(), rtol=1e-3)


@settings(deadline=None, max_examples=20)
@given(
    st.lists(LOGITS, min_size=8, max_size=8, unique=True),
    st.integers(0, 10),
    st.sampled_from([0.3, 0.8, 1.0]),
)
def test_the_nucleus_is_of_the_likeliest_k(logits: list[float], top_k: int, top_p: float) -> None:
    """As transformers and vLLM do it: so many of the likeliest, and of these the smallest set that reaches top_p."""
    how = Sampling.of(1, 1.0, top_p, [0], top_k)
    found = np.asarray(jax.jit(probabilities)(jnp.array([logits], jnp.float32), how))[0]
    plain = np.exp(np.array(logits, np.float64))
    order = np.argsort(-np.float32(logits), kind="stable")[: top_k or None]
    share = plain[order] / plain[order].sum()
    before = np.cumsum(share) - share
    assert not found[np.setdiff1d(np.arange(8), order)].any()
    for rank, token in enumerate(order):
        if abs(before[rank] - top_p) > 1e-5:
            assert (found[token] > 0) == (before[rank] < top_p)
    assert abs(found.sum() - 1) < 1e-5


def test_temperature_zero_takes_the_lowest_of_the_likeliest() -> None:
    logits = jnp.array([[1.0, 3.0, 3.0, 0.0]])
    assert probabilities(logits, sampling(1, 0.0)).tolist() == [[0.0, 1.0, 0.0, 0.0]]
    assert int(next_token(logits, None, jnp.zeros(1, jnp.int32))[0]) == 1


def test_draws_depend_on_seed_and_position_alone() -> None:
    flat = jnp.full((4, 50), 1 / 50)
    first = draw(flat, sampling(4, 1.0), jnp.array([3, 3, 9, 3]), SAMPLE)
    assert len(set(first.tolist())) > 1
    alone = draw(flat[:1], Sampling.of(1, 1.0, 1.0, [2]), jnp.array([9]), SAMPLE)
    assert int(alone[0]) == int(first[2])
    moved = draw(flat, sampling(4, 1.0), jnp.array([4, 4, 10, 4]), SAMPLE)
    assert moved.tolist() != first.tolist()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_kept_and_replaced_drafts_have_the_targets_distribution(temperature: float) -> None:
    """Many rows, one draft each from a very different distribution: the first tokens are distributed as the target."""
    rows, vocab = 20000, 6
    rng = np.random.default_rng(0)
    target = jnp.asarray(rng.normal(size=(1, 2, vocab)) * 1.5, jnp.float32)
    proposal = jnp.asarray(rng.normal(size=(1, vocab)) * 1.5, jnp.float32)
    how = sampling(rows, temperature, 0.9, seed=100)
    position = jnp.full(rows, 5, jnp.int32)
    q = jnp.broadcast_to(jax.jit(probabilities)(proposal, sampling(1, temperature)), (rows, vocab))
    drafts = jax.jit(draw, static_argnums=3)(q, how, position, 1)[:, None]
    logits = jnp.broadcast_to(target, (rows, 2, vocab))
    tokens, accepted = jax.jit(accept)(logits, drafts, q[:, None], how, position)
    expected = np.asarray(probabilities(target[:, 0], sampling(1, temperature, 0.9)))[0]
    share = np.bincount(np.asarray(tokens)[:, 0], minlength=vocab) / rows
    assert abs(share - expected).max() < 4 * np.sqrt(0.25 / rows)
    # After a draft that stood, the second token has the target's second row.
    second = np.asarray(tokens)[np.asarray(accepted) == 1, 1]
    expected = np.asarray(probabilities(target[:, 1], sampling(1, temperature, 0.9)))[0]
    share = np.bincount(second, minlength=vocab) / len(second)
    assert abs(share - expected).max() < 4 * np.sqrt(0.25 / len(second))
    assert 0.05 < float(jnp.mean(accepted)) < 0.95


def test_greedy_acceptance_counts_the_leading_matches() -> None:
    logits = jax.nn.one_hot(jnp.array([[4, 2, 7, 1]] * 3), 8)
    drafts = jnp.array([[4, 2, 7], [4, 3, 7], [0, 2, 7]])
    tokens, accepted = jax.jit(accept)(logits, drafts, None, None, jnp.zeros(3, jnp.int32))
    assert accepted.tolist() == [3, 1, 0]
    assert tokens.tolist() == [[4, 2, 7, 1]] * 3
