"""Selection by bisection: count the scores above a threshold, bit by bit of its integer image. No sort.

Thirty-two counting passes find the k-th best score exactly; scores equal to it are then taken in order of position.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from glm52_jax.kernels.index_scores.reference import map_tokens
from glm52_jax.kernels.lib.sortable_bits import NOT_CANDIDATE, sortable_bits

_BLOCK_VALUES = 1 << 18


def ordered_bits(scores: jax.Array) -> jax.Array:
    """uint32 image of float32 scores with the same order; zeros of both signs are one, NaN is minus infinity."""
    return jax.lax.bitcast_convert_type(sortable_bits(scores), jnp.uint32) ^ jnp.uint32(1 << 31)


def topk_mask_bisect(scores: jax.Array, k: int) -> jax.Array:
    """See `api.topk_mask`."""
    positions = scores.shape[-1]
    if k >= positions:
        return sortable_bits(scores) > NOT_CANDIDATE
    flat = scores.reshape(1, -1, positions)
    # The passes over a block of rows find it in the processor's cache.
    chosen = map_tokens(lambda block: _bisect(block[0], k)[None], flat, max(1, _BLOCK_VALUES // positions))
    return chosen.reshape(scores.shape)


def _bisect(scores: jax.Array, k: int) -> jax.Array:
    sortable = ordered_bits(scores)
    lowest = ordered_bits(jnp.float32(-jnp.inf))

    def refine(bit: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold | (jnp.uint32(1) << (31 - bit).astype(jnp.uint32))
        enough = jnp.sum(sortable >= candidate[..., None], axis=-1, dtype=jnp.int32) >= k
        return jnp.where(enough, candidate, threshold)

    # The largest threshold that still leaves k scores at or above it: the k-th best score.
    threshold = jax.lax.fori_loop(0, 32, refine, jnp.zeros(scores.shape[:-1], jnp.uint32))[..., None]
    threshold = jnp.maximum(threshold, lowest + 1)  # with fewer than k scores to choose from, all of them
    chosen = sortable >= threshold

    def cut_ties(chosen: jax.Array) -> jax.Array:
        above = sortable > threshold
        room = k - jnp.sum(above, axis=-1, dtype=jnp.int32, keepdims=True)
        return above | (chosen & (jnp.cumsum(chosen & ~above, axis=-1, dtype=jnp.int32) <= room))

    # Ties at the threshold are rare, and ordering them costs as much as finding it.
    tied = jnp.any(jnp.sum(chosen, axis=-1, dtype=jnp.int32) > k)
    return jax.lax.cond(tied, cut_ties, lambda chosen: chosen, chosen)
