"""Sparse attention on TPUs: gathers the selected rows, or reads the context densely under a mask."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from glm52_jax.cache.row_formats import RowStack
from glm52_jax.kernels import Target
from glm52_jax.kernels.lib.pallas import LANES, simulated
from glm52_jax.kernels.lib.selection import UNIT_BITS, Selection, plan_units, single_units
from glm52_jax.kernels.sparse_mla import tile_sizes
from glm52_jax.kernels.sparse_mla.dense import dense_mla
from glm52_jax.kernels.sparse_mla.gather import GatherCall, StoredPart, gather_attention, in_words
from glm52_jax.kernels.sparse_mla.reference import sparse_mla_reference
from glm52_jax.kernels.sparse_mla.stored_rows import StoredRows, stored_rows

_INTERPRETED_LANES = 8  # numbers that go together where nothing is laid out in lanes, and short lists are tested


def sparse_mla(
    queries: jax.Array,
    latent: RowStack,
    layer: jax.Array | int,
    page_table: jax.Array,
    positions: jax.Array,
    selection: Selection,
    scale: float,
    kv_lora_rank: int,
    *,
    target: Target,
    expected: int | None = None,
    form: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `api.sparse_mla`.

    Args:
        form: of a selection that is a list, one of `blocks.FORMS`; the fastest when None.
    """
    if selection.indices is None:
        assert selection.mask is not None
        mask = selection.mask
        return dense_mla(queries, latent, layer, page_table, positions, mask, scale, kv_lora_rank, target=target)
    found = stored_rows(latent, layer, queries.dtype)
    capacity = page_table.shape[1] * (found[0][0].shape[2] if found else 1)
    if found is None or (found[0][0].shape[2] % tile_sizes.BLOCK_ROWS and not target.interpret):
        # Formats and page sizes that no cache on a TPU has.
        return sparse_mla_reference(queries, latent, layer, page_table, positions, selection, scale, kv_lora_rank)
    stack, stored = found
    expected = min(expected or selection.indices.shape[-1], selection.indices.shape[-1], capacity)
    form = form or tile_sizes.choose_implementation(
        target.chip, queries.shape[1], expected, capacity, tile_sizes.RowShape.of(stack)
    )
    if form == "dense":
        mask = selection.as_mask(capacity)
        return dense_mla(queries, latent, layer, page_table, positions, mask, scale, kv_lora_rank, target=target)
    page_size = stack[0].shape[2]
    packs = [_pack(array, page_size) for array in stack]
    unit = max(packs)
    if form == "blocks" and page_size % tile_sizes.BLOCK_ROWS == 0:
        unit = tile_sizes.BLOCK_ROWS
    parts = tuple(StoredPart(a.dtype, a.shape[-1], pack, unit) for a, pack in zip(stack, packs, strict=True))
    return _gathered(
        queries, stack, stored, parts, page_table, layer, positions, selection, scale, kv_lora_rank, expected, target
    )


def _gathered(
    queries: jax.Array,
    stack: list[jax.Array],
    stored: StoredRows,
    parts: tuple[StoredPart, ...],
    page_table: jax.Array,
    layer: jax.Array | int,
    positions: jax.Array,
    selection: Selection,
    scale: float,
    kv_lora_rank: int,
    expected: int,
    target: Target,
) -> tuple[jax.Array, jax.Array]:
    """`sparse_mla` by gathering units of rows, with everything padded to what the kernel takes."""
    batch, tokens, heads, width = queries.shape
    unit, count = parts[0].unit, batch * tokens
    pages, page_size = stack[0].shape[1:3]
    tables, table_pages = _tables(page_table, layer, pages, page_size // unit), page_table.shape[1]
    entries = _entries(selection, unit)
    lanes = _INTERPRETED_LANES if target.interpret else LANES
    sizes = tile_sizes.choose(target.chip, unit, len(parts), entries.shape[-1], lanes)
    per_core = -(-count // target.chip.cores_per_device)
    more = target.chip.cores_per_device * per_core - count
    room = -(-entries.shape[-1] // (2 * sizes.chunk)) * 2 * sizes.chunk
    plan = GatherCall(
        parts=parts,
        unit=unit,
        page_units=page_size // unit,
        chunk=sizes.chunk,
        early=sizes.early,
        piece=sizes.piece,
        entries=room,
        pages=tables.shape[-1],
        tokens=tokens,
        per_core=per_core,
        rank=kv_lora_rank,
        lanes=lanes,
        straight=straight_line(target),
        given_words=simulated(target),
    )
    # What is past the capacity would be copied from past the table of pages.
    there = (positions[..., None] >= 0) & (entries >> UNIT_BITS < table_pages * plan.page_units)
    entries = jnp.where(there, entries, 0).reshape(count, -1)
    entries = jnp.pad(entries, ((0, more), (0, room - entries.shape[1])))
    flat = [array.reshape(-1, array.shape[-1]) for array in stack]
    if plan.given_words:
        flat = [in_words(array, part.pack) for array, part in zip(flat, parts, strict=True)]
    factor = jnp.asarray(stored.scale, jnp.float32)
    queries = queries.reshape(count, heads, width)
    queries = jnp.pad(queries, ((0, more), (0, -heads % tile_sizes.HEADS), (0, stored.width - width)))
    out, lse = gather_attention(
        plan,
        queries,
        flat,
        tables,
        entries,
        jnp.max(jnp.where(entries > 0, jnp.arange(1, room + 1, dtype=jnp.int32), 0), axis=1),
        stored.decode,
        jnp.stack([scale * factor, factor]),
        target=target,
        cost=tile_sizes.cost(
            count,
            heads,
            expected,
            width,
            kv_lora_rank,
            unit * tile_sizes.RowShape.of(stack).row_bytes,  # neighbours come along
            queries.dtype.itemsize,
        ),
    )
    out = out[:count, :heads].reshape(batch, tokens, heads, kv_lora_rank)
    return out, lse[:count, 0, :heads].reshape(batch, tokens, heads)


def _entries(selection: Selection, unit: int) -> jax.Array:
    """The selection's list of units, or one made of its positions."""
    assert selection.indices is not None
    if selection.units is not None and selection.unit == unit:
        return selection.units
    if unit == tile_sizes.BLOCK_ROWS:
        return plan_units(selection.indices, unit)
    # A few rows that are neighbours are copied twice; to find them would take longer.
    return single_units(selection.indices, unit)


def _pack(array: jax.Array, page_size: int) -> int:
    """Rows that share the words that are copied."""
    pack = 4 // array.dtype.itemsize
    return 1 if page_size % pack else pack


def straight_line(target: Target) -> bool:
    """Whether the copies of a chunk are in a straight line, in which compilers for CPUs take long."""
    return not target.interpret


def _tables(page_table: jax.Array, layer: jax.Array | int, pages: int, units: int) -> jax.Array:
    """int32 `[batch, 1, pages]`: what to add to a unit's number in the sequence for that in the whole stack."""
    first = (jnp.clip(page_table, 0, pages - 1) + layer * pages) * units
    table = first - jnp.arange(page_table.shape[1], dtype=jnp.int32) * units
    return jnp.pad(table, ((0, 0), (0, -table.shape[1] % LANES)))[:, None]
