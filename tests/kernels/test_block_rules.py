"""The sizes of blocks are legal for every number of pages and of tokens: arithmetic alone, nothing is compiled.

A compiled block's last dimension is whole lanes, or all of the array; `make grid` compiles what these rules give.
"""

import math
from collections.abc import Iterator

import jax.numpy as jnp
import pytest

from glm52_jax.cache.paged_cache import PAGE_SIZE
from glm52_jax.kernels import Target
from glm52_jax.kernels.cache_write import tile_sizes as cache_write
from glm52_jax.kernels.experts import tile_sizes as experts
from glm52_jax.kernels.index_scores import tile_sizes as index_scores
from glm52_jax.kernels.index_topk import tile_sizes as index_topk
from glm52_jax.kernels.lib.pallas import LANES, SUBLANES
from glm52_jax.kernels.masked_attention import tile_sizes as masked_attention
from glm52_jax.kernels.router import tile_sizes as router
from glm52_jax.kernels.sparse_mla import dense_tile_sizes
from glm52_jax.kernels.sparse_mla import tile_sizes as gathered
from glm52_jax.kernels.topk.tile_sizes import REGISTER, choose
from sharding.compiler.chips import CHIPS

TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 64, 100, 127, 512, 960, 1000, 4096)
TARGETS = [Target(chip) for chip in CHIPS.values()]
PAGES = [
    *range(1, 520),
    *(step * eighth + more for step in (64, 256, 2048) for eighth in range(5, 9) for more in (0, 1)),
]
"""Every number of pages of short contexts, and of long ones those that capacities are rounded to, and a page more."""


def shapes() -> Iterator[tuple[Target, int, int]]:
    for target in TARGETS:
        for tokens in TOKENS:
            for pages in PAGES:
                yield target, tokens, pages


@pytest.mark.parametrize("page", [PAGE_SIZE, 8, 48, 128, 256])
def test_dense_blocks_are_whole_lanes(page: int) -> None:
    """Of the mask, and of the pages that are read with it; a block is no longer than the sequence in whole lanes."""
    for target, tokens, table in shapes():
        if table > 64 and tokens not in (1, 512):
            continue
        for heads in (1, 8, 64):
            for batch in (1, 8):
                blocks = dense_tile_sizes.choose(target, tokens, heads, batch, page * table)
                pages = dense_tile_sizes.pages_of(target, blocks, table, page)
                assert pages * page % LANES == 0
                assert pages * page < table * page + math.lcm(page, LANES)
                assert pages * page <= max(blocks.keys, math.lcm(page, LANES))
                assert min(blocks.chunk, pages * page) % LANES == 0
                assert blocks.queries * heads <= max(512, heads)


def test_interpreted_blocks_are_whole_pages() -> None:
    blocks = dense_tile_sizes.DenseTileSizes(1, 8, 8, 8)
    for page in range(1, 12):
        for table in range(1, 12):
            assert dense_tile_sizes.pages_of(Target(CHIPS["v5p"], True), blocks, table, page) == max(
                1, min(8 // page, table)
            )


@pytest.mark.parametrize("page", [PAGE_SIZE, 48, 256])
def test_blocks_of_index_scores(page: int) -> None:
    for target, tokens, table in shapes():
        if table > 64 and tokens not in (1, 6, 512):
            continue
        capacity = table * page
        blocks = index_scores.choose(target, tokens, capacity, page)
        assert blocks.part % math.lcm(page, LANES) == 0
        assert blocks.keys % blocks.part == 0
        assert blocks.tokens % blocks.together == 0
        assert tokens <= SUBLANES or blocks.together % SUBLANES == 0
        steps = -(-capacity // (blocks.block * blocks.cores))
        assert steps * blocks.block * blocks.cores >= capacity
        # Each block of the scores has a place in the array: none begins behind it.
        assert (steps * blocks.cores - 1) * blocks.block < capacity


def test_blocks_of_index_topk() -> None:
    for target, tokens, table in shapes():
        capacity = table * PAGE_SIZE
        for batch in (1, 3, 64):
            for key_bytes in (256, 384, 512):
                blocks = index_topk.choose(target, batch, tokens, capacity, PAGE_SIZE, key_bytes, min(2048, capacity))
                if blocks is None:
                    # The two kernels one after the other; or what is kept would not fit.
                    two = tokens > SUBLANES or batch < target.chip.cores_per_device
                    assert two or 8 * capacity * 4 > target.chip.vmem_bytes // 4
                    continue
                assert blocks.block % blocks.keys == blocks.keys % blocks.part == 0
                assert blocks.part % math.lcm(PAGE_SIZE, LANES) == 0
                assert blocks.selection.positions % blocks.block == 0
                assert blocks.selection.positions >= capacity


def test_blocks_of_a_selection() -> None:
    for rows in (1, 2, 4, 8):
        for table in PAGES:
            for positions in {table * PAGE_SIZE, min(2048, table * PAGE_SIZE) * 16}:
                blocks = choose(rows, positions, min(2048, positions))
                assert blocks.chunk * rows % REGISTER == 0
                assert blocks.positions % blocks.chunk == 0
                assert positions <= blocks.positions < positions + blocks.chunk
                assert blocks.runs % blocks.group == 0
                assert not blocks.segment or blocks.chunk_registers % blocks.segment == 0


@pytest.mark.parametrize("unit", [1, 2, 4, 8])
def test_chunks_of_lists_are_whole_lanes(unit: int) -> None:
    for target in TARGETS:
        for parts in (1, 2):
            for entries in range(1, 2049):
                blocks = gathered.choose(target.chip, unit, parts, entries)
                assert blocks.chunk % LANES == blocks.chunk % blocks.piece == 0
                assert 0 < blocks.early < blocks.chunk


@pytest.mark.parametrize("page", [PAGE_SIZE, 8, 48])
def test_tiles_of_a_cache_write(page: int) -> None:
    for target in TARGETS:
        for tokens in range(1, 1100):
            for batch in (1, 2, 3, 64, 1000):
                blocks = cache_write.choose(target.chip, batch, tokens, page)
                assert page % blocks.rows == blocks.rows % SUBLANES == 0
                assert 0 < blocks.sequences * blocks.tokens <= 512
                # A run of so many positions that begins anywhere lies in the tiles that are looked at.
                assert all((first + blocks.tokens - 1) // blocks.rows < blocks.touched for first in range(blocks.rows))


def test_blocks_of_masked_attention() -> None:
    """What is cut into blocks is padded to whole ones; a block that is all of a dimension may have any size."""
    for target, tokens, table in shapes():
        blocks = masked_attention.choose(target, tokens, table * PAGE_SIZE, 64)
        for block, whole in ((blocks.queries, tokens), (blocks.keys, table * PAGE_SIZE)):
            assert block == whole or block % LANES == 0
        assert 64 % blocks.heads == 0


def test_steps_of_the_router_and_of_experts() -> None:
    for target in TARGETS:
        for tokens in range(1, 5000, 7):
            cores, steps = router.split(target, tokens)
            assert cores * steps * router.TOKENS >= tokens > (cores * steps - cores) * router.TOKENS - router.TOKENS
        for width in (64, 128, 256, 512, 1024, 2048):
            weight = jnp.zeros((1, 1, 2, width, 8), jnp.bfloat16)
            tile, cores, steps = experts.few(target, weight)
            assert tile * cores * steps == width
            assert tile == width or tile % LANES == 0
