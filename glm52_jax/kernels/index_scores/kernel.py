"""The body of the index scores' kernel: pages streamed into one half of the buffers while the other half is scored."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from glm52_jax.kernels.index_scores.score_block import padded_heads, score_block
from glm52_jax.kernels.index_scores.tile_sizes import IndexScoresTileSizes


@dataclasses.dataclass(frozen=True)
class ScoresCall:
    """What the kernel is made for.

    Attributes:
        tiles: of tokens, per sequence.
        capacity: positions of a sequence.
        pages: in a row of the page table, whole blocks of them.
        dtype: that queries and keys are multiplied in.
    """

    blocks: IndexScoresTileSizes
    batch: int
    tiles: int
    heads: int
    capacity: int
    page_size: int
    pages: int
    dtype: Any

    @property
    def rows(self) -> int:
        """Tiles of all sequences."""
        return self.batch * self.tiles

    @property
    def steps(self) -> int:
        """Blocks of a row for each core."""
        return -(-self.capacity // (self.blocks.block * self.blocks.cores))


def kernel(table, newest, newest_of_group, q, w, positions, *refs, shape: ScoresCall, parts: int):  # noqa: ANN001, ANN002, ANN201
    """One block of context for one tile of tokens.

    A block, and each chunk of it, is read if it has a position that the tile's newest token sees. Which block comes
    after this one is found here, so that reading never pauses where a sequence ends before its capacity.

    Args:
        table: the pages of each sequence, numbered through all layers.
        newest, newest_of_group: position of the newest token of each tile, and of each group that is scored together.
        refs: stacks of pages, the scores, a buffer for each stack, a semaphore a chunk, and the half that is scored.
        parts: arrays that a key is stored in.
    """
    stacks, out, buffers = refs[:parts], refs[parts], refs[parts + 1 : 2 * parts + 1]
    arrived, turn = refs[2 * parts + 1 :]
    blocks = shape.blocks
    core, row, step = (pl.program_id(axis) for axis in range(3))
    block = step * blocks.cores + core
    stream = _Stream(shape, table, stacks, buffers, arrived)
    tile = _Tile(shape, row, newest_of_group, q, w, positions, out)

    def next_row(row: jax.Array) -> jax.Array:
        """The first row from this one on that needs this core's first block, or the number of rows."""

        def without(row: jax.Array) -> jax.Array:
            return (row < shape.rows) & (newest[jnp.minimum(row, shape.rows - 1)] < core * blocks.block)

        return jax.lax.while_loop(without, lambda row: row + 1, row)

    @pl.when((row == 0) & (step == 0))
    def _() -> None:
        turn[0] = 0
        first = next_row(row)

        def read(chunk: jax.Array, _: None) -> None:
            @pl.when(core * blocks.block + chunk * blocks.keys <= newest[first])
            def _() -> None:
                stream.read(0, chunk, first, core)

        @pl.when(first < shape.rows)
        def _() -> None:
            jax.lax.fori_loop(0, blocks.chunks, read, None)

    needed = block * blocks.block <= newest[row]

    @pl.when(needed)
    def _() -> None:
        half = turn[0]
        stays = (block + blocks.cores) * blocks.block <= newest[row]
        then_row = jax.lax.cond(stays, lambda: row, lambda: next_row(row + 1))
        then_block = jnp.where(stays, block + blocks.cores, core)
        then_newest = jnp.where(then_row < shape.rows, newest[jnp.minimum(then_row, shape.rows - 1)], -1)

        def chunk(number: jax.Array, _: None) -> None:
            start = block * blocks.block + number * blocks.keys
            here = start <= newest[row]
            then = then_block * blocks.block + number * blocks.keys <= then_newest
            read = functools.partial(stream.read, 1 - half, number, then_row, then_block)
            both = here & then & (blocks.groups == 1)

            if blocks.groups == 1:
                pl.when(both)(lambda: tile.score_and_read(stream, half, number, start, read))
            pl.when(then & ~both)(read)
            pl.when(here & ~both)(lambda: tile.score(stream, half, number, start))
            pl.when(~here)(lambda: tile.fill(number))

        jax.lax.fori_loop(0, blocks.chunks, chunk, None)
        turn[0] = 1 - half

    @pl.when(~needed)
    def _() -> None:
        jax.lax.fori_loop(0, blocks.chunks, lambda number, _: tile.fill(number), None)


