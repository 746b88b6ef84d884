"""The selection: every form chooses what a stable sort of the scores chooses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from glm52_jax.kernels import PORTABLE
from glm52_jax.kernels.topk.api import topk_indices, topk_mask
from glm52_jax.kernels.topk.cpu import ordered_bits

# Few values, so that most of them are duplicates; minus infinity stands for positions that may not be seen.
VALUES = st.sampled_from([-np.inf, -3.5, -1.0, -1e-30, 0.0, 1e-38, 0.25, 0.5, 3e38, np.inf])
SHAPES = st.sampled_from([(1, 1), (2, 7), (3, 33)])
INDICES = {b: jax.jit(lambda s, k, b=b: topk_indices(s, k, backend=b), static_argnums=1) for b in PORTABLE}
MASK = {b: jax.jit(lambda s, k, b=b: topk_mask(s, k, backend=b), static_argnums=1) for b in PORTABLE}


def stable(scores: np.ndarray, k: int) -> np.ndarray:
    """Higher score first, then lower position; minus infinity never."""
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :k]
    mask = np.zeros(scores.shape, bool)
    np.put_along_axis(mask, order, True, axis=-1)
    return mask & (scores > -np.inf)


def check(scores: np.ndarray, k: int, backend: str) -> None:
    expected = stable(scores, k)
    np.testing.assert_array_equal(MASK[backend](scores, k), expected)
    indices = np.asarray(INDICES[backend](scores, k))
    assert indices.shape == (*scores.shape[:-1], k)
    listed = (indices[..., None] == np.arange(scores.shape[-1])).sum(-2)
    np.testing.assert_array_equal(listed, expected)  # each position once, and -1 for the rest
    np.testing.assert_array_equal((indices < 0).sum(-1), k - expected.sum(-1))


@pytest.mark.parametrize("backend", PORTABLE)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_every_form_is_a_stable_sort(backend: str, data: st.DataObject) -> None:
    scores = data.draw(SHAPES.flatmap(lambda shape: arrays(np.float32, shape, elements=VALUES)))
    k = data.draw(st.sampled_from([k for k in (1, 2, 5, 7, 33) if k <= scores.shape[-1]]))
    check(scores, k, backend)


@pytest.mark.parametrize("backend", PORTABLE)
@pytest.mark.parametrize("kind", ["clear", "tied", "causal"])
def test_many_rows_of_many_positions(backend: str, kind: str) -> None:
    """More rows than a form takes at a time."""
    scores = np.random.default_rng(0).standard_normal((2, 300, 1024)).astype(np.float32)
    if kind == "tied":
        scores = np.round(scores * 4) / 4 + 0.0
    if kind == "causal":
        scores = np.where(np.arange(1024) <= 3 * np.arange(300)[:, None], scores, -np.inf)
    check(scores, 100, backend)


@pytest.mark.parametrize("backend", PORTABLE)
def test_nothing_to_choose_from(backend: str) -> None:
    scores = np.full((2, 9), -np.inf, np.float32)
    assert (np.asarray(INDICES[backend](scores, 4)) == -1).all()
    assert not np.asarray(MASK[backend](scores, 4)).any()


@given(arrays(np.float32, 20, elements=st.floats(width=32, allow_nan=False)))
@settings(deadline=None)
def test_the_integer_image_keeps_the_order(scores: np.ndarray) -> None:
    sortable = np.asarray(ordered_bits(jnp.asarray(scores)))
    # Zeros of either sign and numbers too small to be normal are equal to the processor, not to the image.
    plain = scores[np.abs(scores) > 1e-37]
    order = np.argsort(plain, kind="stable")
    assert (np.diff(sortable[np.abs(scores) > 1e-37][order].astype(np.int64)) >= 0).all()
