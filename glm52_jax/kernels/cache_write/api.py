"""Signature of the cache write."""

from __future__ import annotations

import jax

from glm52_jax.cache.row_formats import RowStack
from glm52_jax.kernels import implementation
from glm52_jax.kernels.cache_write.new_rows import RowTransform
from glm52_jax.kernels.cache_write.reference import write_rows_reference

_IMPLEMENTATIONS = {"reference": write_rows_reference, "tpu": "glm52_jax.kernels.cache_write.tpu:write_rows"}


def write_rows(
    stack: RowStack,
    layer: jax.Array | int,
    values: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    *,
    transform: RowTransform | None = None,
    backend: str,
) -> RowStack:
    """The stack with one row for each token written at `positions` of one layer, in place where the stack is donated.

    A position without a slot (see `cache.slots`) is not written: one that is negative, at or past the capacity of the
    table, or in a page that is none of the pool's. Tiles of eight rows are read, changed and written back, so two
    sequences of a call must not write to one page: a page that sequences share has to be whole.

    Args:
        stack: `[layers, pages, page_size, width]`, or `PackedStack` of such rows.
        layer: which layer of the stack.
        values: `[batch, tokens, width]`, what the rows are made of; cast or quantised to what the stack has.
        page_table: int32 `[batch, pages_per_sequence]`.
        positions: int32 `[batch, tokens]`, -1 for what is not to be written: padding, or tokens that another device
            keeps. The others of a sequence are consecutive positions, in the order of their columns, and those of a
            page are in adjacent columns.
        making: how a row is made of its values; None where they are the row.
        backend: see `kernels.resolve_backend`.
    """
    return implementation(_IMPLEMENTATIONS, backend)(stack, layer, values, page_table, positions, transform)
