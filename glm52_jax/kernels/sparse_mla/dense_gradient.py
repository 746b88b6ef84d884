"""Gradient of dense sparse MLA, from its results: the weights are computed once more, some queries at a time.

Plain XLA: in training the expanded form of attention is what is differentiated; this one is for those who train through
a cache.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from glm52_jax.cache.pages import context_rows
from glm52_jax.cache.row_formats import RowStack
from glm52_jax.kernels.lib.products import einsum

_BLOCK_VALUES = 1 << 26  # of the scores that exist at a time


def dense_gradient(
    queries: jax.Array,
    latent: RowStack,
    layer: jax.Array | int,
    page_table: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    scale: float,
    kv_lora_rank: int,
    results: tuple[jax.Array, jax.Array],
    cotangents: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, Any]:
    """Cotangents of the queries and of the stack of rows.

    Args:
        queries, latent, layer, page_table, positions, mask, scale, kv_lora_rank: as `dense.dense_mla` takes them.
        results: what it gave for them.
        cotangents: of the results.
    """
    lengths = jnp.max(positions, axis=1) + 1
    context, pull = jax.vjp(lambda stack: context_rows(stack, layer, page_table, lengths), latent)
    rows = context.astype(queries.dtype)
    (out, lse), (d_out, d_lse) = results, cotangents
    # The gradient of a score is its weight times what its product differs from this.
    mean = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - d_lse
    attends = jnp.any(mask, axis=-1)[..., None, None]
    parts = (jnp.where(attends, queries, 0), mask, jnp.where(jnp.isfinite(lse), lse, 0.0), mean, d_out)
    batch, tokens, heads, width = queries.shape
    block = max(1, min(tokens, _BLOCK_VALUES // (batch * heads * rows.shape[1])))

    def step(d_rows: jax.Array, part: Any) -> tuple[jax.Array, jax.Array]:
        q, seen, top, middle, d = part
        seen = seen[:, :, None]
        scores = einsum("bshw,btw->bsht", q, rows, dtype=jnp.float32) * scale
        weights = jnp.where(seen, jnp.exp(scores - top[..., None]), 0.0)
        products = einsum("bshr,btr->bsht", d, rows[..., :kv_lora_rank], dtype=jnp.float32)
        d_scores = jnp.where(seen, weights * (products - middle[..., None]) * scale, 0.0).astype(q.dtype)
        d_values = einsum("bsht,bshr->btr", weights.astype(q.dtype), d, dtype=jnp.float32)
        d_rows = d_rows + einsum("bsht,bshw->btw", d_scores, q, dtype=jnp.float32)
        return d_rows.at[..., :kv_lora_rank].add(d_values), einsum("bsht,btw->bshw", d_scores, rows)

    count = -(-tokens // block)

    def split(array: jax.Array) -> jax.Array:
        array = jnp.pad(array, [(0, 0), (0, count * block - tokens), *[(0, 0)] * (array.ndim - 2)])
        return jnp.moveaxis(array.reshape(batch, count, block, *array.shape[2:]), 1, 0)

    short = rows.shape[-1] - width
    parts = (jnp.pad(parts[0], [(0, 0)] * 3 + [(0, short)]), *parts[1:])
    d_rows, d_queries = jax.lax.scan(step, jnp.zeros(rows.shape, jnp.float32), jax.tree.map(split, parts))
    d_queries = jnp.moveaxis(d_queries, 0, 1).reshape(batch, count * block, heads, -1)[:, :tokens, :, :width]
    return d_queries, pull(d_rows.astype(context.dtype))[0]
