"""Signature of the index scores."""

from __future__ import annotations

import jax

from glm52_jax.cache.row_formats import RowStack
from glm52_jax.kernels import implementation
from glm52_jax.kernels.index_scores.cpu import index_scores_blocked
from glm52_jax.kernels.index_scores.reference import index_scores_reference

_IMPLEMENTATIONS = {
    "reference": index_scores_reference,
    "cpu": index_scores_blocked,
    "tpu": "glm52_jax.kernels.index_scores.tpu:index_scores",
}


def index_scores(
    queries: jax.Array,
    head_weights: jax.Array,
    keys: RowStack,
    indexer: jax.Array | int,
    page_table: jax.Array,
    positions: jax.Array,
    *,
    backend: str,
) -> jax.Array:
    """`sum_h w_h * relu(q_h . k)` of every query with every cached position that it may see.

    Args:
        queries: `[batch, tokens, heads, dim]`, rotated.
        head_weights: float32 `[batch, tokens, heads]`, with the two scale factors folded in.
        keys: stack of index keys `[indexers, pages, page_size, dim]`, plain or quantised; where their format
            rotates them, the queries are rotated too.
        indexer: which indexer of the stack.
        page_table: int32 `[batch, pages_per_sequence]`.
        positions: int32 `[batch, tokens]` of the queries, -1 for padding.
        backend: see `kernels.resolve_backend`.

    Returns:
        float32 `[batch, tokens, capacity]`: minus infinity for positions after the query's own, everywhere for padding
        and where a score is NaN. Zero is always +0.0, so that equal scores are ordered by position alone.

    Source: DeepSeek-V3.2 (arXiv 2512.02556, section 2.1).
    """
    return implementation(_IMPLEMENTATIONS, backend)(queries, head_weights, keys, indexer, page_table, positions)
