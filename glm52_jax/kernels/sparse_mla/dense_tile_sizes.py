"""Block sizes and cost of the dense form of sparse MLA."""

from __future__ import annotations

import dataclasses
import math

from jax.experimental import pallas as pl

from glm52_jax.kernels import Target
from glm52_jax.kernels.lib.pallas import LANES


@dataclasses.dataclass(frozen=True)
class DenseTileSizes:
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
_PRODUCT = 256, 512  # rows and keys that are multiplied together
_KEYS = 1024
_FEW = 128  # rows of a tile up to which a wide matrix unit waits for its operands: longer products overlap more
_FEW_KEYS, _FEW_CHUNK = 2048, 1024
_SOME_ITEMS = 8  # fewer tiles do not hide the copy of the first block of each


def choose(target: Target, tokens: int, heads: int, batch: int = _SOME_ITEMS, room: int = 1 << 20) -> DenseTileSizes:
    """The sizes for a chunk of so many tokens of so many sequences, with room for `room` positions each."""
    tiles = -(-tokens // max(1, min(tokens, _ROWS // heads)))
    tile = -(-tokens // tiles)
    rows, chunk = _PRODUCT
    keys = _KEYS
    if tile * heads <= _FEW and target.chip.mxu_width > 128:
        keys, chunk = _FEW_KEYS, _FEW_CHUNK
    if batch * tiles < _SOME_ITEMS:
        while keys > 512 and 8 * keys > room:
            keys //= 2
    return DenseTileSizes(tile, keys, rows, min(chunk, keys))


def pages_of(target: Target, blocks: DenseTileSizes, table: int, page: int) -> int:
    """Pages of a block, for sequences of `table` pages of `page` rows.

    A block of the mask is cut out of rows of positions, which a TPU keeps in whole lanes: so compiled blocks are whole
    lanes too, and a short sequence's block may have more pages than the sequence.
    """
    unit = 1 if target.interpret else LANES // math.gcd(page, LANES)
    return max(min(blocks.keys // page // unit, -(-table // unit)), 1) * unit


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
