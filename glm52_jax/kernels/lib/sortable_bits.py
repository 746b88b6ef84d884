"""Scores as signed integers in the same order, which are compared bit for bit on every device.

Comparing floats would not do: a TPU takes numbers too small to be normal for zero, and a sort does not.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

NONE = -0x7F800000
"""Image of minus infinity and of NaN: what is never chosen."""

LOWEST = -(1 << 31)


def image_of(scores: jax.Array) -> jax.Array:
    """int32 with the order of the float32 `scores`: zeros of both signs are one, NaN is minus infinity."""
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
    image = jnp.where(bits < 0, LOWEST - bits, bits)
    return jnp.where(scores != scores, NONE, image)


def scores_of(image: jax.Array) -> jax.Array:
    """The scores with that image, bit for bit but for zeros, which are positive."""
    return jax.lax.bitcast_convert_type(jnp.where(image < 0, LOWEST - image, image), jnp.float32)


def is_chosen(scores: jax.Array, positions: jax.Array, last: jax.Array, last_position: jax.Array) -> jax.Array:
    """Whether something comes no later than the last one that is chosen: higher score first, then lower position.

    Args:
        scores, positions: to compare, of any shapes that go together.
        last, last_position: score (minus infinity if all are chosen) and position of the last one.
    """
    image, edge = image_of(scores), image_of(last)
    return ((image > edge) | ((image == edge) & (positions <= last_position))) & (image > NONE)
