"""Codes and scales: weights with a scale a block of rows and columns, rows with a scale a group of values.

Here is the arithmetic and the array type of weights. Which weights are stored so is the parameter table's business, and
what a cache's row is made of that of `row_formats`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

Array = TypeVar("Array", jax.Array, np.ndarray)

FLOAT8 = jnp.float8_e4m3fn
_LARGEST = {jnp.dtype(FLOAT8): 448.0, jnp.dtype(jnp.int8): 127.0}
_LEAST_GROUP = 1e-4  # the largest value of a group is taken for no less, as the published engines do

# float32: value = mantissa * 2 ** (exponent - bias); 448 = 1.75 * 2 ** 8. Adding the carry to the bits of a value moves
# those with a mantissa above 1.75 to the next exponent.
_MANTISSA_BITS, _BIAS, _EXPONENT_OF_LARGEST = 23, 127, 8
_CARRY = (1 << _MANTISSA_BITS) - 1 - int(0.75 * (1 << _MANTISSA_BITS))


@flax.struct.dataclass
class BlockQuantized:
    """A stack of matrices in codes with a float32 scale a block; `codes * scale` is the weight.

    Attributes:
        codes: float8_e4m3fn or int8 `[..., out, in]`.
        scales: float32 `[..., ceil(out / rows), ceil(in / columns)]`; the last block of a dimension may be cut.
        view: shape of one whole matrix as the model computes with it, a reshape of `[out, in]`. Where the codes are one
            device's part of it, the first dimension of the rows or of the columns is as much smaller.
        block: (rows, columns) of a block.
        row_dims: how many dimensions of `logical_shape` are the rows.
    """

    codes: jax.Array
    scales: jax.Array
    logical_shape: tuple[int, ...] = flax.struct.field(pytree_node=False)
    block: tuple[int, int] = flax.struct.field(pytree_node=False, default=(128, 128))
    row_dims: int = flax.struct.field(pytree_node=False, default=1)

    @property
    def matrix(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Dimensions of the rows and of the columns of one matrix that is held here, as the model computes with it."""
        rows, columns = self.logical_shape[: self.row_dims], self.logical_shape[self.row_dims :]
        held = self.codes.shape[-2] // math.prod(rows[1:]), self.codes.shape[-1] // math.prod(columns[1:])
        return (held[0], *rows[1:]), (held[1], *columns[1:])

    def dequantize(self, dtype: jnp.dtype) -> jax.Array:
        """The plain weights `[..., *logical_shape]` in `dtype`, rounded once from the float32 product."""
        weights = dequantize_blocks(self.codes, self.scales, self.block).astype(dtype)
        rows, columns = self.matrix
        return weights.reshape(*self.codes.shape[:-2], *rows, *columns)


@flax.struct.dataclass
class StackedWeight:
    """A matrix of a stack in codes that stays there, for a kernel that reads it where it is.

    Attributes:
        stack: codes `[matrices, ..., out, in]`.
        index: int32, which of them; with others side by side where there are more dimensions.
        backend: of the kernel, see `kernels.resolve_backend`.
    """

    stack: BlockQuantized
    index: jax.Array
    backend: str = flax.struct.field(pytree_node=False)

    @classmethod
    def of(cls, stack: BlockQuantized, index: tuple[Any, ...], backend: str) -> StackedWeight:
        """What is at `index` of the first dimensions of the codes; matrices of further ones are side by side."""
        number = jnp.int32(0)
        for place, size in zip(index, stack.codes.shape, strict=False):
            number = number * size + place

        def flat(array: jax.Array) -> jax.Array:
            return array.reshape(-1, *array.shape[len(index) :])

        return cls(dataclasses.replace(stack, codes=flat(stack.codes), scales=flat(stack.scales)), number, backend)

    @property
    def rows(self) -> tuple[int, ...]:
        """Of a product's result: matrices side by side, then their rows."""
        return (*self.stack.codes.shape[1:-2], *self.stack.matrix[0])


Weight = jax.Array | BlockQuantized | StackedWeight


def dequantized(weight: Weight, dtype: jnp.dtype) -> jax.Array:
    """A weight to multiply with: quantised ones become `dtype`, plain ones stay as they are."""
    if isinstance(weight, StackedWeight):
        weight = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, weight.index, keepdims=False), weight.stack)
    return weight.dequantize(dtype) if isinstance(weight, BlockQuantized) else weight


