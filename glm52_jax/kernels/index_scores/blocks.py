"""Block sizes of the index scores' kernel, and what a call of it costs."""

from __future__ import annotations

import dataclasses
import math

from jax.experimental import pallas as pl

from glm52_jax.kernels import Target
from glm52_jax.kernels.pallas import LANES, SUBLANES


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How the work is cut.

    Attributes:
        tokens: of a sequence that are scored together; all of the few of a decode step.
        keys: of a chunk, which is read, waited for and multiplied at a time.
        chunks: of a block. While one block is scored, the next one is read, chunk by chunk.
        cores: that share the blocks in turn.
    """

    tokens: int
    keys: int
    chunks: int
    cores: int

    @property
    def block(self) -> int:
        """Keys of a block."""
        return self.keys * self.chunks


_TUNED: dict[tuple[str, str], tuple[int, int, int]] = {}
"""(tokens, keys, chunks) by chip and by "decode" or "prefill"."""


def choose(target: Target, batch: int, tokens: int, capacity: int, page_size: int) -> Blocks:
    """The sizes for a chip and shapes."""
    few = tokens <= SUBLANES
    at_once, keys, chunks = _TUNED.get((target.chip.name, "decode" if few else "prefill"), (64, 512, 4 if few else 2))
    if few:
        at_once = tokens
    at_once = min(at_once, -(-tokens // SUBLANES) * SUBLANES)
    if target.interpret:
        at_once, keys, chunks = min(at_once, 16), 32, 2
    unit = page_size if target.interpret else math.lcm(page_size, LANES)
    keys = max(keys // unit, 1) * unit
    chunks = min(chunks, -(-capacity // keys))
    cores = target.chip.cores_per_device
    while chunks > 1 and -(-capacity // (keys * chunks)) % cores:
        chunks -= 1
    if -(-capacity // (keys * chunks)) % cores:
        cores = 1
    return Blocks(at_once, keys, chunks, cores)


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
