"""Dense attention of absorbed queries to the paged latent cache under a mask, for TPUs.

A tile of queries reads the blocks of the context in which any of its queries attends to something, each row once for
all queries and heads, and keeps an online softmax. The next block is copied while one is computed on, across tiles and
sequences. Cores share the tiles, or the blocks of each tile where the tiles are too few.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from glm52_jax.cache.row_formats import PackedStack, RowStack, TensorScaledFormat, parts_of
from glm52_jax.kernels import Target
from glm52_jax.kernels.lib.pallas import LANES, call
from glm52_jax.kernels.sparse_mla import dense_tile_sizes
from glm52_jax.kernels.sparse_mla.dense_gradient import dense_gradient
from glm52_jax.kernels.sparse_mla.dense_kernel import kernel
from glm52_jax.kernels.sparse_mla.dense_plan import WORD, DenseCall, DenseRowLayout
from glm52_jax.kernels.sparse_mla.dense_tile_sizes import DenseTileSizes

_TABLE_ENTRIES = 1 << 17  # of the page table that the scalar memory has room for


def dense_mla(
    queries: jax.Array,
    latent: RowStack,
    layer: jax.Array | int,
    page_table: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    scale: float,
    kv_lora_rank: int,
    *,
    target: Target,
) -> tuple[jax.Array, jax.Array]:
    """`api.sparse_mla` under a mask; differentiable by the queries and by the rows of the cache.

    Args:
        queries, latent, layer, page_table, positions, scale, kv_lora_rank: see there.
        mask: bool `[batch, tokens, positions]`, what each query attends to; nothing after its own position.
    """

    @jax.custom_vjp
    def run(q: jax.Array, rows: RowStack, *where: jax.Array) -> tuple[jax.Array, jax.Array]:
        number, table, last, seen = where
        return dense_forward(q, rows, number, table, last, seen, scale, kv_lora_rank, target=target)

    def forward(q: jax.Array, rows: RowStack, *where: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Any]:
        results = run(q, rows, *where)
        return results, (q, rows, where, results)

    def backward(kept: Any, cotangents: Any) -> tuple[Any, ...]:
        q, rows, (number, table, last, seen), results = kept
        given = dense_gradient(q, rows, number, table, last, seen, scale, kv_lora_rank, results, cotangents)
        return *given, None, None, None, None

    run.defvjp(forward, backward)
    return run(queries, latent, jnp.asarray(layer, jnp.int32), page_table, positions, mask)


def dense_forward(
    queries: jax.Array,
    latent: RowStack,
    layer: jax.Array | int,
    page_table: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    scale: float,
    kv_lora_rank: int,
    *,
    target: Target,
    blocks: DenseTileSizes | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The kernel itself; see `dense_mla`."""
    if page_table.size > _TABLE_ENTRIES and page_table.shape[0] > 1:
        half = page_table.shape[0] // 2
        halves = [
            dense_forward(
                *(queries[part], latent, layer, page_table[part], positions[part], mask[part], scale, kv_lora_rank),
                target=target,
                blocks=blocks,
            )
            for part in (slice(half), slice(half, None))
        ]
        return jax.tree.map(lambda *both: jnp.concatenate(both), *halves)
    batch, tokens, heads, width = queries.shape
    rows = DenseRowLayout.of(latent, width, kv_lora_rank)
    parts = [parts_of(latent)[name] for name in rows.names]
    page, table = parts[0].shape[2], page_table.shape[1]
    blocks = blocks or dense_tile_sizes.choose(target, tokens, heads, batch, page * table)
    tile = min(blocks.queries, tokens)
    pages = dense_tile_sizes.pages_of(target, blocks, table, page)
    tiles = -(-tokens // tile)
    items, cores = batch * tiles, target.chip.cores_per_device
    plan = DenseCall(
        rows=rows,
        items=items,
        tiles=tiles,
        tile=tile,
        heads=heads,
        table=table,
        page=page,
        pages=pages,
        blocks=-(-table // pages),
        cores=cores,
        splits=cores if items % cores else 1,
        product=max(1, blocks.rows // heads),
        chunk=min(blocks.chunk, pages * page),
        columns=target.chip.mxu_width,
        dtype=queries.dtype,
        stored=parts[0].dtype,
    )
    # Nothing is read past the table, whatever a caller takes for a position.
    lengths = jnp.minimum(jnp.max(positions, axis=1) + 1, page * table)
    seen, live = _tables(plan, mask, lengths)
    scalars = (
        jnp.asarray(layer, jnp.int32).reshape(1),
        lengths.astype(jnp.int32),
        page_table.reshape(-1).astype(jnp.int32),
        live,
        _layer_scale(latent, layer),
    )
    padded = jnp.pad(queries, ((0, 0), (0, tiles * tile - tokens), (0, 0), (0, 0)))
    row_bytes = sum(part.shape[-1] * part.dtype.itemsize for part in parts)
    estimate = dense_tile_sizes.cost(
        batch, tokens, heads, mask.shape[2], width, kv_lora_rank, row_bytes, queries.dtype.itemsize
    )
    out, lse = _call(plan, target, estimate, scale, len(parts), [(p.shape[-1], p.dtype) for p in parts])(
        *scalars, padded.reshape(items, tile * heads, width), seen, *parts
    )
    if plan.splits > 1:
        out, lse = _join(out.reshape(plan.splits, items, tile * heads, -1), lse.reshape(plan.splits, items, -1))
    out = out.astype(queries.dtype).reshape(batch, tiles * tile, heads, -1)
    return out[:, :tokens, :, :kv_lora_rank], lse.reshape(batch, tiles * tile, heads)[:, :tokens]


def _layer_scale(latent: RowStack, layer: jax.Array | int) -> jax.Array:
    """float32 `[1]`, what the whole layer's codes are multiplied by."""
    if isinstance(latent, PackedStack) and isinstance(latent.format, TensorScaledFormat):
        return jnp.asarray(latent.format.scales, jnp.float32)[layer].reshape(1)
    return jnp.ones(1, jnp.float32)


def _tables(plan: DenseCall, mask: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The mask by tile, int8 `[items, queries, positions]`, and which blocks are live, a bit each, int32."""
    tokens, positions = mask.shape[1:]
    room = plan.blocks * plan.keys
    mask = jnp.pad(mask, ((0, 0), (0, plan.tiles * plan.tile - tokens), (0, room - positions)))
    mask = mask.reshape(plan.items, plan.tile, room)
    some = jnp.any(mask.reshape(plan.items, plan.tile, plan.blocks, plan.keys), axis=(1, 3))
    written = jnp.arange(plan.blocks) * plan.keys < lengths[:, None]
    some &= jnp.repeat(written, plan.tiles, axis=0)
    bits = jnp.pad(some, ((0, 0), (0, plan.words * WORD - plan.blocks))).reshape(plan.items, plan.words, WORD)
    words = jnp.sum(jnp.where(bits, jnp.uint32(1) << jnp.arange(WORD, dtype=jnp.uint32), 0), axis=-1)
    seen = jnp.pad(mask.astype(jnp.int8), ((0, 0), (0, plan.mask_rows - plan.tile), (0, 0)))
    return seen, jax.lax.bitcast_convert_type(words.astype(jnp.uint32), jnp.int32).reshape(-1)


def _join(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One softmax of several over parts of the rows, the first dimension."""
    top = jnp.max(lse, axis=0)
    weight = jnp.exp(lse - jnp.where(jnp.isfinite(top), top, 0.0))
    total = jnp.sum(weight, axis=0)
    share = jnp.sum(out * weight[..., None], axis=0) / jnp.where(total > 0, total, 1.0)[..., None]
    return share, jnp.where(total > 0, jnp.log(total) + top, -jnp.inf)


def _call(plan: DenseCall, target: Target, estimate: pl.CostEstimate, scale: float, count: int, parts: list) -> Any:
    tall = plan.tile * plan.heads
    values, width = plan.rows.values, plan.rows.width
    results = plan.steps * plan.cores
    given = sum(section[1] for section in plan.rows.sections)
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=4,
        grid=(plan.cores, plan.steps),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec((None, tall, given), lambda c, i, *_: (plan.item(c, i), 0, 0)),
            *[pl.BlockSpec(memory_space=pl.ANY)] * (1 + count),
        ],
        out_specs=[
            pl.BlockSpec((None, tall, values), lambda c, i, *_: (plan.place(c, i), 0, 0)),
            pl.BlockSpec((None, tall, LANES), lambda c, i, *_: (plan.place(c, i), 0, 0)),
        ],
        scratch_shapes=[
            pltpu.VMEM((2, plan.mask_rows, plan.keys), jnp.int8),
            [pltpu.VMEM((2, plan.pages, plan.page, part), dtype) for part, dtype in parts],
            pltpu.VMEM((plan.mask_rows, plan.keys), jnp.int32),
            pltpu.VMEM((1, 1) if plan.plain else (plan.keys, width), plan.dtype),
            pltpu.VMEM((tall, width), plan.dtype),
            pltpu.VMEM((tall, values), jnp.float32),
            pltpu.VMEM((tall, LANES), jnp.float32),
            pltpu.VMEM((tall, LANES), jnp.float32),
            pltpu.SMEM((2 * plan.blocks,), jnp.int32),
            pltpu.SMEM((4,), jnp.int32),
            pltpu.SemaphoreType.DMA((2,)),
        ],
    )
    out_type = jnp.float32 if plan.splits > 1 else plan.dtype
    run = call(
        functools.partial(kernel, plan, scale),
        name="dense_mla",
        target=target,
        cost=estimate,
        out_shape=[
            jax.ShapeDtypeStruct((results, tall, values), out_type),
            jax.ShapeDtypeStruct((results, tall, LANES), jnp.float32),
        ],
        semantics=("parallel", "arbitrary"),
        grid_spec=spec,
    )

    def first_lane(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, lse = run(*operands)
        return out, lse[..., 0]

    return first_lane
