"""Reading pages: from positions to slots of the pool, and rows of one layer in order of position."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from glm52_jax.cache.row_formats import RowStack, decode_rows, parts_of


def slots_of(page_table: jax.Array, positions: jax.Array, page_size: int, pages: int) -> jax.Array:
    """Slot in the pool (page * page_size + offset) of each position; -1 where there is none.

    There is none for a negative position, for one at or past the capacity of the table, and for a page that is none of
    the pool's, such as -1.

    Args:
        page_table: int32 `[batch, pages_per_sequence]`.
        positions: int32 `[batch, ...]`.
        page_size: rows a page.
        pages: of the pool.
    """
    flat = positions.reshape(positions.shape[0], -1)
    column = flat // page_size
    page = jnp.take_along_axis(page_table, jnp.clip(column, 0, page_table.shape[1] - 1), axis=1)
    there = (flat >= 0) & (column < page_table.shape[1]) & (page >= 0) & (page < pages)
    return jnp.where(there, page * page_size + flat % page_size, -1).reshape(positions.shape)


def gather_rows(stack: RowStack, layer: jax.Array | int, page_table: jax.Array, positions: jax.Array) -> jax.Array:
    """Rows of one layer at `positions` `[batch, n]`: `[batch, n, width]`, zeros where a position has no slot."""
    parts = parts_of(stack)
    _, pages, page_size, _ = next(iter(parts.values())).shape
    where = slots_of(page_table, positions, page_size, pages)

    def gather(part: jax.Array) -> jax.Array:
        flat = part.reshape(-1, part.shape[-1])
        return jnp.take(flat, layer * pages * page_size + jnp.maximum(where, 0), axis=0, mode="clip")

    rows = decode_rows(stack, {name: gather(part) for name, part in parts.items()}, layer)
    return jnp.where((where >= 0)[..., None], rows, jnp.zeros((), rows.dtype))


def context_rows(stack: RowStack, layer: jax.Array | int, page_table: jax.Array, lengths: jax.Array) -> jax.Array:
    """All rows of one layer in order of position: `[batch, capacity, width]`, zeros from `lengths[b]` on.

    They are zeros for pages that are none of the pool's, too.
    """
    batch, parts = page_table.shape[0], parts_of(stack)
    _, pages, page_size, _ = next(iter(parts.values())).shape

    def read(part: jax.Array) -> jax.Array:
        whole = part.reshape(-1, *part.shape[2:])
        found = jnp.take(whole, layer * pages + jnp.clip(page_table, 0, pages - 1), axis=0, mode="clip")
        return found.reshape(batch, -1, part.shape[-1])

    rows = decode_rows(stack, {name: read(part) for name, part in parts.items()}, layer)
    there = jnp.repeat((page_table >= 0) & (page_table < pages), page_size, axis=1)
    written = there & (jnp.arange(rows.shape[1]) < lengths[:, None])
    return jnp.where(written[..., None], rows, jnp.zeros((), rows.dtype))
