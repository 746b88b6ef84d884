"""The arithmetic every layer shares: products, norms, rotary embedding. It knows nothing of layers or caches.

Precision: norms, rotary tables and whatever decides a choice are float32. A product with a float32 operand runs at
HIGHEST precision, since a TPU would otherwise multiply it in bfloat16; low-precision operands accumulate in float32.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from glm52_jax.kernels import Target
from glm52_jax.quant import BlockQuantized, InStack, Weight, plain

Tree = TypeVar("Tree")


def take(stack: Tree, *index: Any, backend: str = "reference") -> Tree:
    """One layer (or the gate of one expert of one layer) of every array in `stack`; an index may be traced.

    All indices are taken in one slice: XLA does not join a slice of a slice, and would copy the larger one too.

    Args:
        backend: where it has a kernel for weights in codes, those stay in their stack, see `quant.InStack`.
    """

    def one(array: jax.Array) -> jax.Array:
        rest = array.shape[len(index) :]
        part = jax.lax.dynamic_slice(array, (*index, *[0] * len(rest)), (*[1] * len(index), *rest))
        return part.reshape(rest)

    def matrix(leaf: Any) -> Any:
        if isinstance(leaf, BlockQuantized) and Target.of(backend) is not None:
            return InStack.of(leaf, index, backend)
        return jax.tree.map(one, leaf)

    return jax.tree.map(matrix, stack, is_leaf=lambda leaf: isinstance(leaf, BlockQuantized))


def einsum(equation: str, x: jax.Array, weight: Weight, *, dtype: Any = None) -> jax.Array:
    """A product accumulated in float32; the result has `dtype`, by default that of `x`."""
    dtype = dtype or x.dtype
    weight = plain(weight, x.dtype)
    exact = jnp.float32 in (x.dtype, weight.dtype)
    return jnp.einsum(
        equation,
        x,
        weight,
        precision=jax.lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    ).astype(dtype)


def linear(x: jax.Array, weight: Weight, *, dims: int = 1, dtype: Any = None) -> jax.Array:
    """`x` times a weight in the published `[out, in]` orientation, as one plain matrix product.

    Args:
        x: `[..., *in]`.
        weight: `[*out, *in]`.
        dims: number of dimensions of `in`.
        dtype: of the result, by default that of `x`.

    Returns:
        `[..., *out]`. A product over several dimensions at once would have the weight transposed first on the CPU.
    """
    lead = x.shape[: x.ndim - dims]
    if isinstance(weight, InStack):
        from glm52_jax.kernels.block_matmul.api import block_matmul

        rows = x.reshape(-1, weight.stack.codes.shape[-1])
        product = block_matmul(rows, weight.stack, weight.index, backend=weight.backend, dtype=dtype)
        return product.reshape(*lead, *weight.rows)
    weight = plain(weight, x.dtype)
    out, inner = weight.shape[: weight.ndim - dims], weight.shape[weight.ndim - dims :]
    width = math.prod(inner)
    product = einsum("nk,mk->nm", x.reshape(-1, width), weight.reshape(-1, width), dtype=dtype)
    return product.reshape(*lead, *out)


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


def swiglu(
    x: jax.Array, gate_up: Weight, down: Weight, *index: Any, dtype: Any = None, backend: str = "reference"
) -> jax.Array:
    """`down(silu(gate(x)) * up(x))` with one layer's or one expert's weights out of stacks.

    Args:
        x: `[..., embed]`.
        gate_up: stack `[..., 2, width, embed]`.
        down: stack `[..., embed, width]`.
        index: which MLP of the stacks, an index for each of their leading dimensions.
        dtype: of the result, by default that of `x`.
        backend: see `take`.
    """
    rest = take(down, *index, backend=backend)
    if isinstance(rest, InStack) and isinstance(gate_up, BlockQuantized):
        both = linear(x, InStack.of(gate_up, index, backend), dtype=jnp.float32)  # by one kernel
        return _down(both[..., 0, :], both[..., 1, :], rest, x.dtype, dtype)
    return mlp(x, take(gate_up, *index, 0), take(gate_up, *index, 1), rest, dtype=dtype)


def mlp(x: jax.Array, gate: Weight, up: Weight, down: Weight, *, dtype: Any = None) -> jax.Array:
    """`down(silu(gate(x)) * up(x))`; `x` `[..., embed]`, `gate` and `up` `[width, embed]`, `down` `[embed, width]`."""
    return _down(linear(x, gate, dtype=jnp.float32), linear(x, up, dtype=jnp.float32), down, x.dtype, dtype)


def _down(gate: jax.Array, up: jax.Array, down: Weight, operand: Any, dtype: Any) -> jax.Array:
    return linear((jax.nn.silu(gate) * up).astype(operand), down, dtype=dtype)


def hadamard(x: jax.Array) -> jax.Array:
    """The last dimension, a power of two, turned by the normalised Hadamard matrix, its own inverse; float32."""
    return linear(x.astype(jnp.float32), hadamard_matrix(x.shape[-1]))


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
