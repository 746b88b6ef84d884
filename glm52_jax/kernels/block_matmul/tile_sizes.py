"""Sizes of the blocks of `block_matmul`, and what a call costs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from glm52_jax.kernels import Target
from glm52_jax.kernels.block_matmul.product import Stack, values_of
from glm52_jax.kernels.lib.pallas import vmem_limit

_STEP_BYTES = 1 << 20
"""Of weights in a step, about: the first step's arrival is not hidden, and each step costs some time by itself."""


@dataclasses.dataclass(frozen=True)
class BlockMatmulTileSizes:
    """Sizes.

    Attributes:
        rows: of `x` in a step; its number of rows is padded to a multiple.
        part: rows that are multiplied at once.
        out: rows of the weight in a step.
    """

    rows: int
    part: int
    out: int


def choose(target: Target, rows: int, weight: Stack, dtype: Any) -> BlockMatmulTileSizes:
    """For a product of so many rows whose operands have that dtype."""
    values = values_of(weight)
    out, inner = values.shape[-2:]
    size = jnp.dtype(dtype).itemsize
    height = min(-(-rows // 16) * 16, 256)
    group = target.chip.mxu_width
    step = max(group, _STEP_BYTES // (inner * values.dtype.itemsize) // group * group)
    wanted = step if height <= 128 else 512
    # What is double-buffered: weights, rows and results.
    while wanted > group and 2 * (wanted * inner * values.dtype.itemsize + height * (inner * size + wanted * 4)) > (
        vmem_limit(target) * 3 // 4
    ):
        wanted //= 2
    part = 64 if height % 64 == 0 and group == 128 else min(height, 128) if height % 128 == 0 else height
    return BlockMatmulTileSizes(height, part, wanted if out > wanted else out)


def cost(rows: int, weight: Stack, dtype: Any, result: Any) -> pl.CostEstimate:
    """Operations as the reference counts them, and bytes that must move: the matrix, the rows, the result."""
    values = values_of(weight)
    pieces, (out, inner) = math.prod(values.shape[1:-2]), values.shape[-2:]
    stored = sum(leaf.dtype.itemsize * math.prod(leaf.shape[1:]) for leaf in jax.tree.leaves(weight))
    moved = rows * (inner * jnp.dtype(dtype).itemsize + pieces * out * jnp.dtype(result).itemsize)
    return pl.CostEstimate(flops=2 * rows * pieces * out * inner, bytes_accessed=stored + moved, transcendentals=0)
