"""Attention kernels: both forms of a selection, masked attention, rows that attend to nothing, slots that hold NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm52_jax.kernels import PORTABLE
from glm52_jax.kernels.lib.selection import Selection
from glm52_jax.kernels.masked_attention.api import masked_attention
from glm52_jax.kernels.sparse_mla.api import sparse_mla

RANK, WIDTH, HEADS, PAGE = 6, 10, 3, 4
SCALE = 0.3


def setting(tokens: int = 5, length: int = 11, batch: int = 2, seed: int = 0) -> dict:
    generator = np.random.default_rng(seed)
    pages = -(-length // PAGE)
    table = generator.permutation(batch * pages + 1)[: batch * pages].reshape(batch, pages).astype(np.int32)
    latent = generator.standard_normal((2, batch * pages + 1, PAGE, WIDTH)).astype(np.float32)
    positions = np.tile(length - tokens + np.arange(tokens, dtype=np.int32), (batch, 1))
    mask = generator.random((batch, tokens, pages * PAGE)) < 0.5
    mask &= np.arange(pages * PAGE) <= positions[..., None]
    return {
        "queries": generator.standard_normal((batch, tokens, HEADS, WIDTH)).astype(np.float32),
        "latent": latent,
        "table": table,
        "positions": positions,
        "mask": mask,
        "rows": latent[1][table].reshape(batch, pages * PAGE, WIDTH),
    }


def selection(mask: np.ndarray, form: str) -> Selection:
    if form == "mask":
        return Selection(mask=jnp.asarray(mask))
    listed = Selection(mask=jnp.asarray(mask)).sorted_indices(mask.shape[-1])
    return Selection(indices=jnp.flip(listed, -1))  # the order is free, and -1 may come first


def run(s: dict, form: str, backend: str = "cpu", queries: jax.Array | None = None, latent: jax.Array | None = None):
    return sparse_mla(
        s["queries"] if queries is None else queries,
        s["latent"] if latent is None else latent,
        1,
        s["table"],
        s["positions"],
        selection(s["mask"], form),
        SCALE,
        kv_lora_rank=RANK,
        backend=backend,
    )


def expected(s: dict) -> tuple[np.ndarray, np.ndarray]:
    scores = np.einsum("bshw,btw->bsht", s["queries"].astype(np.float64), s["rows"]) * SCALE
    weights = np.where(s["mask"][:, :, None], np.exp(scores), 0)
    total = weights.sum(-1)
    out = np.einsum("bsht,btr->bshr", weights, s["rows"][..., :RANK]) / np.where(total > 0, total, 1)[..., None]
    with np.errstate(divide="ignore"):
        return out, np.log(total)


@pytest.mark.parametrize("backend", PORTABLE)
@pytest.mark.parametrize("form", ["indices", "mask"])
def test_attention_to_the_selected_rows(form: str, backend: str) -> None:
    s = setting()
    s["mask"][0, 2] = s["mask"][1, 0] = False  # two queries attend to nothing
    out, lse = run(s, form, backend)
    expected_out, expected_lse = expected(s)
    np.testing.assert_allclose(out, expected_out, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)
    assert (np.asarray(out)[0, 2] == 0).all()
    assert (np.asarray(lse)[0, 2] == -np.inf).all()


@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("form", ["indices", "mask"])
def test_unused_entries_read_nothing(form: str, poison: float) -> None:
    """Rows that are never selected, where -1 might point included, change neither outputs nor gradients."""
    s = setting()
    s["mask"][0] = s["mask"][1] = False
    s["mask"][:, 1:, 3:5] = s["mask"][:, 3, 7] = True
    s["mask"] &= np.arange(s["mask"].shape[-1]) <= s["positions"][..., None]
    spoiled = s["latent"].copy()
    spoiled[0] = poison
    last = int(s["positions"].max()) + 1
    for page in range(spoiled.shape[1]):
        row, place = np.argwhere(s["table"] == page)[0] if (s["table"] == page).any() else (None, None)
        for offset in range(PAGE):
            position = -1 if place is None else place * PAGE + offset
            never = place is None or position >= last or (form == "indices" and not s["mask"][row, :, position].any())
            if never:
                spoiled[1, page, offset] = poison

    def loss(queries, latent):
        out, _ = run(s, form, queries=queries, latent=latent)
        return jnp.sum(jnp.sin(out))

    value = jax.value_and_grad(loss, argnums=(0, 1))
    clean, (clean_queries, clean_latent) = value(jnp.asarray(s["queries"]), jnp.asarray(s["latent"]))
    dirty, (dirty_queries, dirty_latent) = value(jnp.asarray(s["queries"]), jnp.asarray(spoiled))
    assert np.isfinite(dirty)
    np.testing.assert_allclose(dirty, clean, atol=1e-6)
    np.testing.assert_allclose(dirty_queries, clean_queries, atol=1e-6)
    np.testing.assert_allclose(dirty_latent, clean_latent, atol=1e-6)
    assert (np.asarray(dirty_latent)[~np.isfinite(spoiled)] == 0).all()
    assert np.abs(dirty_latent).max() > 0


@pytest.mark.parametrize("backend", PORTABLE)
@pytest.mark.parametrize(
    ("tokens", "length", "dtype"), [(5, 11, "float32"), (300, 400, "float32"), (20, 30, "bfloat16")]
)
def test_masked_attention(backend: str, tokens: int, length: int, dtype: str) -> None:
    """Chunks in more than one block, queries that attend to nothing, NaN queries of padding."""
    s = setting(tokens, length)
    generator = np.random.default_rng(1)
    room = s["mask"].shape[-1]
    q, k = (generator.standard_normal((2, n, HEADS, 8)).astype(np.float32) for n in (tokens, room))
    v = generator.standard_normal((2, room, HEADS, 4)).astype(np.float32)
    s["mask"][0, 2] = False
    s["mask"][1, 0], s["positions"][1, 0], q[1, 0] = False, -1, np.nan
    q, k, v = (jnp.asarray(a, dtype) for a in (q, k, v))
    got = jax.jit(lambda *a: masked_attention(*a, SCALE, backend=backend))(q, k, v, s["positions"], s["mask"])
    assert got.dtype == q.dtype
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    weights = np.where(s["mask"][:, None], np.exp(np.einsum("bshd,bthd->bhst", q, k) * SCALE), 0)
    total = weights.sum(-1, keepdims=True)
    plain = np.einsum("bhst,bthv->bshv", weights / np.where(total > 0, total, 1), v)
    got = np.array(got, np.float32)
    got[1, 0] = plain[1, 0] = 0  # a padding query's own output means nothing
    np.testing.assert_allclose(got, plain, atol=1e-5 if dtype == "float32" else 2e-2)
    assert (got[0, 2] == 0).all()
