"""Index scores and their selection in one kernel, for the few queries of a decode step.

Scores are 1.6% of the bytes of their keys, so that keeping them in vector memory saves little traffic. What it saves is
time: while the best of one sequence are selected, the keys of the next one are read.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from glm52_jax.cache.row_formats import RowStack
from glm52_jax.kernels import Target
from glm52_jax.kernels.index_scores.score_block import padded_heads, query_rows, weight_rows
from glm52_jax.kernels.index_scores.tpu import key_parts, operand_type
from glm52_jax.kernels.index_topk.kernel import IndexTopkCall, kernel
from glm52_jax.kernels.index_topk.reference import index_topk_separate
from glm52_jax.kernels.index_topk.tile_sizes import IndexTopkTileSizes, choose, cost
from glm52_jax.kernels.lib.pallas import LANES, SUBLANES, call
from glm52_jax.kernels.topk import compaction

_TABLE_ENTRIES = 1 << 17
"""Page numbers that are in scalar memory at a time, half of it."""


def index_topk(
    queries: jax.Array,
    head_weights: jax.Array,
    keys: RowStack,
    indexer: jax.Array | int,
    page_table: jax.Array,
    positions: jax.Array,
    k: int,
    *,
    backend: str,
    target: Target,
    blocks: IndexTopkTileSizes | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `api.index_topk`. The scores are computed as in `index_scores`."""
    batch, tokens = positions.shape
    parts = key_parts(keys)
    page_size = parts[0].shape[2]
    key_bytes = sum(-(-part.shape[3] // LANES) * LANES * part.dtype.itemsize for part in parts)
    together = _sequences_at_once(batch, page_table.shape[1], target.chip.cores_per_device)
    blocks = blocks or choose(target, together, tokens, page_table.shape[1] * page_size, page_size, key_bytes, k)
    if blocks is None:
        return index_topk_separate(queries, head_weights, keys, indexer, page_table, positions, k, backend=backend)
    find = functools.partial(_fused, keys=keys, indexer=indexer, k=k, target=target, blocks=blocks)
    operands = queries, head_weights, page_table, positions
    if together == batch:
        return find(*operands)
    some = jax.tree.map(lambda part: part.reshape(batch // together, together, *part.shape[1:]), operands)
    found = jax.lax.map(lambda part: find(*part), some)
    return jax.tree.map(lambda part: part.reshape(batch, *part.shape[2:]), found)


def _sequences_at_once(batch: int, pages: int, cores: int) -> int:
    """Sequences whose page numbers fit into scalar memory: a divisor of the batch, for all cores if there is one."""
    fit = [rows for rows in range(1, batch + 1) if batch % rows == 0 and (rows == 1 or rows * pages <= _TABLE_ENTRIES)]
    return max(fit, key=lambda rows: (rows % cores == 0, rows)) if batch > 1 else 1


def _fused(
    queries: jax.Array,
    head_weights: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    *,
    keys: RowStack,
    indexer: jax.Array | int,
    k: int,
    target: Target,
    blocks: IndexTopkTileSizes,
) -> tuple[jax.Array, jax.Array]:
    batch, tokens, heads, dim = queries.shape
    short = -batch % blocks.cores
    if short:  # sequences without tokens, so that every core has as many
        more = (jnp.pad(x, ((0, short), *[(0, 0)] * (x.ndim - 1))) for x in (queries, head_weights, page_table))
        nobody = jnp.pad(positions, ((0, short), (0, 0)), constant_values=-1)
        again = functools.partial(_fused, keys=keys, indexer=indexer, k=k, target=target, blocks=blocks)
        found = again(*more, positions=nobody)
        return found[0][:batch], found[1][:batch]
    parts = key_parts(keys)
    layer_pages, page_size, width = parts[0].shape[1:]
    capacity = page_table.shape[1] * page_size
    shape = IndexTopkCall(blocks, batch, tokens, heads, page_size)
    # Pages of the whole stack, which a kernel can address with less arithmetic than pages of a layer.
    table = jnp.asarray(indexer, jnp.int32) * layer_pages + jnp.clip(page_table, 0, layer_pages - 1)
    table = jnp.pad(table, ((0, 0), (0, shape.pages - page_table.shape[1])))
    positions = jnp.minimum(positions, capacity - 1)
    rows = blocks.selection.rows
    # What each place of a register may see: rows of tokens repeat over its sublanes.
    seen = jnp.pad(positions, ((0, 0), (0, rows - tokens)), constant_values=-1)
    seen = jnp.tile(seen, (1, SUBLANES // rows))
    estimate = cost(
        batch,
        tokens,
        heads,
        dim,
        capacity,
        k,
        key_bytes=sum(part.shape[3] * part.dtype.itemsize for part in parts),
        query_bytes=jnp.dtype(operand_type(keys)).itemsize,
    )
    out = _call(shape, parts, target, estimate)(
        table.reshape(-1),
        jnp.max(positions, axis=1),
        query_rows(queries, operand_type(keys), width),
        weight_rows(head_weights),
        jnp.broadcast_to(seen[..., None], (*seen.shape, LANES)),
        *[part.reshape(-1, *part.shape[2:]) for part in parts],
    )
    indices, values = (array.reshape(batch, rows, -1)[:, :tokens, :k] for array in out)
    return indices, values


def _call(shape: IndexTopkCall, parts: tuple[jax.Array, ...], target: Target, estimate: pl.CostEstimate) -> Any:
    blocks, sizes = shape.blocks, shape.blocks.selection
    high = padded_heads(shape.heads) * shape.tokens

    def of_sequence(*dims: int) -> pl.BlockSpec:
        zeros = (0,) * len(dims)
        return pl.BlockSpec((1, *dims), lambda core, turn, step, *_: (shape.sequence(core, turn), *zeros))

    lists = sizes.rows, sizes.list_rows, LANES
    registers = sizes.registers * SUBLANES, LANES
    kept = max(1, sizes.candidates) * SUBLANES, LANES
    return call(
        functools.partial(kernel, shape=shape, parts=len(parts)),
        name="index_topk",
        target=target,
        cost=estimate,
        semantics=("parallel", "arbitrary", "arbitrary"),
        out_shape=[jax.ShapeDtypeStruct((shape.batch, *lists), dtype) for dtype in (jnp.int32, jnp.float32)],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(blocks.cores, shape.turns, shape.steps),
            in_specs=[
                of_sequence(high, parts[0].shape[3]),
                of_sequence(high, LANES),
                of_sequence(SUBLANES, LANES),
                *[pl.BlockSpec(memory_space=pl.ANY)] * len(parts),
            ],
            out_specs=[of_sequence(*lists), of_sequence(*lists)],
            scratch_shapes=[
                *[pltpu.VMEM((2, blocks.parts, blocks.keys, part.shape[3]), part.dtype) for part in parts],
                pltpu.SemaphoreType.DMA((2, blocks.parts)),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((sizes.chunk_registers * SUBLANES, LANES), jnp.float32),
                *[pltpu.VMEM(dims, jnp.int32) for dims in (registers, kept, (SUBLANES, LANES))],
                *compaction.scratch(sizes),
            ],
        ),
    )
