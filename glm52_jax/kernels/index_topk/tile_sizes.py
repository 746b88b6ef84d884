"""How the fused kernel is cut into blocks, when it is used, and what it costs."""

from __future__ import annotations

import dataclasses
import math

from jax.experimental import pallas as pl

from glm52_jax.kernels import Target
from glm52_jax.kernels.lib.pallas import LANES, SUBLANES, vmem_limit
from glm52_jax.kernels.topk import tile_sizes as selection
from glm52_jax.kernels.topk.tile_sizes import round_up


@dataclasses.dataclass(frozen=True)
class IndexTopkTileSizes:
    """Sizes of the fused kernel.

    Attributes:
        selection: of the selection; a chunk of it is a block of keys.
        keys: of a part of a block, which is waited for at a time.
        part: of them, in one product.
        cores: that share the sequences.
    """

    selection: selection.TopkTileSizes
    keys: int
    part: int
    cores: int

    @property
    def block(self) -> int:
        """Keys of a block: one is read while another is scored, and while the best of a sequence are selected."""
        return self.selection.chunk

    @property
    def parts(self) -> int:
        return self.block // self.keys


_READ_AHEAD = 16 << 20
"""Bytes of a block: reading them takes about as long as a selection, which then holds up nothing."""

_KEYS, _PART = 8192, 2048


def choose(
    target: Target, batch: int, tokens: int, capacity: int, page_size: int, key_bytes: int, k: int
) -> IndexTopkTileSizes | None:
    """Sizes for a chip and shapes; None where the two kernels one after the other are better.

    They are with more than eight tokens a sequence, whose products bind and whose scores are too many to keep; with
    fewer sequences than cores, of which only the two kernels use both; and where scores and keys do not fit.

    Args:
        key_bytes: of a stored key.
        k: how many are chosen.
    """
    cores = min(target.chip.cores_per_device, batch)
    if tokens > SUBLANES or (cores < target.chip.cores_per_device and not target.interpret):
        return None
    rows = 1 << (tokens - 1).bit_length()
    interpret = bool(target.interpret)
    unit = math.lcm(selection.unit_of(capacity, interpret=interpret), page_size)
    fits = vmem_limit(target)
    keys = math.lcm(page_size, LANES) if interpret else math.lcm(page_size, _KEYS)
    unit = math.lcm(unit, keys)
    block = round_up(min(capacity, max(1, _READ_AHEAD // key_bytes)), unit)
    while block > unit and vmem_bytes(rows, capacity, block, key_bytes, k) > fits:
        block = round_up(block // 2, unit)
    if vmem_bytes(rows, capacity, block, key_bytes, k) > fits:
        return None
    # Blocks of equal size.
    block = round_up(-(-capacity // -(-capacity // block)), unit)
    sizes = selection.choose(rows, capacity, k, interpret=interpret, chunk=block)
    return IndexTopkTileSizes(sizes, keys, keys if interpret else math.gcd(keys, _PART), cores)


def vmem_bytes(rows: int, capacity: int, block: int, key_bytes: int, k: int) -> int:
    """Vector memory that the kernel needs: two blocks of keys, a block of scores, and what the selection works in.

    That is every score once, a quarter of that at most as candidates, and of the row that is listed a word for every
    run of 128, in tiles: starts, lengths, distances and rows.
    """
    positions = round_up(capacity, block)
    score_bytes = 4 * rows * positions * 5 // 4 + positions * (4 + 2 + 1 + 1) + 4 * rows * block
    lists = 4 * 2 * 3 * rows * round_up(k, SUBLANES * LANES)
    return 2 * block * key_bytes + score_bytes + lists + (2 << 20)


def cost(
    batch: int, tokens: int, heads: int, dim: int, capacity: int, k: int, *, key_bytes: int, query_bytes: int
) -> pl.CostEstimate:
    """Operations and bytes of a call whose sequences are full: those of the scores, and a comparison a score.

    Args:
        key_bytes: of a stored key, its scale included.
        query_bytes: of one value of a query.
    """
    scores = batch * tokens * capacity
    read = batch * capacity * key_bytes + batch * tokens * heads * (dim * query_bytes + 4)
    return pl.CostEstimate(
        flops=scores * (heads * (2 * dim + 3) + 1), transcendentals=0, bytes_accessed=read + batch * tokens * k * 8
    )
