"""Codes and scales: weights stored in float8 with one scale a block of rows and columns.

Here is the arithmetic and the array type; which weights are stored so is the parameter table's business.
"""

from __future__ import annotations

from typing import Any, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

Array = TypeVar("Array", jax.Array, np.ndarray)

FLOAT8 = jnp.float8_e4m3fn
FLOAT8_MAX = 448.0


@flax.struct.dataclass
class BlockQuantized:
    """A stack of matrices in float8 with a float32 scale a block; `codes * scale` is the weight.

    Attributes:
        codes: float8_e4m3fn `[..., out, in]`.
        scales: float32 `[..., ceil(out / rows), ceil(in / columns)]`; the last block of a dimension may be cut.
        view: shape of one matrix as the model computes with it, a reshape of `[out, in]`.
        block: (rows, columns) of a block.
    """

    codes: jax.Array
    scales: jax.Array
    view: tuple[int, ...] = flax.struct.field(pytree_node=False)
    block: tuple[int, int] = flax.struct.field(pytree_node=False, default=(128, 128))

    def dequantize(self, dtype: jnp.dtype) -> jax.Array:
        """The plain weights `[..., *view]` in `dtype`, rounded once from the float32 product."""
        weights = dequantize_blocks(self.codes, self.scales, self.block).astype(dtype)
        return weights.reshape(*self.codes.shape[:-2], *self.view)


Weight = jax.Array | BlockQuantized


def plain(weight: Weight, dtype: jnp.dtype) -> jax.Array:
    """A weight to multiply with: quantised ones become `dtype`, plain ones stay as they are."""
    return weight.dequantize(dtype) if isinstance(weight, BlockQuantized) else weight


def dequantize_blocks(codes: Array, scales: Array, block: tuple[int, int]) -> Array:
    """float32 `[..., out, in]` from codes and block scales; works on numpy arrays too."""
    xp: Any = np if isinstance(codes, np.ndarray) else jnp
    rows, columns = codes.shape[-2:]
    spread = xp.repeat(xp.repeat(scales, block[0], axis=-2)[..., :rows, :], block[1], axis=-1)[..., :columns]
    return codes.astype(xp.float32) * spread


def quantize_blocks(weights: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of float32 weights `[out, in]`, each block scaled so that its largest value becomes 448.

    The scale of a block of zeros is the smallest that keeps the division finite, as the published files have it.
    """
    rows, columns = weights.shape
    grid = -(-rows // block[0]), -(-columns // block[1])
    padded = np.zeros((grid[0] * block[0], grid[1] * block[1]), np.float32)
    padded[:rows, :columns] = weights
    blocks = padded.reshape(grid[0], block[0], grid[1], block[1])
    scales = np.maximum(np.abs(blocks).max(axis=(1, 3)), 1e-12).astype(np.float32) / np.float32(FLOAT8_MAX)
    codes = (blocks / scales[:, None, :, None]).astype(FLOAT8)
    return codes.reshape(padded.shape)[:rows, :columns], scales
