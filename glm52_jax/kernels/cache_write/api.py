"""Signature of the cache write."""

from __future__ import annotations

import dataclasses

import jax

from glm52_jax.kernels import form
from glm52_jax.kernels.cache_write.reference import write_pages
from glm52_jax.row_formats import PackedRows, RowStack, encode

_FORMS = {"reference": write_pages}


def write_rows(
    stack: RowStack,
    layer: jax.Array | int,
    rows: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    *,
    backend: str,
) -> RowStack:
    """The stack with `rows` written at `positions` of one layer, in place where the stack is donated.

    Args:
        stack: `[layers, pages, page_size, width]`, or `PackedRows` of such rows.
        layer: which layer of the stack.
        rows: `[batch, tokens, width]`, cast or quantised to what the stack has.
        page_table: int32 `[batch, pages_per_sequence]`.
        positions: int32 `[batch, tokens]`, -1 for what is not to be written: padding, or tokens that another device
            keeps. The others of a sequence are consecutive positions, in the order of their columns.
        backend: see `kernels.resolve_backend`.
    """
    write = form(_FORMS, backend)
    new = encode(stack, rows, layer)
    if not isinstance(stack, PackedRows):
        return write(stack, layer, new["values"], page_table, positions)
    parts = {name: write(part, layer, new[name], page_table, positions) for name, part in stack.parts.items()}
    return dataclasses.replace(stack, parts=parts)
