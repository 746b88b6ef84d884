"""Masked attention on the CPU: one head's block of queries after another, against the positions that it may see.

A block's scores stay in the processor's cache, and positions past its last query are not read, so that the cost follows
the text and not the capacity of the cache.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from glm52_jax.kernels.lib.prefix import over_prefix
from glm52_jax.kernels.lib.products import einsum

_BLOCK = 256
_LOWEST = -1e30  # stands for minus infinity, of which two would differ by NaN


def masked_attention_blocked(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    scale: float,
) -> jax.Array:
    """See `api.masked_attention`."""
    batch, tokens, heads, _ = queries.shape
    rows = min(_BLOCK, tokens)
    pad = -tokens % rows
    q = jnp.pad(_by_head(queries * jnp.asarray(scale, queries.dtype)), ((0, 0), (0, 0), (0, pad), (0, 0)))
    k, v = _by_head(keys), _by_head(values)
    mask = jnp.pad(mask, ((0, 0), (0, pad), (0, 0)))
    positions = jnp.pad(positions, ((0, 0), (0, pad)), constant_values=-1)
    blocks = q.shape[2] // rows

    def block(number: jax.Array) -> jax.Array:
        row, start, head = number // (heads * blocks), number // heads % blocks * rows, number % heads
        q_block = _slice(q, (row, head, start), rows)

        def attend(length: int, q_block: jax.Array) -> jax.Array:
            seen = jax.lax.dynamic_slice(mask, (row, start, 0), (1, rows, length))[0]
            scores = einsum("sd,td->st", q_block, _slice(k, (row, head, 0), length), dtype=jnp.float32)
            scores = jnp.where(seen, scores, _LOWEST)
            top = jnp.max(scores, axis=-1, keepdims=True)
            weights = jnp.exp(scores - top)
            total = jnp.sum(weights, axis=-1, keepdims=True)
            v_block = _slice(v, (row, head, 0), length)
            out = einsum("st,tv->sv", weights.astype(v_block.dtype), v_block, dtype=jnp.float32)
            return jnp.where(top > _LOWEST, out / total, 0.0).astype(queries.dtype)

        last = jnp.max(jax.lax.dynamic_slice(positions, (row, start), (1, rows)))
        return over_prefix(last, keys.shape[1], _BLOCK, attend, q_block)

    out = jax.lax.map(block, jnp.arange(batch * blocks * heads))
    out = out.reshape(batch, blocks, heads, rows, -1)
    return jnp.moveaxis(out, 2, 3).reshape(batch, blocks * rows, heads, -1)[:, :tokens]


def _by_head(x: jax.Array) -> jax.Array:
    """`[batch, heads, tokens, dim]` from `[batch, tokens, heads, dim]`."""
    return jnp.moveaxis(x, 2, 1)


def _slice(x: jax.Array, start: tuple[jax.Array | int, ...], size: int) -> jax.Array:
    return jax.lax.dynamic_slice(x, (*start, 0), (1, 1, size, x.shape[-1]))[0, 0]
