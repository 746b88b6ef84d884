"""Products with a weight, accumulated in float32."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from glm52_jax.params.quantization import Weight, dequantized


def einsum(equation: str, x: jax.Array, weight: Weight, *, dtype: Any = None) -> jax.Array:
    """A product accumulated in float32; the result has `dtype`, by default that of `x`."""
    dtype = dtype or x.dtype
    weight = dequantized(weight, x.dtype)
    exact = jnp.float32 in (x.dtype, weight.dtype)
    return jnp.einsum(
        equation,
        x,
        weight,
        precision=jax.lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    ).astype(dtype)


def dense_linear(x: jax.Array, weight: Weight, *, dims: int = 1, dtype: Any = None) -> jax.Array:
    """`x` times a weight in the published `[out, in]` orientation, as one product of matrices.

    Args:
        x: `[..., *in]`.
        weight: `[*out, *in]`.
        dims: Number of dimensions of `in`.
        dtype: Dtype of the result, by default that of `x`.

    Returns:
        `[..., *out]`. A product over several dimensions at once would have the weight transposed first on the CPU.
    """
    lead = x.shape[: x.ndim - dims]
    weight = dequantized(weight, x.dtype)
    out, inner = weight.shape[: weight.ndim - dims], weight.shape[weight.ndim - dims :]
    width = math.prod(inner)
    product = einsum("nk,mk->nm", x.reshape(-1, width), weight.reshape(-1, width), dtype=dtype)
    return product.reshape(*lead, *out)
