"""Plain index scores: block of queries by block of queries, so that `[heads, tokens, capacity]` never exists whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from glm52_jax.cache.pages import context_rows
from glm52_jax.cache.row_formats import RowStack

# Values of one block's [queries, heads, capacity] product.
_BLOCK_VALUES = 1 << 23


def index_scores_reference(
    queries: jax.Array,
    head_weights: jax.Array,
    keys: RowStack,
    indexer: jax.Array | int,
    page_table: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    """See `api.index_scores`."""
    batch, tokens, heads, _ = queries.shape
    context = context_rows(keys, indexer, page_table, jnp.max(positions, axis=1) + 1).astype(jnp.float32)
    block = max(1, min(tokens, _BLOCK_VALUES // (batch * heads * context.shape[1])))

    def scores(part: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q, w, position = part
        dots = jnp.einsum("bshd,btd->bsht", q.astype(jnp.float32), context, precision=jax.lax.Precision.HIGHEST)
        return mask_scores(jnp.sum(w[..., None] * jax.nn.relu(dots), axis=2), position)

    return map_tokens(scores, (queries, head_weights, positions), block)


def mask_scores(scores: jax.Array, positions: jax.Array) -> jax.Array:
    """Minus infinity after each query's own position and for NaN, and +0.0 for -0.0.

    Args:
        scores: float32 `[..., tokens, capacity]`.
        positions: int32 `[..., tokens]`, -1 for padding.
    """
    seen = jnp.arange(scores.shape[-1]) <= positions[..., None]
    return jnp.where(seen & ~jnp.isnan(scores), scores + 0.0, -jnp.inf)


def map_tokens(function, parts, block: int):  # noqa: ANN001, ANN201
    """`function` over blocks of the token dimension (axis 1) of every array in `parts`, results joined there."""
    tokens = jax.tree.leaves(parts)[0].shape[1]
    if block >= tokens:
        return function(parts)
    count = -(-tokens // block)
    pad = count * block - tokens

    def split(array: jax.Array) -> jax.Array:
        array = jnp.pad(array, [(0, 0), (0, pad), *[(0, 0)] * (array.ndim - 2)])
        return jnp.moveaxis(array.reshape(array.shape[0], count, block, *array.shape[2:]), 1, 0)

    def join(array: jax.Array) -> jax.Array:
        array = jnp.moveaxis(array, 0, 1)
        return array.reshape(array.shape[0], count * block, *array.shape[3:])[:, :tokens]

    return jax.tree.map(join, jax.lax.map(function, jax.tree.map(split, parts)))
