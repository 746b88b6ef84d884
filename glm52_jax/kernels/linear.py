"""Products with a layer's weights: one matrix, and the MLP; codes that stay in their stack run by the kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from glm52_jax.kernels.block_matmul.api import block_matmul
from glm52_jax.kernels.lib.products import dense_linear
from glm52_jax.kernels.lib.stacks import layer_of
from glm52_jax.params.quantization import BlockQuantized, StackedWeight, Weight


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
    if isinstance(weight, StackedWeight):
        rows = x.reshape(-1, weight.stack.codes.shape[-1])
        product = block_matmul(rows, weight.stack, weight.index, backend=weight.backend, dtype=dtype)
        return product.reshape(*x.shape[: x.ndim - dims], *weight.rows)
    return dense_linear(x, weight, dims=dims, dtype=dtype)


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
        backend: see `layer_of`.
    """
    rest = layer_of(down, *index, backend=backend)
    if isinstance(rest, StackedWeight) and isinstance(gate_up, BlockQuantized):
        both = linear(x, StackedWeight.of(gate_up, index, backend), dtype=jnp.float32)  # by one kernel
        return _down(both[..., 0, :], both[..., 1, :], rest, x.dtype, dtype)
    return mlp(x, layer_of(gate_up, *index, 0), layer_of(gate_up, *index, 1), rest, dtype=dtype)


def mlp(x: jax.Array, gate: Weight, up: Weight, down: Weight, *, dtype: Any = None) -> jax.Array:
    """`down(silu(gate(x)) * up(x))`; `x` `[..., embed]`, `gate` and `up` `[width, embed]`, `down` `[embed, width]`."""
    return _down(linear(x, gate, dtype=jnp.float32), linear(x, up, dtype=jnp.float32), down, x.dtype, dtype)


def _down(gate: jax.Array, up: jax.Array, down: Weight, operand: Any, dtype: Any) -> jax.Array:
    return linear((jax.nn.silu(gate) * up).astype(operand), down, dtype=dtype)
