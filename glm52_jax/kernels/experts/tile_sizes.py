"""Sizes of the blocks of the experts' kernels, and what a call costs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from jax.experimental import pallas as pl

from glm52_jax.kernels import Target
from glm52_jax.kernels.block_matmul.product import Stack, values_of

TOKENS = 8
"""Their number is padded to a multiple of it: rows of a register."""

FEW = 64
"""Most tokens of the kernel for few of them."""

MOST_TOKENS = 4096
"""Of the kernels for many, whose blocks of the result hold them all."""


WINDOW_ROWS = 1024
"""Rows that are gathered at a time: what is there for them is moved whether they are rows or none."""

MOST_BACK = 1024
"""Of one part of the gradients, which hold every row that there could be."""


def split(target: Target, steps: int) -> tuple[int, int]:
    """Cores that share so many steps, and the steps of each."""
    cores = target.chip.cores_per_device if steps % target.chip.cores_per_device == 0 else 1
    return cores, steps // cores


def few(target: Target, gate_up: Stack) -> tuple[int, int, int]:
    """Of `few`: columns of the width in one step, cores that share the width, and steps of each."""
    width = values_of(gate_up).shape[-2]
    tile = next((tile for tile in (target.chip.mxu_width, 128) if width % tile == 0), width)
    return tile, *split(target, width // tile)


@dataclasses.dataclass(frozen=True)
class GroupedTileSizes:
    """Sizes of the kernels for many rows.

    Attributes:
        rows: of a tile.
        up: columns of the width in a step of the first kernel.
        down: columns of the result in a step of the second one.
        window: tiles whose rows are gathered at a time.
        dtype: of the hidden values.
    """

    rows: int
    up: int
    down: int
    window: int
    dtype: Any

    def within(self, tiles: int) -> GroupedTileSizes:
        """With a window of no more tiles than there can be."""
        return dataclasses.replace(self, window=min(self.window, tiles))


def grouped(target: Target, dtype: Any, gate_up: Stack, down: Stack) -> GroupedTileSizes:
    """For rows of a type."""
    _, _, _, width, embed = values_of(gate_up).shape
    rows = 64 if target.chip.mxu_width == 128 else 128
    return GroupedTileSizes(
        rows=rows,
        up=next((tile for tile in (256, 128) if width % tile == 0), width),
        down=next((tile for tile in (512, 256, 128) if embed % tile == 0), embed),
        window=max(1, WINDOW_ROWS // rows),
        dtype=dtype,
    )


def most_tiles(tokens: int, k: int, experts: int, rows: int) -> int:
    """How many tiles there can be."""
    assignments = tokens * min(k, experts)
    return assignments // rows + min(experts, assignments)


def cost(rows: int, experts: int, gate_up: Stack, down: Stack) -> pl.CostEstimate:
    """Of `rows` rows in all through `experts` experts."""
    _, _, _, width, embed = values_of(gate_up).shape
    weights = sum(
        leaf.dtype.itemsize * math.prod(leaf.shape[2:])
        for weight in (gate_up, down)
        for leaf in jax.tree.leaves(weight)
    )
    return pl.CostEstimate(
        flops=6 * rows * width * embed,
        bytes_accessed=experts * weights + rows * embed * 6,
        transcendentals=rows * width,
    )


def product_cost(rows: int, experts: int, weight: Stack) -> pl.CostEstimate:
    """Of one product of `rows` rows in all with the matrices of `experts` experts."""
    values = values_of(weight)
    size = math.prod(values.shape[2:])
    stored = sum(leaf.dtype.itemsize * math.prod(leaf.shape[2:]) for leaf in jax.tree.leaves(weight))
    out, inner = size // values.shape[-1], values.shape[-1]
    return pl.CostEstimate(
        flops=2 * rows * size, bytes_accessed=experts * stored + 2 * rows * (inner + out), transcendentals=0
    )


def plain_cost(rows: int, out: int, inner: int, experts: int) -> pl.CostEstimate:
    """Of the product of rows with, or for, plain matrices `[out, in]` of two bytes."""
    return pl.CostEstimate(
        flops=2 * rows * out * inner,
        bytes_accessed=2 * experts * out * inner + rows * (2 * inner + 4 * out),
        transcendentals=0,
    )
