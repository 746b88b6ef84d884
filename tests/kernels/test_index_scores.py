"""Index scores: the weighted sum of ReLUs over heads, of what may be seen, in any page order and block size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm52_jax.kernels import PORTABLE
from glm52_jax.kernels.index_scores.api import index_scores
from glm52_jax.kernels.index_scores.reference import map_tokens

HEADS, DIM, PAGE = 3, 8, 16


def setting(batch: int, tokens: int, pages: int, seed: int = 0) -> dict:
    """Queries at the end of each sequence, pages in random order, NaN in what was never written."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(tokens, pages * PAGE + 1, batch)
    table = generator.permutation(batch * pages + 2)[: batch * pages].reshape(batch, pages).astype(np.int32)
    pool = np.full((2, batch * pages + 2, PAGE, DIM), np.nan, np.float32)
    context = generator.standard_normal((batch, pages * PAGE, DIM)).astype(np.float32)
    for row in range(batch):
        for position in range(lengths[row]):
            pool[1, table[row, position // PAGE], position % PAGE] = context[row, position]
    return {
        "queries": generator.standard_normal((batch, tokens, HEADS, DIM)).astype(np.float32),
        "weights": generator.standard_normal((batch, tokens, HEADS)).astype(np.float32),
        "pool": pool,
        "table": table,
        "positions": (lengths[:, None] - tokens + np.arange(tokens)).astype(np.int32),
        "context": context,
    }


def run(s: dict, backend: str) -> np.ndarray:
    arrays = (s["queries"], s["weights"], s["pool"], 1, s["table"], s["positions"])
    return np.asarray(jax.jit(lambda *a: index_scores(*a, backend=backend))(*arrays))


def expected(s: dict) -> np.ndarray:
    dots = np.einsum("bshd,btd->bsht", s["queries"].astype(np.float64), s["context"].astype(np.float64))
    total = np.einsum("bsh,bsht->bst", s["weights"].astype(np.float64), np.maximum(dots, 0))
    return np.where(np.arange(total.shape[-1]) <= s["positions"][..., None], total, -np.inf)


@pytest.mark.parametrize("backend", PORTABLE)
@pytest.mark.parametrize(("batch", "tokens", "pages"), [(2, 1, 3), (3, 17, 4), (1, 300, 20)])
def test_values(backend: str, batch: int, tokens: int, pages: int) -> None:
    s = setting(batch, tokens, pages)
    got = run(s, backend)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected(s), atol=2e-5)


@pytest.mark.parametrize("backend", PORTABLE)
@pytest.mark.parametrize("tokens", [4, 20])
def test_padding_sees_nothing(backend: str, tokens: int) -> None:
    s = setting(2, tokens, 3)
    s["positions"][0, :2] = s["positions"][1, -1:] = -1
    s["positions"][1] = -1
    s["queries"][s["positions"] < 0] = np.nan
    got = run(s, backend)
    assert (got[s["positions"] < 0] == -np.inf).all()
    real = s["positions"] >= 0
    np.testing.assert_allclose(got[real], expected(s)[real], atol=2e-5)


@pytest.mark.parametrize("backend", PORTABLE)
@pytest.mark.parametrize("tokens", [4, 20])
def test_negative_products_count_for_nothing(backend: str, tokens: int) -> None:
    """A head whose products are all negative changes no score, however large they are."""
    s = setting(1, tokens, 3)
    s["pool"], s["context"] = np.abs(s["pool"]), np.abs(s["context"])
    s["queries"][:, :, 0] = -np.abs(s["queries"][:, :, 0])
    small = run(s, backend)
    s["queries"][:, :, 0] *= 1000
    np.testing.assert_array_equal(small, run(s, backend))
    s["weights"][:, :, 0] = 0
    np.testing.assert_allclose(small, run(s, backend), atol=1e-6)


@pytest.mark.parametrize("backend", PORTABLE)
@pytest.mark.parametrize("tokens", [1, 20])
def test_zero_has_one_sign(backend: str, tokens: int) -> None:
    """A negative weight times a ReLU's zero is -0.0, which `top_k` would rank below 0.0."""
    s = setting(2, tokens, 3)
    s["weights"], s["pool"] = -np.abs(s["weights"]), np.abs(s["pool"])
    s["queries"] = -np.abs(s["queries"])
    got = run(s, backend)
    seen = np.isfinite(got)
    assert seen.any()
    assert (got[seen] == 0).all()
    assert not np.signbit(got[seen]).any()


def test_scores_of_nan_are_never_finite() -> None:
    """A NaN inside of what may be seen is not chosen either."""
    for backend in PORTABLE:
        s = setting(1, 20, 3)
        s["pool"][1, s["table"][0, 0], 2] = np.nan
        got = run(s, backend)
        assert (got[0, s["positions"][0] >= 2, 2] == -np.inf).all()
        assert not np.isnan(got).any()


@pytest.mark.parametrize("block", [1, 3, 7, 8])
def test_blocks_of_tokens(block: int) -> None:
    parts = {"a": jnp.arange(14.0).reshape(2, 7), "b": jnp.arange(42.0).reshape(2, 7, 3)}
    got = map_tokens(lambda p: {"sum": p["a"][..., None] + p["b"], "a": p["a"]}, parts, block)
    np.testing.assert_array_equal(got["sum"], parts["a"][..., None] + parts["b"])
    np.testing.assert_array_equal(got["a"], parts["a"])
