"""Index scores on the CPU: one block of queries and one head after another, so that each product is a plain one.

A block's `[queries, positions]` is added up head by head in the processor's cache, over the positions that the block
may see; the product of all heads at once would be several times as large.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from glm52_jax.cache.pages import context_rows
from glm52_jax.cache.row_formats import RowStack
from glm52_jax.kernels.index_scores.reference import index_scores_reference, mask_scores
from glm52_jax.kernels.lib.prefix import over_prefix

_BLOCK = 256
_FEW_TOKENS = 16  # below this the products are so small that a loop costs more than it saves


def index_scores_blocked(
    queries: jax.Array,
    head_weights: jax.Array,
    keys: RowStack,
    indexer: jax.Array | int,
    page_table: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    """See `api.index_scores`."""
    batch, tokens, heads, dim = queries.shape
    if tokens < _FEW_TOKENS:
        return index_scores_reference(queries, head_weights, keys, indexer, page_table, positions)
    context = context_rows(keys, indexer, page_table, jnp.max(positions, axis=1) + 1).astype(jnp.float32)
    capacity = context.shape[1]
    rows = min(_BLOCK, tokens)
    pad = -tokens % rows
    q = jnp.pad(queries.astype(jnp.float32), ((0, 0), (0, pad), (0, 0), (0, 0)))
    weights = jnp.pad(head_weights, ((0, 0), (0, pad), (0, 0)))
    positions = jnp.pad(positions, ((0, 0), (0, pad)), constant_values=-1)
    blocks = q.shape[1] // rows

    def block(number: jax.Array) -> jax.Array:
        row, start = number // blocks, number % blocks * rows
        q_block = jax.lax.dynamic_slice(q, (row, start, 0, 0), (1, rows, heads, dim))[0]
        w_block = jax.lax.dynamic_slice(weights, (row, start, 0), (1, rows, heads))[0]
        position = jax.lax.dynamic_slice(positions, (row, start), (1, rows))[0]

        def score(length: int, q_block: jax.Array, w_block: jax.Array) -> jax.Array:
            k_block = jax.lax.dynamic_slice(context, (row, 0, 0), (1, length, dim))[0]
            by_head = jnp.moveaxis(q_block, 1, 0)

            def add(head: jax.Array, total: jax.Array) -> jax.Array:
                dots = jnp.einsum("sd,td->st", by_head[head], k_block, precision=jax.lax.Precision.HIGHEST)
                return total + w_block[:, head, None] * jax.nn.relu(dots)

            total = jax.lax.fori_loop(0, heads, add, jnp.zeros((rows, length), jnp.float32))
            scores = mask_scores(total, position)
            return jnp.pad(scores, ((0, 0), (0, capacity - length)), constant_values=-jnp.inf)

        return over_prefix(jnp.max(position), capacity, _BLOCK, score, q_block, w_block)

    out = jax.lax.map(block, jnp.arange(batch * blocks))
    return out.reshape(batch, blocks * rows, capacity)[:, :tokens]
