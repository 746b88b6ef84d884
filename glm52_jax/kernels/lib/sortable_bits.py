"""Scores as signed integers in the same order, which are compared bit for bit on every device.

Comparing floats would not do: a TPU takes numbers too small to be normal for zero, and a sort does not.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

NOT_CANDIDATE = -0x7F800000
"""Image of minus infinity and of NaN: what is never chosen."""

LOWEST = -(1 << 31)


def sortable_bits(scores: jax.Array) -> jax.Array:
    """int32 with the order of the float32 `scores`: zeros of both signs are one, NaN is minus infinity."""
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
    sortable = jnp.where(bits < 0, LOWEST - bits, bits)
    return jnp.where(scores != scores, NOT_CANDIDATE, sortable)


def from_sortable_bits(sortable: jax.Array) -> jax.Array:
    """The scores with that image, bit for bit but for zeros, which are positive."""
    return jax.lax.bitcast_convert_type(jnp.where(sortable < 0, LOWEST - sortable, sortable), jnp.float32)


def is_selected(scores: jax.Array, positions: jax.Array, last: jax.Array, last_position: jax.Array) -> jax.Array:
    """Whether something comes no later than the last one that is chosen: higher score first, then lower position.

    Args:
        scores, positions: to compare, of any shapes that go together.
        last, last_position: score (minus infinity if all are chosen) and position of the last one.
    """
    sortable, threshold = sortable_bits(scores), sortable_bits(last)
    return ((sortable > threshold) | ((sortable == threshold) & (positions <= last_position))) & (
        sortable > NOT_CANDIDATE
    )
