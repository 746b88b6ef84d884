"""The indexer: one key a token, scores of all cached positions, and the `Selection` made of the best.

Source: DeepSeek-V3.2 (arXiv 2512.02556, section 2.1) with GLM's rotary layout: the first `qk_rope_head_dim` dimensions
of queries and keys are rotated, in adjacent pairs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from glm52_jax.cache.page_sharding import PageSharding, TokenPositions
from glm52_jax.cache.paged_cache import PagedCache
from glm52_jax.cache.row_formats import RowStack, is_hadamard
from glm52_jax.config import ModelConfig
from glm52_jax.kernels.cache_write.new_rows import IndexKeyTransform
from glm52_jax.kernels.index_scores.api import index_scores
from glm52_jax.kernels.index_scores.reference import map_tokens
from glm52_jax.kernels.index_topk.api import index_topk
from glm52_jax.kernels.lib.layers import Rotary, hadamard
from glm52_jax.kernels.lib.selection import Selection
from glm52_jax.kernels.linear import linear
from glm52_jax.kernels.topk.api import compact, kth_best, topk, topk_mask
from glm52_jax.model.sharded_matmul import column_parallel
from glm52_jax.params.axis_rules import query_gather_axes
from sharding.collectives import all_gather, all_to_all
from sharding.layout import SINGLE, Layout

BLOCK_SCORES = 1 << 26
"""float32 scores that are there at a time."""

K_NORM_EPS = 1e-6  # a LayerNorm with its own epsilon, in every implementation; no config field


def index_keys(weights: dict[str, Any], config: ModelConfig, x: jax.Array, rotary: Rotary) -> jax.Array:
    """Index keys `[batch, tokens, index_head_dim]`, float32, of normalised hidden states `x`."""
    return index_key_transform(weights, config, rotary)(project_keys(weights, x))


def project_keys(weights: dict[str, Any], x: jax.Array) -> jax.Array:
    """What index keys are made of, float32 `[batch, tokens, index_head_dim]`."""
    return linear(x, weights["k"], dtype=jnp.float32)


def index_key_transform(
    weights: dict[str, Any], config: ModelConfig, rotary: Rotary, *, hadamard_rotated: bool = False
) -> IndexKeyTransform:
    """Transform from a projected index key to the cached row: norm, rotary embedding, optional Hadamard rotation."""
    interleave = config.indexer_rope_interleave
    return IndexKeyTransform(
        weights["k_norm"], weights["k_norm_bias"], rotary, K_NORM_EPS, interleave, hadamard_rotated
    )


def hadamard_if_stored(queries: jax.Array, index_keys: RowStack) -> jax.Array:
    """Index queries, turned by the Hadamard rotation where a cache's format has it.

    The rotation is orthogonal, so scores stay what they are as long as keys and queries are both turned, which the
    format of the cache decides for both. It spreads a large value over the whole key, before that is rounded.
    """
    return hadamard(queries) if is_hadamard(index_keys) else queries


def index_queries(
    weights: dict[str, Any], config: ModelConfig, q_latent: jax.Array, rotary: Rotary, layout: Layout = SINGLE
) -> jax.Array:
    """Index queries `[batch, tokens, index_n_heads, index_head_dim]`, float32, of the normalised query latent."""

    def own_heads(rows: jax.Array) -> jax.Array:
        return linear(rows, weights["q_b"], dtype=jnp.float32).reshape(rows.shape[0], -1)

    queries = column_parallel(layout, "index_heads", q_latent.reshape(-1, q_latent.shape[-1]), own_heads)
    queries = queries.reshape(*q_latent.shape[:2], config.index_n_heads, config.index_head_dim)
    return _rotate_first(config, queries, rotary)


def head_weights(weights: dict[str, Any], config: ModelConfig, x: jax.Array, layout: Layout = SINGLE) -> jax.Array:
    """float32 `[batch, tokens, index_n_heads]`: weight of each head, with the scales of heads and width folded in."""
    scale = config.index_n_heads**-0.5 * config.index_head_dim**-0.5
    own_heads, rows = weights["weights"].astype(jnp.float32), x.astype(jnp.float32).reshape(-1, x.shape[-1])
    found = column_parallel(layout, "index_heads", rows, lambda rows: linear(rows, own_heads))
    return found.reshape(*x.shape[:2], -1) * scale


def select_positions(
    weights: dict[str, Any],
    config: ModelConfig,
    x: jax.Array,
    q_latent: jax.Array,
    rotary: Rotary,
    cache: PagedCache,
    indexer: jax.Array | int,
    places: TokenPositions,
    *,
    as_mask: bool,
    backend: str,
    layout: Layout = SINGLE,
) -> Selection:
    """The `index_topk` best positions for each query, of those up to its own.

    On a mesh every device scores what it keeps of the cache for all queries that ask it
    (`axis_rules.query_gather_axes`). Its
    selection are those of the best of all devices that it keeps, by its own places: together exactly what one device
    would select.

    Args:
        weights: one layer of the indexer stack.
        x: normalised hidden states `[batch, tokens, embed]`, whose index keys are already in the cache.
        q_latent: normalised query latent `[batch, tokens, q_lora_rank]`.
        indexer: ordinal of the indexer in the stack of index keys.
        places: where the tokens stand.
        as_mask: give the mask form.
    """
    tokens = query_gather_axes(layout)
    queries = hadamard_if_stored(index_queries(weights, config, q_latent, rotary, layout), cache.index_keys)
    parts = (
        all_gather(layout, queries, tokens, 1),
        all_gather(layout, head_weights(weights, config, x, layout), tokens, 1),
        places.last_visible,
    )

    k = min(config.index_topk, cache.capacity)
    alone = not layout.axes_of("kv_pages")
    stored = cache.index_keys, indexer, cache.page_table

    # Scores of a long chunk with a long context are never there all at once.
    rows = max(1, BLOCK_SCORES // (x.shape[0] * cache.capacity))
    if as_mask:

        def marked(part: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            queries, heads, last_visible = part
            return topk_mask(index_scores(queries, heads, *stored, last_visible, backend=backend), k, backend=backend)

        if alone:
            return Selection(mask=map_tokens(marked, parts, rows))
        queries, heads, last_visible = parts
        found = index_scores(queries, heads, *stored, last_visible, backend=backend)
        score, position = _kth_best(layout, config, cache, *topk(found, k, backend=backend), backend)
        place = PageSharding.of(layout, cache).positions(jnp.arange(cache.capacity))
        better = (found > score[..., None]) | ((found == score[..., None]) & (place <= position[..., None]))
        return Selection(mask=better & (found > -jnp.inf))

    def best(part: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        queries, heads, last_visible = part
        return index_topk(queries, heads, *stored, last_visible, k, backend=backend)

    indices, found = map_tokens(best, parts, rows)
    if alone:
        return Selection(indices=indices)
    score, position = _kth_best(layout, config, cache, indices, found, backend)
    place = PageSharding.of(layout, cache).positions(indices)
    better = (found > score[..., None]) | ((found == score[..., None]) & (place <= position[..., None]))
    # Of most lists little is left, and whoever goes through one should not pay for the rest.
    return Selection(indices=compact(jnp.where(better, indices, -1), backend=backend))


def _kth_best(
    layout: Layout, config: ModelConfig, cache: PagedCache, indices: jax.Array, scores: jax.Array, backend: str
) -> tuple[jax.Array, jax.Array]:
    """Score and position of the last one that is selected, over all devices, for each query.

    One of `index_topk`, in the order of selection: higher score first, then lower position. What comes before it on any
    device is selected too. Each device finds it for some of the queries, from every device's own best.

    Args:
        indices, scores: `[batch, tokens, k]`, this device's best.

    Returns:
        float32 and int32 `[batch, tokens]`; minus infinity where there are no `index_topk` positions to select from.
    """
    axes = layout.axes_of("kv_pages")
    count, shape = layout.size(axes), indices.shape
    places = PageSharding.of(layout, cache).positions(indices)
    pad = -(shape[0] * shape[1]) % count

    def exchanged(values: jax.Array, fill: float) -> jax.Array:
        """Every device's values for the queries that this device decides, `[queries, count * k]`."""
        rows = jnp.pad(values.reshape(-1, shape[2]), ((0, pad), (0, 0)), constant_values=fill)
        rows = all_to_all(layout, rows.reshape(count, -1, shape[2]), axes)
        return jnp.moveaxis(rows, 0, 1).reshape(rows.shape[1], -1)

    ranked, places = exchanged(scores, -jnp.inf), exchanged(places, -1)
    last = kth_best(ranked, places, min(config.index_topk, ranked.shape[1]), backend=backend)
    found = (all_gather(layout, values, axes) for values in last)
    score, position = (values[: shape[0] * shape[1]].reshape(shape[:2]) for values in found)
    return score, position


def _rotate_first(config: ModelConfig, x: jax.Array, rotary: Rotary) -> jax.Array:
    width = config.qk_rope_head_dim
    rotated = rotary.rotate(x[..., :width], interleave=config.indexer_rope_interleave)
    return jnp.concatenate([rotated, x[..., width:]], axis=-1)
