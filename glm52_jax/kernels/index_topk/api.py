"""Signature of the selection by index scores."""

from __future__ import annotations

import jax

from glm52_jax.cache.row_formats import RowStack
from glm52_jax.kernels import implementation
from glm52_jax.kernels.index_topk.reference import index_topk_separate

_IMPLEMENTATIONS = {"reference": index_topk_separate, "tpu": "glm52_jax.kernels.index_topk.tpu:index_topk"}


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
) -> tuple[jax.Array, jax.Array]:
    """`topk` of the `index_scores`: the `k` best positions for every query, of those that it may see.

    Args:
        queries, head_weights, keys, indexer, page_table, positions: see `index_scores`.
        k: how many to choose, at most the capacity of a sequence.
        backend: see `kernels.resolve_backend`. For TPUs, the scores of few queries stay in vector memory.

    Returns:
        int32 `[batch, tokens, k]`, -1 where fewer than `k` can be chosen; float32 of the same shape: their scores,
        minus infinity there. The order is as that of `topk`.
    """
    find = implementation(_IMPLEMENTATIONS, backend)
    return find(queries, head_weights, keys, indexer, page_table, positions, k, backend=backend)