@dataclasses.dataclass(frozen=True)
class _Stream:
    """The copies of pages into one half of the buffers or the other."""

    shape: ScoresCall
    table: Any
    stacks: Any
    buffers: Any
    arrived: Any

    def read(self, half: Any, chunk: Any, row: Any, block: Any, start: int = 0, keys: int | None = None) -> None:
        """Starts to read a chunk of a block, or so many of its keys."""
        blocks, size = self.shape.blocks, self.shape.page_size
        first = row // self.shape.tiles * self.shape.pages + (block * blocks.chunks + chunk) * (blocks.keys // size)
        for number in range(start // size, (start + (keys or blocks.keys)) // size):
            page = self.table[first + number]
            for stack, buffer in zip(self.stacks, self.buffers, strict=True):
                to = buffer.at[half, chunk, pl.ds(number * size, size)]
                pltpu.make_async_copy(stack.at[page], to, self.arrived.at[half, chunk]).start()

    def wait(self, half: Any, chunk: Any) -> None:
        """Waits for all pages of a chunk."""
        for buffer in self.buffers:
            whole = buffer.at[half, chunk]
            pltpu.make_async_copy(whole, whole, self.arrived.at[half, chunk]).wait()

    def part(self, half: Any, chunk: Any, start: Any) -> tuple[jax.Array, ...]:
        """Some keys of a chunk, and what has their scales."""
        return tuple(buffer[half, chunk, pl.ds(start, self.shape.blocks.part)] for buffer in self.buffers)


@dataclasses.dataclass(frozen=True)
class _Tile:
    """The tokens of a row, and where their scores go."""

    shape: ScoresCall
    row: Any
    newest: Any
    q: Any
    w: Any
    positions: Any
    out: Any

    def score_and_read(self, stream: _Stream, half: Any, chunk: Any, start: Any, read: Any) -> None:
        """Scores a chunk, and reads the same chunk of the next block.

        The compiler moves neither a load before the start of a copy nor a copy before a load. So the copies are started
        after the loads of a part, where they share their bundles with its products, and all is stored at the end.
        """
        blocks = self.shape.blocks
        stream.wait(half, chunk)
        found = []
        for offset in range(0, blocks.keys, blocks.part):
            part = stream.part(half, chunk, offset)
            read(offset, blocks.part)
            found.append(self._scores(part, start + offset, 0))
        self._store(jnp.concatenate(found, axis=1), chunk * blocks.keys, 0)

    def score(self, stream: _Stream, half: Any, chunk: Any, start: Any) -> None:
        """Scores a chunk, part by part and group by group of tokens."""
        blocks = self.shape.blocks
        stream.wait(half, chunk)

        def some(number: Any, _: None) -> None:
            group, offset = number % blocks.groups, number // blocks.groups * blocks.part
            place = chunk * blocks.keys + offset
            seen = start + offset <= self.newest[self.row * blocks.groups + group]

            @pl.when(seen)
            def _() -> None:
                self._store(self._scores(stream.part(half, chunk, offset), start + offset, group), place, group)

            @pl.when(~seen)
            def _() -> None:
                self._store(jnp.full((blocks.together, blocks.part), -jnp.inf, jnp.float32), place, group)

        jax.lax.fori_loop(0, blocks.keys // blocks.part * blocks.groups, some, None)

    def fill(self, chunk: Any) -> None:
        """Minus infinity for a chunk."""
        keys = self.shape.blocks.keys
        self.out[0, :, pl.ds(chunk * keys, keys)] = jnp.full((self.shape.blocks.tokens, keys), -jnp.inf, jnp.float32)

    def _scores(self, part: tuple[jax.Array, ...], start: Any, group: Any) -> jax.Array:
        """The masked scores of a group with some keys."""
        heads, tokens = self.shape.heads, self.shape.blocks.together
        high = padded_heads(heads) * tokens
        rows = pl.ds(pl.multiple_of(group * high, high), high)
        scales = part[1] if len(part) > 1 else None
        q = self.q[0, rows].astype(self.shape.dtype)
        scores = score_block(q, self.w[0, rows], part[0], tokens=tokens, heads=heads, scales=scales)
        place = start + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        seen = (place <= self.positions[0, pl.ds(group * tokens, tokens)]) & (scores == scores)  # NaN is not
        return jnp.where(seen, jnp.where(scores == 0, 0.0, scores), -jnp.inf)

    def _store(self, scores: jax.Array, place: Any, group: Any) -> None:
        self.out[0, pl.ds(group * scores.shape[0], scores.shape[0]), pl.ds(place, scores.shape[1])] = scores
