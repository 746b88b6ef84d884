"""Plain cache write: `dynamic_update_slice`, never an XLA scatter, which would ask for another layout of the cache."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from glm52_jax.cache.pages import slots_of
from glm52_jax.cache.row_formats import PackedStack, RowStack, encode_rows
from glm52_jax.kernels.cache_write.new_rows import RowTransform


def write_rows_reference(
    stack: RowStack,
    layer: jax.Array | int,
    values: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    transform: RowTransform | None,
) -> RowStack:
    """See `api.write_rows`."""
    new = encode_rows(stack, transform(values) if transform else values, layer)
    if not isinstance(stack, PackedStack):
        return _write(stack, layer, new["values"], page_table, positions)
    parts = {name: _write(part, layer, new[name], page_table, positions) for name, part in stack.parts.items()}
    return dataclasses.replace(stack, parts=parts)


def _write(
    stack: jax.Array, layer: jax.Array | int, rows: jax.Array, page_table: jax.Array, positions: jax.Array
) -> jax.Array:
    """One part of the rows: token by token when there are few, else page by page.

    Rows of one-byte values are always written by page: a TPU keeps four of them in a word, and would copy the whole
    stack to update one.
    """
    tokens, page_size = rows.shape[1], stack.shape[2]
    # A run of positions touches at most this many pages, wherever in a page it begins.
    touched = min((tokens + page_size - 2) // page_size + 1, page_table.shape[1])
    if tokens <= touched * 2 and stack.dtype.itemsize > 1:
        return _write_tokens(stack, layer, rows, page_table, positions)
    return _write_runs(stack, layer, rows, page_table, positions, touched)


def _write_tokens(
    stack: jax.Array, layer: jax.Array | int, rows: jax.Array, page_table: jax.Array, positions: jax.Array
) -> jax.Array:
    pages, page_size, width = stack.shape[1:]
    flat_rows = rows.reshape(-1, width)
    where = slots_of(page_table, positions, page_size, pages).reshape(-1)

    def write(token: jax.Array, stack: jax.Array) -> jax.Array:
        slot = jnp.maximum(where[token], 0)
        start = (layer, slot // page_size, slot % page_size, 0)
        old = jax.lax.dynamic_slice(stack, start, (1, 1, 1, width))
        row = jnp.where(where[token] >= 0, flat_rows[token].reshape(old.shape), old)
        return jax.lax.dynamic_update_slice(stack, row, start)

    return jax.lax.fori_loop(0, where.shape[0], write, stack)


def _write_runs(
    stack: jax.Array,
    layer: jax.Array | int,
    rows: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    touched: int,
) -> jax.Array:
    batch, tokens, width = rows.shape
    pages, page_size = stack.shape[1:3]
    last = page_table.shape[1] - 1
    real = positions >= 0
    first = jnp.min(jnp.where(real, positions, jnp.iinfo(jnp.int32).max), axis=1)
    count = jnp.sum(real, axis=1)
    columns = jnp.argsort(~real, axis=1, stable=True)  # of the run, one after another

    def write(step: jax.Array, stack: jax.Array) -> jax.Array:
        row, offset = step // touched, step % touched
        column = jnp.where(count[row] > 0, first[row], 0) // page_size + offset
        page = page_table[row, jnp.minimum(column, last)]
        there = (column <= last) & (page >= 0) & (page < pages)
        # Place of each slot of the page in the run of this sequence; outside of it the page keeps what it has.
        place = column * page_size + jnp.arange(page_size) - first[row]
        inside = (place >= 0) & (place < count[row]) & there
        new = jnp.take(rows[row], jnp.take(columns[row], jnp.clip(place, 0, tokens - 1)), axis=0)
        start = (layer, jnp.clip(page, 0, pages - 1), 0, 0)
        old = jax.lax.dynamic_slice(stack, start, (1, 1, page_size, width))
        page_rows = jnp.where(inside[:, None], new, old[0, 0])[None, None]
        return jax.lax.dynamic_update_slice(stack, page_rows, start)

    return jax.lax.fori_loop(0, batch * touched, write, stack)
