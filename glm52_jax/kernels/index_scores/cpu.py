"""Index scores on the CPU: one head after another, so that each product is one plain matrix product.

`[queries, capacity]` is added up head by head; the product of all heads, several times as large, would not stay in the
processor's cache.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from glm52_jax.cache import context_rows
from glm52_jax.kernels.index_scores.reference import index_scores_reference, mask_scores

_FEW_TOKENS = 16  # below this the products are so small that a loop costs more than it saves


def index_scores_by_head(
    queries: jax.Array,
    head_weights: jax.Array,
    keys: jax.Array,
    indexer: jax.Array | int,
    page_table: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    """See `api.index_scores`."""
    if queries.shape[1] < _FEW_TOKENS:
        return index_scores_reference(queries, head_weights, keys, indexer, page_table, positions)
    context = context_rows(keys, indexer, page_table, jnp.max(positions, axis=1) + 1).astype(jnp.float32)

    def one_sequence(part: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q, weights, rows, position = part  # [heads, tokens, dim], [heads, tokens], [capacity, dim], [tokens]

        def add(head: jax.Array, total: jax.Array) -> jax.Array:
            dots = jnp.einsum("sd,td->st", q[head], rows, precision=jax.lax.Precision.HIGHEST)
            return total + weights[head][:, None] * jax.nn.relu(dots)

        total = jnp.zeros((q.shape[1], rows.shape[0]), jnp.float32)
        return mask_scores(jax.lax.fori_loop(0, q.shape[0], add, total), position)

    by_head = jnp.moveaxis(queries, 2, 1).astype(jnp.float32), jnp.moveaxis(head_weights, 2, 1)
    return jax.lax.map(one_sequence, (*by_head, context, positions))
