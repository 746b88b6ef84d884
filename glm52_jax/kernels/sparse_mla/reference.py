"""Plain sparse attention: gather the selected rows, or read the context densely under a mask."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from glm52_jax.cache.pages import context_rows, gather_rows
from glm52_jax.cache.row_formats import RowStack, parts_of
from glm52_jax.kernels.index_scores.reference import map_tokens
from glm52_jax.kernels.lib.products import einsum
from glm52_jax.kernels.lib.selection import Selection

_BLOCK_VALUES = 1 << 26  # of the rows that are gathered at a time


def sparse_mla_reference(
    queries: jax.Array,
    latent: RowStack,
    layer: jax.Array | int,
    page_table: jax.Array,
    positions: jax.Array,
    selection: Selection,
    scale: float,
    kv_lora_rank: int,
) -> tuple[jax.Array, jax.Array]:
    """See `api.sparse_mla`."""
    if selection.indices is not None:
        capacity = page_table.shape[1] * next(iter(parts_of(latent).values())).shape[2]

        def attend(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            q, indices = part
            rows = gather_rows(latent, layer, page_table, indices.reshape(indices.shape[0], -1)).astype(q.dtype)
            rows = rows.reshape(*indices.shape, -1)
            scores = einsum("bshw,bskw->bshk", q, rows, dtype=jnp.float32) * scale
            weights, lse = masked_softmax(scores, ((indices >= 0) & (indices < capacity))[:, :, None])
            return einsum("bshk,bskr->bshr", weights.astype(q.dtype), rows[..., :kv_lora_rank]), lse

        # The selected rows of a long chunk are never there all at once.
        values = queries.shape[0] * selection.indices.shape[-1] * queries.shape[-1]
        return map_tokens(attend, (queries, selection.indices), max(1, _BLOCK_VALUES // values))
    assert selection.mask is not None
    rows = context_rows(latent, layer, page_table, jnp.max(positions, axis=1) + 1).astype(queries.dtype)
    scores = einsum("bshw,btw->bsht", queries, rows, dtype=jnp.float32) * scale
    weights, lse = masked_softmax(scores, selection.mask[:, :, None])
    return einsum("bsht,btr->bshr", weights.astype(queries.dtype), rows[..., :kv_lora_rank]), lse


def masked_softmax(scores: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Softmax over the last dimension where `mask` is true, zeros where a row has nothing; and the log-sum-exp."""
    scores = jnp.where(mask, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    lse = jnp.where(total > 0, jnp.log(total) + top, -jnp.inf)
    return weights / jnp.where(total > 0, total, 1.0), lse[..., 0]
