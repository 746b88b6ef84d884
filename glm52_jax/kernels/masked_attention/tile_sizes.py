"""Block sizes and cost of masked attention on TPUs."""

from __future__ import annotations

import dataclasses

from jax.experimental import pallas as pl

from glm52_jax.kernels import Target


@dataclasses.dataclass(frozen=True)
class MaskedAttentionTileSizes:
    """Sizes of one step of a kernel.

    Attributes:
        queries, keys: positions of a block; a block in which no query attends to any key is skipped.
        heads: that share a block of the mask.
        rows: queries of one head that are multiplied together.
    """

    queries: int
    keys: int
    heads: int
    rows: int = 256


def choose(
    target: Target, tokens: int, positions: int, heads: int, *, backward: bool = False
) -> MaskedAttentionTileSizes:
    """The sizes for a chunk of so many tokens."""
    together = next(count for count in (4, 2, 1) if heads % count == 0)
    if backward:
        return MaskedAttentionTileSizes(min(512, tokens), min(512, positions), min(2, together))
    keys = 1024 if positions % 1024 == 0 else 512
    return MaskedAttentionTileSizes(min(512, tokens), min(keys, positions), together)


def cost(
    batch: int, tokens: int, positions: int, heads: int, width: int, value_width: int, itemsize: int = 2
) -> pl.CostEstimate:
    """Of queries that attend to all positions."""
    pairs = batch * tokens * positions * heads
    rows = batch * heads * (tokens + positions) * (width + value_width)
    return pl.CostEstimate(
        flops=2 * pairs * (width + value_width),
        transcendentals=pairs,
        bytes_accessed=rows * itemsize + batch * tokens * positions,
    )
