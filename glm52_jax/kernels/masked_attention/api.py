"""Signature of dense attention under a mask."""

from __future__ import annotations

import jax

from glm52_jax.kernels import implementation
from glm52_jax.kernels.masked_attention.cpu import masked_attention_blocked
from glm52_jax.kernels.masked_attention.reference import masked_attention_reference

_IMPLEMENTATIONS = {
    "reference": masked_attention_reference,
    "cpu": masked_attention_blocked,
    "tpu": "glm52_jax.kernels.masked_attention.tpu:masked_attention_tpu",
}


def masked_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    scale: float,
    *,
    backend: str,
) -> jax.Array:
    """Softmax attention of a chunk of queries to its context where `mask` is true.

    Args:
        queries: `[batch, tokens, heads, dim]`.
        keys: `[batch, positions, heads, dim]`.
        values: `[batch, positions, heads, value_dim]`.
        positions: int32 `[batch, tokens]` of the queries, -1 for padding; nothing after them is attended to.
        mask: bool `[batch, tokens, positions]`.
        scale: factor of the scores.
        backend: see `kernels.resolve_backend`.

    Returns:
        `[batch, tokens, heads, value_dim]` in the dtype of `queries`; zeros where a query attends to nothing.
    """
    return implementation(_IMPLEMENTATIONS, backend)(queries, keys, values, positions, mask, scale)
