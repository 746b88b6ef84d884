"""The embedding and the head of the vocabulary, whole or divided over devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from glm52_jax.kernels.linear import linear
from glm52_jax.model.sharded_matmul import column_parallel, row_parallel
from sharding.collectives import axis_index
from sharding.layout import SINGLE, Layout


def project_logits(head: jax.Array, hidden: jax.Array, layout: Layout = SINGLE) -> jax.Array:
    """float32 `[..., vocab]` of hidden states; on a mesh every device gets those of the whole vocabulary."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    found = column_parallel(layout, "vocab", rows, lambda rows: linear(rows, head, dtype=jnp.float32))
    return found.reshape(*hidden.shape[:-1], -1)


def embed_tokens(table: jax.Array, tokens: jax.Array, dtype: jnp.dtype, layout: Layout = SINGLE) -> jax.Array:
    """Rows of the embedding; a token that is no row of it (padding may be anything) reads the nearest one."""
    axes = layout.axes_of("vocab")
    if not axes:
        return jnp.take(table, tokens, axis=0, mode="clip").astype(dtype)
    rows = table.shape[0]

    def own_rows(tokens: jax.Array) -> jax.Array:
        """One device has the row of a token, the others add zero."""
        row = jnp.clip(tokens, 0, rows * layout.size(axes) - 1) - axis_index(layout, axes) * rows
        found = jnp.take(table, row, axis=0, mode="clip").astype(dtype)
        return jnp.where(((row >= 0) & (row < rows))[..., None], found, jnp.zeros((), dtype))

    return row_parallel(layout, "vocab", tokens.reshape(-1), own_rows).reshape(*tokens.shape, -1)
