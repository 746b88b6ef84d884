"""Cache write on TPUs: rows are made, quantised and stored by one kernel, in place.

A page's rows lie in tiles of eight, which no copy may cut. A tile of which all rows are new is written; another one is
read first. Reads are under way while the rows are made, and all tiles of a step are written at once.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from glm52_jax.cache.row_formats import PackedStack, RowFormat, RowStack, TensorScaledFormat, parts_of
from glm52_jax.kernels import Target
from glm52_jax.kernels.cache_write.new_rows import RowTransform
from glm52_jax.kernels.cache_write.tile_sizes import CacheWriteTileSizes, choose, cost
from glm52_jax.kernels.cache_write.tiles import encode, make, tables
from glm52_jax.kernels.lib.pallas import SUBLANES, call

_SLAB = 64
"""Rows that are made at a time, in registers."""


def write_rows(
    stack: RowStack,
    layer: jax.Array | int,
    values: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    transform: RowTransform | None,
    *,
    target: Target,
) -> RowStack:
    """See `api.write_rows`."""
    parts = parts_of(stack)
    form = stack.format if isinstance(stack, PackedStack) else None
    batch, tokens, width = values.shape
    pages, page_size = next(iter(parts.values())).shape[1:3]
    blocks = choose(target.chip, batch, tokens, page_size)
    room = _made_width(form, width)
    shared, angles = tables(transform, room)
    by_step = functools.partial(_by_step, blocks=blocks)
    row_bytes = sum(part.shape[-1] * part.dtype.itemsize for part in parts.values())
    kernel = functools.partial(
        _kernel, names=tuple(parts), form=form, transform=transform, blocks=blocks, shared=len(shared)
    )
    values = by_step(values)
    steps, rows, _ = values.shape
    angles = [by_step(table) for table in angles]
    scale = form.scale(layer) if isinstance(form, TensorScaledFormat) else jnp.ones((), jnp.float32)
    scalars = (jnp.asarray(layer, jnp.int32).reshape(1), *tile_rows(page_table, positions, page_size, pages, blocks))
    any_space = pl.BlockSpec(memory_space=pl.ANY)

    def of_step(array: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((None, *array.shape[1:]), lambda step, *_: (step, 0, 0))

    inputs = [scale.reshape(1, 1), *shared, *angles, values]
    specs = [
        pl.BlockSpec(memory_space=pltpu.SMEM),
        *[pl.BlockSpec(array.shape, lambda step, *_: (0, 0)) for array in shared],
        *[of_step(array) for array in (*angles, values)],
    ]
    # Rows around the new ones, since a tile that is only partly new begins before them or ends after them.
    front = _front(blocks)
    margin = 2 * front + rows + SUBLANES
    tiles = blocks.sequences * blocks.touched
    out = call(
        kernel,
        name="cache_write",
        target=target,
        cost=cost(batch, tokens, width, values.dtype.itemsize, row_bytes, blocks),
        out_shape=[jax.ShapeDtypeStruct(part.shape, part.dtype) for part in parts.values()],
        # Two steps of one sequence may touch the same tile.
        semantics=["parallel" if blocks.tokens >= tokens else "arbitrary"],
        aliases={len(scalars) + len(inputs) + number: number for number in range(len(parts))},
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(steps,),
            in_specs=[*specs, *[any_space] * len(parts)],
            out_specs=[any_space] * len(parts),
            scratch_shapes=[
                pltpu.VMEM((margin, room), jnp.float32),
                *[pltpu.VMEM((margin, part.shape[-1]), jnp.float32) for part in parts.values()],
                *[pltpu.VMEM((tiles, blocks.rows, part.shape[-1]), part.dtype) for part in parts.values()],
                pltpu.SemaphoreType.DMA,
                pltpu.SemaphoreType.DMA,
            ],
        ),
    )(*scalars, *inputs, *parts.values())
    if not isinstance(stack, PackedStack):
        return out[0]
    return dataclasses.replace(stack, parts=dict(zip(parts, out, strict=True)))


def _front(blocks: CacheWriteTileSizes) -> int:
    return -(-blocks.rows // SUBLANES) * SUBLANES


def _made_width(form: RowFormat | None, width: int) -> int:
    """The width of rows while they are made: whole lanes where the format has them."""
    lanes = getattr(form, "lanes", 1)
    return -(-width // lanes) * lanes


def _by_step(array: jax.Array, blocks: CacheWriteTileSizes) -> jax.Array:
    """`[steps, rows, width]` of `[batch, tokens, width]`, a multiple of eight rows a step."""
    batch, tokens, width = array.shape
    array = jnp.pad(array, ((0, -batch % blocks.sequences), (0, -tokens % blocks.tokens), (0, 0)))
    rows = array.reshape(-1, blocks.sequences * blocks.tokens, width)
    return jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % SUBLANES), (0, 0)))


class TileRows(NamedTuple):
    """Where the tiles of all steps are, int32 `[tiles]` each.

    Attributes:
        page: of the pool; any of them where nothing is new.
        group: number of the tile in its page.
        start: row of the step that the tile's first row would get, which may be before or after those that are there.
        low, high: rows of the tile that are new, none where they are equal.
    """

    page: jax.Array
    group: jax.Array
    start: jax.Array
    low: jax.Array
    high: jax.Array


def tile_rows(
    page_table: jax.Array, positions: jax.Array, page_size: int, pages: int, blocks: CacheWriteTileSizes
) -> TileRows:
    """The tiles of a write, step after step, `blocks.touched` for each run of columns of a sequence.

    Nothing is new in a tile of a page that is past the table or none of the pool's: unlike a slice of an array, a copy
    is not kept inside of its array, and would write into another layer.
    """
    batch, tokens = positions.shape
    pad = ((0, -batch % blocks.sequences), (0, -tokens % blocks.tokens))
    positions = jnp.pad(positions, pad, constant_values=-1).reshape(-1, blocks.tokens)
    chunks = -(-tokens // blocks.tokens)
    table = jnp.repeat(jnp.pad(page_table, (pad[0], (0, 0))), chunks, axis=0)
    real = positions >= 0
    count = jnp.sum(real, axis=1)[:, None]
    first = jnp.min(jnp.where(real, positions, jnp.iinfo(jnp.int32).max), axis=1)[:, None]
    first = jnp.where(count > 0, first, 0)
    tile = first // blocks.rows + jnp.arange(blocks.touched)  # of the sequence
    base = tile * blocks.rows
    column = base // page_size
    page = jnp.take_along_axis(table, jnp.minimum(column, table.shape[1] - 1), axis=1)
    there = (column < table.shape[1]) & (page >= 0) & (page < pages)
    low = jnp.where(there, jnp.clip(first - base, 0, blocks.rows), 0)
    high = jnp.where(there, jnp.clip(first + count - base, low, blocks.rows), 0)
    # The column of the tile's first new row.
    columns = jnp.arange(blocks.tokens)
    begin = jnp.min(
        jnp.where(positions[:, None] == (base + low)[..., None], columns, blocks.tokens), axis=2, initial=blocks.tokens
    )
    in_step = jnp.arange(positions.shape[0])[:, None] % blocks.sequences * blocks.tokens
    group = base % page_size // blocks.rows
    found = (jnp.clip(page, 0, pages - 1), group, in_step + begin - low, low, high)
    return TileRows(*(array.astype(jnp.int32).reshape(-1) for array in found))


def _kernel(
    layer: Any,
    *references: Any,
    names: tuple[str, ...],
    form: RowFormat | None,
    transform: RowTransform | None,
    blocks: CacheWriteTileSizes,
    shared: int,
) -> None:
    """One step: see the module."""
    count, angles = len(names), 2 if transform else 0
    tile_at, rest = TileRows(*references[:5]), references[5:]
    scale, rest = rest[0], rest[1:]
    common, turns, values, rest = (
        rest[:shared],
        rest[shared : shared + angles],
        rest[shared + angles],
        rest[shared + angles + 1 :],
    )
    stacks, rest = rest[count : 2 * count], rest[2 * count :]  # the results, whose buffers are the operands'
    made, new, tiles, (reads, writes) = rest[0], rest[1 : 1 + count], rest[1 + count : 1 + 2 * count], rest[-2:]
    total = blocks.sequences * blocks.touched
    first = pl.program_id(0) * total

    def copies(number: Any, semaphore: Any, *, out: bool) -> list[Any]:
        row = tile_at.group[first + number] * blocks.rows
        if blocks.rows % SUBLANES == 0:
            row = pl.multiple_of(row, SUBLANES)
        where = tile_at.page[first + number], pl.ds(row, blocks.rows)
        pairs = [(tile.at[number], stack.at[layer[0], *where]) for tile, stack in zip(tiles, stacks, strict=True)]
        return [pltpu.make_async_copy(*(pair if out else pair[::-1]), semaphore) for pair in pairs]

    def for_each(partly: bool, action: Any) -> None:
        """`action` for the tiles that are partly new, or for those with any new row."""

        def one(number: Any, _: None) -> None:
            low, high = tile_at.low[first + number], tile_at.high[first + number]
            wanted = (high > low) & (high - low < blocks.rows) if partly else high > low
            pl.when(wanted)(lambda: action(number))

        jax.lax.fori_loop(0, total, one, None)

    def begin(number: Any) -> None:
        for copy in copies(number, reads, out=False):
            copy.start()

    def finish(number: Any, *, out: bool) -> None:
        for copy in copies(number, writes if out else reads, out=out):
            copy.wait()

    def put(number: Any) -> None:
        at = tile_at.start[first + number] + _front(blocks)
        low, high = tile_at.low[first + number], tile_at.high[first + number]
        whole = (high - low == blocks.rows) & (at % SUBLANES == 0)

        @pl.when(whole)
        def _as_it_is() -> None:
            for tile, rows in zip(tiles, new, strict=True):
                source = pl.ds(pl.multiple_of(at, SUBLANES), blocks.rows)
                tile[number] = rows[source, :].astype(tile.dtype)

        @pl.when(jnp.logical_not(whole))
        def _merge() -> None:
            for tile, rows in zip(tiles, new, strict=True):
                tile[number] = _merged(tile[number], rows, at, low, high)

        for copy in copies(number, writes, out=True):
            copy.start()

    for_each(True, begin)
    _make_all(
        values, made, dict(zip(names, new, strict=True)), form, transform, scale[0, 0], common, turns, _front(blocks)
    )
    for_each(True, functools.partial(finish, out=False))
    for_each(False, put)
    for_each(False, functools.partial(finish, out=True))


def _make_all(
    values: Any,
    made: Any,
    new: dict[str, Any],
    form: RowFormat | None,
    transform: RowTransform | None,
    scale: Any,
    common: Any,
    turns: Any,
    front: int,
) -> None:
    """Makes and encodes the rows of a step, behind rows of room."""
    count, width = values.shape
    slab = _SLAB if count % _SLAB == 0 else SUBLANES
    if form is not None:
        for part in (made, *new.values()):
            part[...] = jnp.zeros(part.shape, jnp.float32)

    def one(number: Any, _: None) -> None:
        source = pl.ds(pl.multiple_of(number * slab, SUBLANES), slab)
        at = pl.ds(pl.multiple_of(front + number * slab, SUBLANES), slab)
        made[at, :width] = values[source, :].astype(jnp.float32)
        if transform is not None:
            make(made, at, transform, values.dtype, common, [turn[source, :] for turn in turns])
        encode(new, at, form, made[at, :], scale)

    jax.lax.fori_loop(0, count // slab, one, None)


def _merged(old: jax.Array, rows: Any, at: Any, low: Any, high: Any) -> jax.Array:
    """A tile whose rows from `low` to before `high` are replaced by those of `rows` from `at + low` on."""
    base = pl.multiple_of(at // SUBLANES * SUBLANES, SUBLANES)
    room = -(-old.shape[0] // SUBLANES) * SUBLANES + SUBLANES
    shifted = pltpu.roll(rows[pl.ds(base, room), :], (room - at % SUBLANES) % room, 0)[: old.shape[0]]
    row = jax.lax.broadcasted_iota(jnp.int32, old.shape, 0)
    return jnp.where((row >= low) & (row < high), shifted, old.astype(jnp.float32)).astype(old.dtype)
