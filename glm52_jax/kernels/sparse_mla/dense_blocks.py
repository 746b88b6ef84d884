"""Block sizes and cost of the dense form of sparse MLA."""

from __future__ import annotations

import dataclasses

from jax.experimental import pallas as pl

from glm52_jax.kernels import Target


@dataclasses.dataclass(frozen=True)
class DenseBlocks:
    """Sizes of the kernel `dense_mla`.

    Attributes:
        queries: of a tile, which reads each row of the context once.
        keys: rows of the context that are read together, in whole pages.
        rows: (queries x heads) that are multiplied together.
        chunk: keys that are multiplied together.
    """

    queries: int
    keys: int
    rows: int
    chunk: int


_ROWS = 512  # of a tile
_KEYS = 1024


def choose(target: Target, tokens: int, heads: int) -> DenseBlocks:
    """The sizes for a chunk of so many tokens."""
    tiles = -(-tokens // max(1, min(tokens, _ROWS // heads)))
    return DenseBlocks(-(-tokens // tiles), _KEYS, 256, 512)


def cost(
    batch: int, tokens: int, heads: int, context: int, width: int, rank: int, row_bytes: float, itemsize: int = 2
) -> pl.CostEstimate:
    """Of queries that attend to all of a context of so many positions.

    Args:
        width: of a row and a query, without padding.
        row_bytes: of a row as the cache stores it.
        itemsize: bytes of a value of the queries.
    """
    pairs = batch * tokens * heads * context
    queries = batch * tokens * heads * (width + rank) * itemsize + batch * tokens * heads * 4
    return pl.CostEstimate(
        flops=2 * pairs * (width + rank),
        transcendentals=pairs,
        bytes_accessed=int(batch * context * row_bytes + queries + batch * tokens * context),
    )
