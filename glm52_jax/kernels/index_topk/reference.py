"""One operation after the other."""

from __future__ import annotations

import jax

from glm52_jax.cache.row_formats import RowStack
from glm52_jax.kernels.index_scores.api import index_scores
from glm52_jax.kernels.topk.api import topk


def index_topk_separate(
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
    """See `api.index_topk`; every backend has forms of both operations."""
    scores = index_scores(queries, head_weights, keys, indexer, page_table, positions, backend=backend)
    return topk(scores, k, backend=backend)
