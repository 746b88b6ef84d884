"""Signature of the cache write."""

from __future__ import annotations

import jax

from glm52_jax.kernels import form
from glm52_jax.kernels.cache_write.reference import write_pages

_FORMS = {"reference": write_pages}


def write_rows(
    stack: jax.Array,
    layer: jax.Array | int,
    rows: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    *,
    backend: str,
) -> jax.Array:
    """The stack with `rows` written at `positions` of one layer, in place where the stack is donated.

    Args:
        stack: `[layers, pages, page_size, width]`.
        layer: which layer of the stack.
        rows: `[batch, tokens, width]`, cast to the stack's dtype.
        page_table: int32 `[batch, pages_per_sequence]`.
        positions: int32 `[batch, tokens]`, -1 for padding, which writes nothing. The real tokens of a sequence are
            consecutive columns and consecutive positions; padding stands on either side of them.
        backend: see `kernels.resolve_backend`.
    """
    return form(_FORMS, backend)(stack, layer, rows.astype(stack.dtype), page_table, positions)
