"""Block sizes of the index scores' kernel, and what a call of it costs."""

from __future__ import annotations

import dataclasses
import math

from jax.experimental import pallas as pl

from glm52_jax.kernels import Target
from glm52_jax.kernels.lib.pallas import LANES, SUBLANES


@dataclasses.dataclass(frozen=True)
class IndexScoresTileSizes:
    """How the work is cut.

    Attributes:
        tokens: of a sequence for which a block of context is read once; all of the few of a decode step.
        together: of them, in one product with a part of a chunk.
        keys: of a chunk, which is waited for at a time.
        part: of them, in one product.
        chunks: of a block. While one block is scored, the next one is read, chunk by chunk.
        cores: that share the blocks in turn.
    """

    tokens: int
    together: int
    keys: int
    part: int
    chunks: int
    cores: int

    @property
    def block(self) -> int:
        """Keys of a block."""
        return self.keys * self.chunks

    @property
    def groups(self) -> int:
        """Products that it takes for all tokens."""
        return self.tokens // self.together


_FEW = (SUBLANES, SUBLANES, 4096, 2048, 2)
_MANY = (128, 32, 1024, 1024, 1)
_SHORT = 1 << 16
"""Positions from which on a context of one or two tokens a step is long."""

_TUNED: dict[tuple[str, str], tuple[int, int, int, int, int]] = {
    # Where bytes bind, a short context is scored soonest after its last byte in small chunks.
    ("v5e", "short"): (SUBLANES, SUBLANES, 2048, 2048, 2),
    ("v5p", "short"): (SUBLANES, SUBLANES, 2048, 2048, 2),
    ("v6e", "short"): (SUBLANES, SUBLANES, 2048, 2048, 2),
    # Products of half the depth of these chips' units are short: more rows a product hide what it takes to start one.
    ("v6e", "prefill"): (128, 64, 1024, 1024, 1),
    ("tpu7x", "prefill"): (128, 64, 1024, 1024, 1),
}
"""The first five of `IndexScoresTileSizes` by chip and by "prefill", or "decode" or "short" for up to eight tokens."""

_INTERPRETED = (16, 8, 16, 8, 2)


def choose(
    target: Target, tokens: int, capacity: int, page_size: int, wanted: tuple[int, int, int, int, int] | None = None
) -> IndexScoresTileSizes:
    """The sizes for a chip and shapes, or those wanted as far as the shapes allow."""
    few = tokens <= SUBLANES
    kind = ("short" if capacity < _SHORT and tokens <= 2 else "decode") if few else "prefill"
    sizes = _TUNED.get((target.chip.name, kind), _FEW if few else _MANY)
    at_once, together, keys, part, chunks = wanted or (_INTERPRETED if target.interpret else sizes)
    if few:
        at_once = together = tokens
    else:
        # Tiles of equal size, of whole groups.
        tiles = -(-tokens // at_once)
        together = min(together, -(-tokens // SUBLANES) * SUBLANES)
        at_once = -(-tokens // (tiles * together)) * together
    unit = page_size if target.interpret else math.lcm(page_size, LANES)
    part = min(max(part // unit, 1), -(-capacity // unit)) * unit
    keys = max(min(keys, -(-capacity // part) * part) // part, 1) * part
    chunks = min(chunks, -(-capacity // keys))
    cores = target.chip.cores_per_device
    # Each core writes as many blocks of the scores as the other.
    while chunks > 1 and -(-capacity // (keys * chunks)) % cores:
        chunks -= 1
    if -(-capacity // (keys * chunks)) % cores:
        cores = 1
    return IndexScoresTileSizes(at_once, together, keys, part, chunks, cores)


def cost(
    batch: int, tokens: int, heads: int, dim: int, capacity: int, *, key_bytes: int, query_bytes: int
) -> pl.CostEstimate:
    """Operations and bytes of a call whose sequences are full.

    Args:
        key_bytes: of a stored key, its scale included.
        query_bytes: of one value of a query.
    """
    scores = batch * tokens * capacity
    read = batch * capacity * key_bytes + batch * tokens * heads * (dim * query_bytes + 4)
    # The product, and per head a ReLU, a multiplication and an addition.
    return pl.CostEstimate(flops=scores * heads * (2 * dim + 3), transcendentals=0, bytes_accessed=read + scores * 4)
