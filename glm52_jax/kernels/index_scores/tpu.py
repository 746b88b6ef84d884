"""Index scores on a TPU: pages of keys streamed through vector memory, scored against some of the tokens at a time.

A block of context is read, page by page, while the block before it is scored, whichever sequence that is of. Blocks are
dealt in turn to the cores of a chip, so that sequences of any lengths keep both busy. What is after the newest token of
those that are scored together is not read: its scores are written as minus infinity.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from glm52_jax.cache.row_formats import GroupScaledFormat, PackedStack, RowStack, UnquantizedFormat, parts_of
from glm52_jax.kernels import Target
from glm52_jax.kernels.index_scores.kernel import ScoresCall, kernel
from glm52_jax.kernels.index_scores.score_block import padded_heads, query_rows, weight_rows
from glm52_jax.kernels.index_scores.tile_sizes import IndexScoresTileSizes, choose, cost
from glm52_jax.kernels.lib.pallas import LANES, call

_TABLE_ENTRIES = 1 << 17
"""Page numbers that are in scalar memory at a time, half of it."""


def index_scores(
    queries: jax.Array,
    head_weights: jax.Array,
    keys: RowStack,
    indexer: jax.Array | int,
    page_table: jax.Array,
    positions: jax.Array,
    *,
    target: Target,
    blocks: IndexScoresTileSizes | None = None,
) -> jax.Array:
    """See `api.index_scores`.

    Queries are rounded to bfloat16 where the keys are stored in it, or what is beside their codes; products are added
    up in float32, and nothing after them is rounded to less. A scale of a key, a power of two, multiplies its scores.
    """
    batch = queries.shape[0]
    rows = _rows_at_once(batch, page_table.shape[1])
    score = functools.partial(_scores, keys=keys, indexer=indexer, target=target, blocks=blocks)
    operands = queries, head_weights, page_table, positions
    if rows == batch:
        return score(*operands)
    some = jax.tree.map(lambda part: part.reshape(batch // rows, rows, *part.shape[1:]), operands)
    scores = jax.lax.map(lambda part: score(*part), some)
    return scores.reshape(batch, *scores.shape[2:])


def operand_type(keys: RowStack) -> Any:
    """What queries and keys are multiplied in: the type of plain keys, or that of the values beside codes."""
    if isinstance(keys, PackedStack):
        assert isinstance(keys.format, UnquantizedFormat | GroupScaledFormat)
        return jnp.dtype(keys.format.dtype)
    return jnp.dtype(keys.dtype)


def key_parts(keys: RowStack) -> tuple[jax.Array, ...]:
    """The arrays of a stack of keys: values, or codes and what has their scales in its first column."""
    parts = parts_of(keys)
    if "codes" in parts:
        return parts["codes"], parts["tail"] if "tail" in parts else parts["scales"]
    return (parts["values"],)


def _rows_at_once(batch: int, pages: int) -> int:
    """Sequences whose page numbers fit into scalar memory, of which the batch is a multiple."""
    return max(
        (rows for rows in range(1, batch + 1) if batch % rows == 0 and rows * pages <= _TABLE_ENTRIES), default=1
    )


def _scores(
    queries: jax.Array,
    head_weights: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    *,
    keys: RowStack,
    indexer: jax.Array | int,
    target: Target,
    blocks: IndexScoresTileSizes | None,
) -> jax.Array:
    batch, tokens, heads, dim = queries.shape
    parts, dtype = key_parts(keys), operand_type(keys)
    layer_pages, page_size, width = parts[0].shape[1:]
    capacity = page_table.shape[1] * page_size
    blocks = blocks or choose(target, tokens, capacity, page_size)
    tiles = -(-tokens // blocks.tokens)

    def tiled(values: jax.Array, fill: int = 0) -> jax.Array:
        none = [(0, 0)] * (values.ndim - 2)
        padded = jnp.pad(values, [(0, 0), (0, tiles * blocks.tokens - tokens), *none], constant_values=fill)
        return padded.reshape(batch * tiles, blocks.tokens, *values.shape[2:])

    # Pages of the whole stack, which a kernel can address with less arithmetic than pages of a layer.
    table = jnp.asarray(indexer, jnp.int32) * layer_pages + jnp.clip(page_table, 0, layer_pages - 1)
    whole = -(-capacity // blocks.block) * blocks.block // page_size
    table = jnp.pad(table, ((0, 0), (0, whole - page_table.shape[1])))
    positions = tiled(jnp.minimum(positions, capacity - 1), -1)
    newest = jnp.max(positions.reshape(-1, blocks.together), axis=1)
    estimate = cost(
        batch,
        tokens,
        heads,
        dim,
        capacity,
        key_bytes=sum(part.shape[3] * part.dtype.itemsize for part in parts),
        query_bytes=dtype.itemsize,
    )
    out = _call(ScoresCall(blocks, batch, tiles, heads, capacity, page_size, whole, dtype), parts, target, estimate)(
        table.reshape(-1),
        jnp.max(newest.reshape(-1, blocks.groups), axis=1),
        newest,
        # One token's heads are in order already, and then the kernel rounds them: an operation less in a short step.
        query_rows(tiled(queries), queries.dtype if tokens == 1 else dtype, width),
        weight_rows(tiled(head_weights)),
        positions[..., None],
        *[part.reshape(-1, *part.shape[2:]) for part in parts],
    )
    return out.reshape(batch, tiles * blocks.tokens, capacity)[:, :tokens]


def _call(shape: ScoresCall, parts: tuple[jax.Array, ...], target: Target, estimate: pl.CostEstimate) -> Any:
    blocks = shape.blocks
    rows = padded_heads(shape.heads) * blocks.tokens

    def row(height: int, width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, height, width), lambda core, row, step, *_: (row, 0, 0))

    return call(
        functools.partial(kernel, shape=shape, parts=len(parts)),
        name="index_scores",
        target=target,
        cost=estimate,
        semantics=("parallel", "arbitrary", "arbitrary"),
        out_shape=jax.ShapeDtypeStruct((shape.rows, blocks.tokens, shape.capacity), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(blocks.cores, shape.rows, shape.steps),
            in_specs=[
                row(rows, parts[0].shape[3]),
                row(rows, LANES),
                row(blocks.tokens, 1),
                *[pl.BlockSpec(memory_space=pl.ANY)] * len(parts),
            ],
            out_specs=pl.BlockSpec(
                (1, blocks.tokens, blocks.block), lambda core, row, step, *_: (row, 0, step * blocks.cores + core)
            ),
            scratch_shapes=[
                *[pltpu.VMEM((2, blocks.chunks, blocks.keys, part.shape[3]), part.dtype) for part in parts],
                pltpu.SemaphoreType.DMA((2, blocks.chunks)),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
    )
