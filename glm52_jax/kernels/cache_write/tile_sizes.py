"""How much of a cache write one step of the kernel takes, and what the whole costs."""

from __future__ import annotations

import dataclasses
import math

from jax.experimental import pallas as pl

from glm52_jax.kernels.lib.pallas import SUBLANES
from sharding.compiler.chips import Chip


@dataclasses.dataclass(frozen=True)
class CacheWriteTileSizes:
    """Sizes of one grid step.

    Attributes:
        sequences: whole sequences, where their tokens are few.
        tokens: columns of one sequence otherwise (`sequences` is 1 then).
        rows: rows of a page that are read and written together: one tile of the cache's layout, which no copy may cut,
            or several for a long run, of which most are new altogether.
    """

    sequences: int
    tokens: int
    rows: int

    @property
    def touched(self) -> int:
        """Groups of rows that a run of `tokens` positions can touch, wherever it begins."""
        return (self.tokens + self.rows - 2) // self.rows + 1


_TOKENS = 512
"""Rows of a step: some megabytes with their buffers, in any of the types."""

_LARGEST_TILE = 64


def choose(chip: Chip, batch: int, tokens: int, page_size: int) -> CacheWriteTileSizes:
    """Blocks for writing `tokens` tokens of each of `batch` sequences.

    Steps of whole sequences may run on different cores, so each core gets one where there are several.
    """
    rows = math.gcd(page_size, _LARGEST_TILE if tokens >= _LARGEST_TILE else SUBLANES)
    if tokens > _TOKENS:
        return CacheWriteTileSizes(1, _TOKENS, rows)
    share = -(-batch // chip.cores_per_device)
    # Each sequence touches at least one group of rows.
    return CacheWriteTileSizes(max(1, min(share, _TOKENS // max(tokens, rows))), tokens, rows)


def cost(
    batch: int, tokens: int, width: int, value_bytes: int, row_bytes: int, blocks: CacheWriteTileSizes
) -> pl.CostEstimate:
    """Values are read, the rows that are touched read and written; some ten operations a value make a row."""
    count = batch * tokens
    # A short run lies in one tile, a long one fills all but the first and the last, which are read before.
    written = batch * max(tokens, blocks.rows)
    read = batch * blocks.rows * (2 if tokens > blocks.rows else 1)
    return pl.CostEstimate(
        flops=10 * count * width,
        bytes_accessed=count * width * value_bytes + (written + read) * row_bytes,
        transcendentals=count,
    )