def dequantize_blocks(codes: Array, scales: Array, block: tuple[int, int]) -> Array:
    """float32 `[..., out, in]` from codes and block scales; works on numpy arrays too."""
    xp: Any = np if isinstance(codes, np.ndarray) else jnp
    rows, columns = codes.shape[-2:]
    spread = xp.repeat(xp.repeat(scales, block[0], axis=-2)[..., :rows, :], block[1], axis=-1)[..., :columns]
    return codes.astype(xp.float32) * spread


def quantize_blocks(weights: np.ndarray, block: tuple[int, int], codes: Any = FLOAT8) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of weights, each block scaled so that its largest value gets the largest code.

    The scale of a block of zeros is the smallest that keeps the division finite, as the published files have it.

    Args:
        weights: float32 `[out, in]`.
        codes: their type, float8_e4m3fn (the largest is 448) or int8 (127; -128 is not used).
    """
    rows, columns = weights.shape
    grid = -(-rows // block[0]), -(-columns // block[1])
    padded = np.zeros((grid[0] * block[0], grid[1] * block[1]), np.float32)
    padded[:rows, :columns] = weights
    blocks = padded.reshape(grid[0], block[0], grid[1], block[1])
    largest = np.float32(_LARGEST[jnp.dtype(codes)])
    scales = np.maximum(np.abs(blocks).max(axis=(1, 3)), 1e-12).astype(np.float32) / largest
    scaled = blocks / scales[:, None, :, None]
    if jnp.dtype(codes) == jnp.int8:
        np.clip(np.rint(scaled, out=scaled), -largest, largest, out=scaled)
    return scaled.astype(codes).reshape(padded.shape)[:rows, :columns], scales


def quantize_groups(values: jax.Array, group: int) -> tuple[jax.Array, jax.Array]:
    """float8_e4m3fn codes `[..., n]` and float32 scales `[..., ceil(n / group)]` of rows, a scale a group of values.

    Scales are powers of two, so that decoding is exact in bfloat16 too: the least one that keeps the group's largest
    value within 448, at least `2 ** -22`.

    Source: the FP8 latent rows of FlashMLA and vLLM ("fp8_ds_mla").
    """
    groups = _grouped(values.astype(jnp.float32), group)
    scales, inverse = group_scales(jnp.max(jnp.abs(groups), axis=-1))
    codes = to_float8(groups * inverse[..., None])
    return codes.reshape(*values.shape[:-1], -1)[..., : values.shape[-1]], scales


def group_scales(most: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The scale of groups whose largest value is `most`, and one over it, as `quantize_groups` wants them; float32.

    448 is 1.75 times a power of two, so the exponent of the scale follows from that of `most`, one higher where its
    mantissa is above 1.75: read from the bits, since a logarithm may round a power of two away.
    """
    most = jnp.maximum(most, _LEAST_GROUP)
    bits = jax.lax.bitcast_convert_type(most, jnp.int32)
    exponent = ((bits + _CARRY) >> _MANTISSA_BITS) - _EXPONENT_OF_LARGEST
    scales = jax.lax.bitcast_convert_type(exponent << _MANTISSA_BITS, jnp.float32)
    inverse = jax.lax.bitcast_convert_type((2 * _BIAS - exponent) << _MANTISSA_BITS, jnp.float32)
    # What is not finite stays so.
    finite = jnp.abs(most) < jnp.inf
    return jnp.where(finite, scales, most), jnp.where(finite, inverse, jnp.nan)


def dequantize_groups(codes: jax.Array, scales: jax.Array, group: int) -> jax.Array:
    """float32 `[..., n]` from codes `[..., n]` and scales `[..., ceil(n / group)]`."""
    spread = jnp.repeat(scales, group, axis=-1)[..., : codes.shape[-1]]
    return codes.astype(jnp.float32) * spread


def to_float8(values: jax.Array) -> jax.Array:
    """float8_e4m3fn of float32 values; what is beyond its range becomes 448, which a plain cast would make NaN."""
    return clamp_to_float8(values).astype(FLOAT8)


def clamp_to_float8(values: jax.Array) -> jax.Array:
    """float32 values within the range of float8_e4m3fn; a cast rounds them and changes nothing else."""
    largest = _LARGEST[jnp.dtype(FLOAT8)]
    return jnp.clip(values, -largest, largest)


def _grouped(values: jax.Array, group: int) -> jax.Array:
    """`[..., groups, group]`, zeros after the last value."""
    pad = -values.shape[-1] % group
    padded = jnp.pad(values, [*[(0, 0)] * (values.ndim - 1), (0, pad)])
    return padded.reshape(*values.shape[:-1], -1, group)
