"""Plain exact selection by `lax.top_k`, which prefers the lower position among equals."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from glm52_jax.kernels.lib.sortable_bits import from_sortable_bits, sortable_bits


def topk_reference(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """See `api.topk`."""
    values, indices = jax.lax.top_k(from_sortable_bits(sortable_bits(scores)), k)
    return jnp.where(values == -jnp.inf, -1, indices), values


def topk_indices_reference(scores: jax.Array, k: int) -> jax.Array:
    """See `api.topk_indices`."""
    return topk_reference(scores, k)[0]


def topk_mask_reference(scores: jax.Array, k: int) -> jax.Array:
    """See `api.topk_mask`."""
    indices = topk_indices_reference(scores, k)
    flat = indices.reshape(-1, k)
    positions = scores.shape[-1]
    # One extra column takes the -1 entries.
    marked = jnp.zeros((flat.shape[0], positions + 1), jnp.bool_)
    marked = marked.at[jnp.arange(flat.shape[0])[:, None], jnp.where(flat < 0, positions, flat)].set(True)
    return marked[:, :positions].reshape(scores.shape)


def kth_best_reference(scores: jax.Array, positions: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """See `api.kth_best`."""
    if k > scores.shape[-1]:
        return jnp.full(scores.shape[:-1], -jnp.inf), jnp.full(scores.shape[:-1], -1, jnp.int32)
    # A stable sort of what is in order of position already would do; this sorts by both.
    ranked, places = jax.lax.sort((-from_sortable_bits(sortable_bits(scores)), positions), num_keys=2)
    return -ranked[..., k - 1], places[..., k - 1]
