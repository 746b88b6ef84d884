"""The arithmetic every layer shares: products, norms, rotary embedding. It knows nothing of layers or caches.

Precision: norms, rotary tables and whatever decides a choice are float32. A product with a float32 operand runs at
HIGHEST precision, since a TPU would otherwise multiply it in bfloat16; low-precision operands accumulate in float32.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from glm52_jax.kernels.lib.products import dense_linear


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last dimension, in float32; the result has the dtype of `x`."""
    values = x.astype(jnp.float32)
    values = values * jax.lax.rsqrt(jnp.mean(jnp.square(values), -1, keepdims=True) + eps)
    return (values * scale.astype(jnp.float32)).astype(x.dtype)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """Layer norm over the last dimension, in float32; the result is float32."""
    values = x.astype(jnp.float32)
    values = values - jnp.mean(values, -1, keepdims=True)
    values = values * jax.lax.rsqrt(jnp.mean(jnp.square(values), -1, keepdims=True) + eps)
    return values * scale.astype(jnp.float32) + bias.astype(jnp.float32)


def hadamard(x: jax.Array) -> jax.Array:
    """The last dimension, a power of two, turned by the normalised Hadamard matrix, its own inverse; float32."""
    return dense_linear(x.astype(jnp.float32), hadamard_matrix(x.shape[-1]))


def hadamard_matrix(width: int) -> jax.Array:
    """float32 `[width, width]`, symmetric and orthogonal."""
    bits = np.arange(width)
    signs = 1 - 2 * (np.bitwise_count(bits[:, None] & bits) % 2).astype(np.float32)
    return jnp.asarray(signs * np.float32(width**-0.5))


@flax.struct.dataclass
class Rotary:
    """Cosines and sines of the rotary angles of some positions, float32 `[batch, tokens, pairs]`."""

    cos: jax.Array
    sin: jax.Array

    @classmethod
    def at(cls, positions: jax.Array, dim: int, theta: float) -> Rotary:
        """Tables for int32 positions `[batch, tokens]`: the angle of pair j is `position * theta ** (-2 j / dim)`.

        The frequencies are float64 until they are rounded once to float32, and positions are never low precision, so
        that angles at a million tokens are right to 0.01 rad.
        """
        frequency = np.power(float(theta), -np.arange(0, dim, 2, dtype=np.float64) / dim).astype(np.float32)
        angle = jnp.maximum(positions, 0).astype(jnp.float32)[..., None] * frequency
        return cls(jnp.cos(angle), jnp.sin(angle))

    def rotate(self, x: jax.Array, *, interleave: bool) -> jax.Array:
        """Rotates the last dimension of `x`, `[batch, tokens, dim]` or `[batch, tokens, heads, dim]`, in float32.

        Pairs are (2j, 2j + 1) with `interleave`, else (j, j + dim / 2); values stay where they were.
        """
        cos, sin = (t if x.ndim == 3 else t[:, :, None] for t in (self.cos, self.sin))
        values = x.astype(jnp.float32)
        if interleave:
            first, second = values[..., 0::2], values[..., 1::2]
        else:
            first, second = jnp.split(values, 2, axis=-1)
        rotated = first * cos - second * sin, second * cos + first * sin
        joined = jnp.stack(rotated, -1).reshape(x.shape) if interleave else jnp.concatenate(rotated, -1)
        return joined.astype(x.dtype)
