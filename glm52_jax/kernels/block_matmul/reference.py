"""The plain product: the layer's matrix dequantised, then multiplied."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from glm52_jax.kernels.block_matmul.product import Stack
from glm52_jax.kernels.lib.products import dense_linear
from glm52_jax.kernels.lib.stacks import layer_of
from glm52_jax.params.quantization import BlockQuantized


def block_matmul_reference(x: jax.Array, weight: Stack, layer: jax.Array | int, *, dtype: Any) -> jax.Array:
    """See `api.block_matmul`."""
    if isinstance(weight, BlockQuantized):
        weight = dataclasses.replace(weight, logical_shape=weight.codes.shape[-2:], row_dims=1)
    return dense_linear(x, layer_of(weight, layer), dtype=dtype)
