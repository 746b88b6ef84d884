"""Masked attention on the CPU: tiles of one head's queries and keys with an online softmax, nothing past the diagonal.

A tile's scores stay in the processor's cache, and tiles of positions after the last query of a block are never run, so
that the cost follows the text and not the capacity of the cache.

Source: the online softmax of FlashAttention (arXiv 2205.14135).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from glm52_jax.primitives import einsum

_TILE = 128
_LOWEST = -1e30  # stands for minus infinity where a difference of two of them would be NaN


def masked_attention_tiled(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    scale: float,
) -> jax.Array:
    """See `api.masked_attention`."""
    batch, tokens, heads, _ = queries.shape
    rows, columns = min(_TILE, tokens), min(_TILE, keys.shape[1])
    q = _by_head(queries * jnp.asarray(scale, queries.dtype), rows)
    k, v = _by_head(keys, columns), _by_head(values, columns)
    blocks = q.shape[2] // rows
    mask = jnp.pad(mask, ((0, 0), (0, q.shape[2] - tokens), (0, k.shape[2] - keys.shape[1])))
    positions = jnp.pad(positions, ((0, 0), (0, q.shape[2] - tokens)), constant_values=-1)

    def block(number: jax.Array) -> jax.Array:
        row, head, start = number // (heads * blocks), number // blocks % heads, number % blocks * rows
        q_block = _slice(q, row, head, start, rows)
        last = jnp.max(jax.lax.dynamic_slice(positions, (row, start), (1, rows)))

        def tile(column: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            top, total, out = carry
            seen = jax.lax.dynamic_slice(mask, (row, start, column * columns), (1, rows, columns))[0]
            k_tile, v_tile = (_slice(x, row, head, column * columns, columns) for x in (k, v))
            scores = jnp.where(seen, einsum("sd,td->st", q_block, k_tile, dtype=jnp.float32), _LOWEST)
            new_top = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
            weights = jnp.where(seen, jnp.exp(scores - new_top), 0.0)
            shrink = jnp.exp(top - new_top)
            total = total * shrink + jnp.sum(weights, axis=-1, keepdims=True)
            added = einsum("st,tv->sv", weights.astype(v_tile.dtype), v_tile, dtype=jnp.float32)
            return new_top, total, out * shrink + added

        empty = jnp.full((rows, 1), _LOWEST), jnp.zeros((rows, 1)), jnp.zeros((rows, v.shape[-1]))
        _, total, out = jax.lax.fori_loop(0, -(-(last + 1) // columns), tile, empty)
        return (out / jnp.where(total > 0, total, 1.0)).astype(queries.dtype)

    out = jax.lax.map(block, jnp.arange(batch * heads * blocks))
    out = out.reshape(batch, heads, blocks * rows, -1)[:, :, :tokens]
    return jnp.moveaxis(out, 1, 2)


def _by_head(x: jax.Array, multiple: int) -> jax.Array:
    """`[batch, heads, tokens, dim]` from `[batch, tokens, heads, dim]`, padded to a multiple of tokens."""
    x = jnp.moveaxis(x, 2, 1)
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % multiple), (0, 0)))


def _slice(x: jax.Array, row: jax.Array, head: jax.Array, start: jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice(x, (row, head, start, 0), (1, 1, size, x.shape[-1]))[0, 0]
