"""Plain exact selection by `lax.top_k`, which prefers the lower position among equals."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def topk_indices_reference(scores: jax.Array, k: int) -> jax.Array:
    """See `api.topk_indices`."""
    values, indices = jax.lax.top_k(scores, k)
    return jnp.where(values == -jnp.inf, -1, indices)


def topk_mask_reference(scores: jax.Array, k: int) -> jax.Array:
    """See `api.topk_mask`."""
    indices = topk_indices_reference(scores, k)
    flat = indices.reshape(-1, k)
    positions = scores.shape[-1]
    # One extra column takes the -1 entries.
    marked = jnp.zeros((flat.shape[0], positions + 1), jnp.bool_)
    marked = marked.at[jnp.arange(flat.shape[0])[:, None], jnp.where(flat < 0, positions, flat)].set(True)
    return marked[:, :positions].reshape(scores.shape)
