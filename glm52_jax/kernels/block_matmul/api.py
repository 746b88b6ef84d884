"""Signature of the product of rows and one layer's matrix."""

from __future__ import annotations

from typing import Any

import jax

from glm52_jax.kernels import implementation
from glm52_jax.kernels.block_matmul.product import Stack
from glm52_jax.kernels.block_matmul.reference import block_matmul_reference

_IMPLEMENTATIONS = {"reference": block_matmul_reference, "tpu": "glm52_jax.kernels.block_matmul.tpu:block_matmul_tiled"}


def block_matmul(x: jax.Array, weight: Stack, layer: jax.Array | int, *, backend: str, dtype: Any = None) -> jax.Array:
    """`x` times a matrix in the published `[out, in]` orientation, accumulated in float32.

    Args:
        x: `[rows, in]`.
        weight: stack `[layers, ..., out, in]`, plain or in blocks; what is between are matrices of one layer side by
            side, gate and up for instance. The codes' own shape counts, not the `logical_shape` of them.
        layer: which layer of the stack.
        backend: see `kernels.resolve_backend`.
        dtype: of the result, by default that of `x`.

    Returns:
        `[rows, ..., out]`; a row does not depend on the other ones.
    """
    return implementation(_IMPLEMENTATIONS, backend)(x, weight, layer, dtype=dtype or x.dtype)
