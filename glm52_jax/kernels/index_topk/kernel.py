"""Body of the fused kernel: blocks of keys are scored as they arrive, and after the last one the best are listed."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from glm52_jax.kernels.index_scores.score_block import score_block
from glm52_jax.kernels.index_topk.tile_sizes import IndexTopkTileSizes
from glm52_jax.kernels.lib.pallas import LANES, SUBLANES
from glm52_jax.kernels.lib.sortable_bits import NOT_CANDIDATE, sortable_bits
from glm52_jax.kernels.topk import compaction, threshold_search


@dataclasses.dataclass(frozen=True)
class IndexTopkCall:
    """What the kernel is made for.

    Attributes:
        batch: sequences, as many for each core.
    """

    blocks: IndexTopkTileSizes
    batch: int
    tokens: int
    heads: int
    page_size: int

    @property
    def turns(self) -> int:
        """Sequences of one core."""
        return self.batch // self.blocks.cores

    @property
    def steps(self) -> int:
        """Blocks of a sequence."""
        return self.blocks.selection.positions // self.blocks.block

    @property
    def pages(self) -> int:
        """Of a sequence, whole blocks of them."""
        return self.blocks.selection.positions // self.page_size

    def sequence(self, core: Any, turn: Any) -> Any:
        """That a core has in its turn."""
        return turn * self.blocks.cores + core


def kernel(table, newest, q, w, seen, *refs, shape: IndexTopkCall, parts: int):  # noqa: ANN001, ANN002, ANN201
    """One block of one sequence.

    Args:
        table: the pages of each sequence, numbered through all layers.
        newest: position of the newest token of each sequence.
        seen: int32 `[1, 8, 128]`, the newest position that each place of a register may have.
        refs: stacks of pages, indices and values, a buffer for each stack, a semaphore a part, the half that is scored,
            the scores of a block, all images, the candidates, the threshold, and what the lists are made in.
        parts: arrays that a key is stored in.
    """
    stacks, (indices, values), buffers = refs[:parts], refs[parts : parts + 2], refs[parts + 2 : 2 * parts + 2]
    arrived, half_ref, scores, sortable, kept, threshold, *scratch = refs[2 * parts + 2 :]
    blocks, sizes = shape.blocks, shape.blocks.selection
    core, turn, step = (pl.program_id(axis) for axis in range(3))
    sequence = shape.sequence(core, turn)
    stream = _Stream(shape, table, stacks, buffers, arrived)
    last = newest[sequence]

    def next_turn(turn: jax.Array) -> jax.Array:
        """The first turn from this one on whose sequence has tokens, or the number of turns."""

        def empty(turn: jax.Array) -> jax.Array:
            return (turn < shape.turns) & (newest[shape.sequence(core, jnp.minimum(turn, shape.turns - 1))] < 0)

        return jax.lax.while_loop(empty, lambda turn: turn + 1, turn)

    @pl.when((turn == 0) & (step == 0))
    def _start() -> None:
        half_ref[0] = 0
        first = next_turn(turn)

        @pl.when(first < shape.turns)
        def _() -> None:
            of = shape.sequence(core, first)

            def read(part: jax.Array, _: None) -> None:
                pl.when(part * blocks.keys <= newest[of])(lambda: stream.read(0, part, of, 0))

            jax.lax.fori_loop(0, blocks.parts, read, None)

    @pl.when(step * blocks.block <= last)
    def _score() -> None:
        half = half_ref[0]
        stays = (step + 1) * blocks.block <= last
        then_turn = jax.lax.cond(stays, lambda: turn, lambda: next_turn(turn + 1))
        then_step = jnp.where(stays, step + 1, 0)
        then = shape.sequence(core, jnp.minimum(then_turn, shape.turns - 1))
        then_last = jnp.where(then_turn < shape.turns, newest[then], -1)

        def part(number: jax.Array, _: None) -> None:
            here = step * blocks.block + number * blocks.keys <= last
            reads = then_step * blocks.block + number * blocks.keys <= then_last
            both = here & reads

            def score(read: bool) -> None:
                stream.wait(half, number)
                found = []
                for start in range(0, blocks.keys, blocks.part):
                    keys = stream.keys(half, number, start)
                    if read:
                        # Between loads and products, where starting copies shares their bundles.
                        stream.read(1 - half, number, then, then_step, start, blocks.part)
                    scales = keys[1] if parts > 1 else None
                    found.append(
                        score_block(q[0], w[0], keys[0], tokens=shape.tokens, heads=shape.heads, scales=scales)
                    )
                _lay_out(shape, scores, jnp.concatenate(found, axis=1), number)

            pl.when(both)(lambda: score(True))
            pl.when(here & ~both)(lambda: score(False))
            pl.when(reads & ~both)(lambda: stream.read(1 - half, number, then, then_step))

        jax.lax.fori_loop(0, blocks.parts, part, None)
        half_ref[0] = 1 - half
        of_register = threshold_search.position_in_register(sizes)
        may_see = seen[0]

        def load(index: jax.Array) -> jax.Array:
            position = of_register + (step * sizes.chunk_registers + index) * (SUBLANES // sizes.rows * LANES)
            return jnp.where(
                position <= may_see, sortable_bits(scores[threshold_search.register(index), :]), NOT_CANDIDATE
            )

        threshold_search.absorb(sizes, load, step, sortable, kept)

        @pl.when(~stays)
        def _() -> None:
            _select(shape, step + 1, sortable, kept, threshold, indices, values, scratch)

    @pl.when((step == 0) & (last < 0))
    def _nothing() -> None:
        compaction.write_nothing(indices, values)


def _select(
    shape: IndexTopkCall, used: Any, sortable: Any, kept: Any, threshold: Any, indices: Any, values: Any, scratch: Any
) -> None:
    """The lists of the sequence."""
    sizes = shape.blocks.selection
    first = threshold_search.position_in_register(sizes)
    threshold_search.find_threshold(
        sizes,
        sortable,
        kept,
        threshold,
        used,
        position_of=lambda i: first + i * (SUBLANES // sizes.rows * LANES),
        position_bits=(sizes.positions - 1).bit_length(),
    )
    compaction.write_lists(sizes, sortable, threshold, used, indices.at[0], values.at[0], scratch, shape.tokens)


def _lay_out(shape: IndexTopkCall, scores: Any, found: jax.Array, part: jax.Array) -> None:
    """Puts scores `[tokens, keys]` where the selection has them: runs of 128, of all rows one after the other."""
    rows, size = shape.blocks.selection.rows, shape.blocks.keys
    first = part * (size // LANES * rows)
    for run in range(size // LANES):
        at = pl.ds(first + run * rows, shape.tokens)
        scores[at, :] = found[:, run * LANES : (run + 1) * LANES]


@dataclasses.dataclass(frozen=True)
class _Stream:
    """The copies of pages into one half of the buffers or the other."""

    shape: IndexTopkCall
    table: Any
    stacks: Any
    buffers: Any
    arrived: Any

    def read(self, half: Any, part: Any, sequence: Any, block: Any, start: int = 0, keys: int | None = None) -> None:
        """Starts to read a part of a block, or so many of its keys."""
        blocks, size = self.shape.blocks, self.shape.page_size
        first = sequence * self.shape.pages + (block * blocks.parts + part) * (blocks.keys // size)

        def copy(number: Any, _: None) -> None:
            page = self.table[first + number]
            for stack, buffer in zip(self.stacks, self.buffers, strict=True):
                at = number * size
                to = buffer.at[half, part, pl.ds(at if isinstance(at, int) else pl.multiple_of(at, size), size)]
                pltpu.make_async_copy(stack.at[page], to, self.arrived.at[half, part]).start()

        pages = range(start // size, (start + (keys or blocks.keys)) // size)
        if len(pages) > blocks.selection.unroll:
            threshold_search.unrolled(len(pages), lambda i, _: copy(pages[0] + i, None), None, blocks.selection.unroll)
        else:
            for number in pages:
                copy(number, None)

    def wait(self, half: Any, part: Any) -> None:
        """Waits for all pages of a part."""
        for buffer in self.buffers:
            whole = buffer.at[half, part]
            pltpu.make_async_copy(whole, whole, self.arrived.at[half, part]).wait()

    def keys(self, half: Any, part: Any, start: int) -> tuple[jax.Array, ...]:
        """Some keys of a part, and what has their scales."""
        return tuple(buffer[half, part, pl.ds(start, self.shape.blocks.part)] for buffer in self.buffers)
