"""Index scores on a TPU: pages of keys streamed through vector memory, scored against some of the tokens at a time.

A block of context is read, page by page, while the block before it is scored, whichever sequence that is of. Blocks are
dealt in turn to the cores of a chip, so that sequences of any lengths keep both busy. What is after the newest token of
those that are scored together is not read: its scores are written as minus infinity.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from glm52_jax.kernels import Target
from glm52_jax.kernels.index_scores.blocks import Blocks, choose, cost
from glm52_jax.kernels.index_scores.score_block import padded_heads, query_rows, score_block, weight_rows
from glm52_jax.kernels.pallas import LANES, SUBLANES, call
from glm52_jax.row_formats import GroupRows, PackedRows, RowStack, parts_of

_TABLE_ENTRIES = 1 << 17  # of page numbers in scalar memory, half of it


def operand_type(keys: RowStack) -> jnp.dtype:
    """What queries and keys are multiplied in: the type of plain keys, or that of the values beside codes."""
    if isinstance(keys, PackedRows):
        return jnp.dtype(keys.format.dtype)  # type: ignore[attr-defined]
    return jnp.dtype(keys.dtype)


def key_parts(keys: RowStack) -> tuple[jax.Array, ...]:
    """The arrays of a stack of keys: values, or codes and what has their scales in its first column."""
    parts = parts_of(keys)
    if isinstance(keys, PackedRows) and isinstance(keys.format, GroupRows):
        return parts["codes"], parts["tail"] if "tail" in parts else parts["scales"]
    return (parts["values"],)


def index_scores(
    queries: jax.Array,
    head_weights: jax.Array,
    keys: RowStack,
    indexer: jax.Array | int,
    page_table: jax.Array,
    positions: jax.Array,
    *,
    target: Target,
    blocks: Blocks | None = None,
) -> jax.Array:
    """See `api.index_scores`. Queries are rounded to bfloat16 where the keys are, or the values beside their codes;
    products are added up in float32, and nothing after them is rounded to less.
    """
    batch, tokens, heads, dim = queries.shape
    capacity = page_table.shape[1] * parts_of(keys)[next(iter(parts_of(keys)))].shape[2]
    if page_table.size > _TABLE_ENTRIES and batch > 1:
        # Page numbers of fewer sequences at a time fit into scalar memory.
        score = functools.partial(index_scores, target=target, blocks=blocks)
        return jax.lax.map(
            lambda row: score(*(part[None] for part in row[:2]), keys, indexer, *(part[None] for part in row[2:]))[0],
            (queries, head_weights, page_table, positions),
        )
    parts = key_parts(keys)
    page_size, width = parts[0].shape[2:]
    blocks = blocks or choose(target, batch, tokens, capacity, page_size)
    tiles = -(-tokens // blocks.tokens)
    short = tiles * blocks.tokens - tokens

    def tiled(values: jax.Array, fill: int = 0) -> jax.Array:
        padded = jnp.pad(values, [(0, 0), (0, short), *[(0, 0)] * (values.ndim - 2)], constant_values=fill)
        return padded.reshape(batch * tiles, blocks.tokens, *values.shape[2:])

    positions = tiled(jnp.minimum(positions, capacity - 1), -1)
    q = query_rows(tiled(queries), operand_type(keys), width)
    w = weight_rows(tiled(head_weights))
    pages = capacity // page_size
    whole = -(-capacity // blocks.block) * blocks.block // page_size
    # Pages of the whole stack, which a kernel can address with less arithmetic than pages of a layer.
    table = jnp.asarray(indexer, jnp.int32) * parts[0].shape[1] + jnp.clip(page_table, 0, parts[0].shape[1] - 1)
    table = jnp.pad(table, ((0, 0), (0, whole - pages)))
    shape = _Shape(blocks, batch, tiles, heads, capacity, page_size, whole)
    out = _call(shape, parts, target, cost_of(queries, parts, capacity))(
        table.reshape(-1),
        jnp.max(positions, axis=1),
        q,
        w,
        jnp.broadcast_to(positions[..., None], (*positions.shape, LANES)),
        *[part.reshape(-1, *part.shape[2:]) for part in parts],
    )
    return out.reshape(batch, tiles * blocks.tokens, capacity)[:, :tokens]


def cost_of(queries: jax.Array, parts: tuple[jax.Array, ...], capacity: int) -> pl.CostEstimate:
    """What a call costs."""
    return cost(
        *queries.shape,
        capacity,
        key_bytes=sum(part.shape[3] * part.dtype.itemsize for part in parts),
        query_bytes=2 if parts[0].dtype.itemsize < 4 else 4,
    )


@dataclasses.dataclass(frozen=True)
class _Shape:
    """What the kernel is made for.

    Attributes:
        tiles: of tokens, per sequence.
        capacity: positions of a sequence.
        pages: of a row of the page table, whole blocks of them.
    """

    blocks: Blocks
    batch: int
    tiles: int
    heads: int
    capacity: int
    page_size: int
    pages: int

    @property
    def rows(self) -> int:
        """Tiles of all sequences."""
        return self.batch * self.tiles

    @property
    def steps(self) -> int:
        """Blocks of a row for each core."""
        return -(-self.capacity // (self.blocks.block * self.blocks.cores))


def _call(shape: _Shape, parts: tuple[jax.Array, ...], target: Target, estimate: pl.CostEstimate) -> Any:
    blocks = shape.blocks
    rows = padded_heads(shape.heads) * blocks.tokens
    width = parts[0].shape[3]

    def row(height: int, width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, height, width), lambda core, row, step, *_: (row, 0, 0))

    buffers = [pltpu.VMEM((2, blocks.chunks, blocks.keys, part.shape[3]), part.dtype) for part in parts]
    return call(
        functools.partial(_kernel, shape=shape, parts=len(parts)),
        name="index_scores",
        target=target,
        cost=estimate,
        semantics=("parallel", "arbitrary", "arbitrary"),
        out_shape=jax.ShapeDtypeStruct((shape.rows, blocks.tokens, shape.capacity), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(blocks.cores, shape.rows, shape.steps),
            in_specs=[
                row(rows, width),
                row(rows, LANES),
                row(blocks.tokens, LANES),
                *[pl.BlockSpec(memory_space=pl.ANY)] * len(parts),
            ],
            out_specs=pl.BlockSpec(
                (1, blocks.tokens, blocks.block), lambda core, row, step, *_: (row, 0, step * blocks.cores + core)
            ),
            scratch_shapes=[
                *buffers,
                pltpu.SemaphoreType.DMA((2, blocks.chunks)),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
    )


def _kernel(table, newest, q, w, positions, *refs, shape: _Shape, parts: int):  # noqa: ANN001, ANN202
    """One block of one row."""
    stacks, out, buffers = refs[:parts], refs[parts], refs[parts + 1 : 2 * parts + 1]
    arrived, turn = refs[2 * parts + 1 :]
    blocks = shape.blocks
    core, row, step = (pl.program_id(axis) for axis in range(3))
    block = step * blocks.cores + core
    stream = _Stream(shape, table, stacks, buffers, arrived)

    def next_row(row: jax.Array) -> jax.Array:
        """The first row from this one on that needs this core's first block, or the number of rows."""

        def without(row: jax.Array) -> jax.Array:
            return (row < shape.rows) & (newest[jnp.minimum(row, shape.rows - 1)] < core * blocks.block)

        return jax.lax.while_loop(without, lambda row: row + 1, row)

    @pl.when((row == 0) & (step == 0))
    def _() -> None:
        turn[0] = 0
        first = next_row(row)

        @pl.when(first < shape.rows)
        def _() -> None:
            for chunk in range(blocks.chunks):

                @pl.when(core * blocks.block + chunk * blocks.keys <= newest[first])
                def _(chunk: int = chunk) -> None:
                    stream.read(first, core, chunk, 0)

    needed = block * blocks.block <= newest[row]

    @pl.when(needed)
    def _() -> None:
        slot = turn[0]
        stays = (block + blocks.cores) * blocks.block <= newest[row]
        then_row = jax.lax.cond(stays, lambda: row, lambda: next_row(row + 1))
        then_block = jnp.where(stays, block + blocks.cores, core)
        then_last = jnp.where(then_row < shape.rows, newest[jnp.minimum(then_row, shape.rows - 1)], -1)
        score = functools.partial(_score, q, w, positions, shape=shape)

        def whole(number: jax.Array, _: None) -> None:
            stream.wait(number, slot)
            score([buffer.at[slot, number] for buffer in buffers], out, number, block)
            stream.read(then_row, then_block, number, 1 - slot)

        def some(number: jax.Array, _: None) -> None:
            @pl.when(then_block * blocks.block + number * blocks.keys <= then_last)
            def _() -> None:
                stream.read(then_row, then_block, number, 1 - slot)

            here = block * blocks.block + number * blocks.keys <= newest[row]

            @pl.when(here)
            def _() -> None:
                stream.wait(number, slot)
                score([buffer.at[slot, number] for buffer in buffers], out, number, block)

            @pl.when(~here)
            def _() -> None:
                at = pl.ds(number * blocks.keys, blocks.keys)
                out[0, :, at] = jnp.full((blocks.tokens, blocks.keys), -jnp.inf, jnp.float32)

        # Without a condition inside, copies are started while the units for vectors are at work.
        last_chunk = blocks.block - blocks.keys
        full = (block * blocks.block + last_chunk <= newest[row]) & (then_block * blocks.block + last_chunk <= then_last)
        pl.when(full)(lambda: jax.lax.fori_loop(0, blocks.chunks, whole, None))
        pl.when(~full)(lambda: jax.lax.fori_loop(0, blocks.chunks, some, None))
        turn[0] = 1 - slot

    @pl.when(~needed)
    def _() -> None:
        out[...] = jnp.full(out.shape, -jnp.inf, jnp.float32)


@dataclasses.dataclass(frozen=True)
class _Stream:
    """The copies of pages into one of two buffers."""

    shape: _Shape
    table: Any
    stacks: Any
    buffers: Any
    arrived: Any

    def read(self, row: Any, block: Any, chunk: Any, slot: Any) -> None:
        """Starts to read a chunk."""
        blocks, pages = self.shape.blocks, self.shape.blocks.keys // self.shape.page_size
        first = row // self.shape.tiles * self.shape.pages + (block * blocks.chunks + chunk) * pages
        for number in range(pages):
            page = self.table[first + number]
            for stack, buffer in zip(self.stacks, self.buffers, strict=True):
                pltpu.make_async_copy(
                    stack.at[page],
                    buffer.at[slot, chunk, pl.ds(number * self.shape.page_size, self.shape.page_size)],
                    self.arrived.at[slot, chunk],
                ).start()

    def wait(self, chunk: Any, slot: Any) -> None:
        """Waits for all pages of a chunk."""
        for buffer in self.buffers:
            whole = buffer.at[slot, chunk]
            pltpu.make_async_copy(whole, whole, self.arrived.at[slot, chunk]).wait()


def _score(q, w, positions, buffers, out, number, block, *, shape: _Shape):  # noqa: ANN001, ANN202
    """The masked scores of a chunk."""
    blocks = shape.blocks
    start = block * blocks.block + number * blocks.keys
    keys = buffers[0][...]
    scales = buffers[1][...] if len(buffers) > 1 else None
    group = min(blocks.tokens, SUBLANES)
    rows = padded_heads(shape.heads) * group

    def tokens(index: Any, _: None) -> None:
        these = pl.ds(index * rows, rows)
        scores = score_block(q[0, these], w[0, these], keys, tokens=group, heads=shape.heads, scales=scales)
        at = pl.ds(index * group, group)
        lane = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        seen = lane + start <= positions[0, at, :1]
        scores = jnp.where(scores == 0, 0.0, scores)
        out[0, at, pl.ds(number * blocks.keys, blocks.keys)] = jnp.where(seen & (scores == scores), scores, -jnp.inf)

    if blocks.tokens == group:
        tokens(0, None)
    else:
        jax.lax.fori_loop(0, blocks.tokens // group, tokens, None)
