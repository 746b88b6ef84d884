"""Multi-head latent attention: the projections, and its two equal forms.

*Absorbed*: the key up-projection is moved to the query and the value up-projection to the output, so that attention
runs on the cached latent rows themselves; right for few queries and for sparse ones. *Expanded*: keys and values of
every head are computed from the latent rows first; fewer operations for a long chunk of queries.

Source: DeepSeek-V2 (arXiv 2405.04434, section 2.1); names of weights as in the parameter table.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from glm52_jax.cache.page_sharding import TokenPositions
from glm52_jax.cache.paged_cache import PagedCache
from glm52_jax.cache.pages import context_rows
from glm52_jax.config import ModelConfig
from glm52_jax.kernels.cache_write.new_rows import LatentRowTransform
from glm52_jax.kernels.lib.layers import Rotary, rms_norm
from glm52_jax.kernels.lib.products import einsum
from glm52_jax.kernels.lib.selection import Selection
from glm52_jax.kernels.linear import linear
from glm52_jax.kernels.masked_attention.api import masked_attention
from glm52_jax.kernels.sparse_mla.api import sparse_mla
from glm52_jax.params.axis_rules import query_gather_axes
from sharding.collectives import all_gather, local_shard, pmax, psum, psum_scatter
from sharding.layout import SINGLE, Layout


class Projected(NamedTuple):
    """What attention and indexer need of a chunk of tokens.

    Attributes:
        q_nope: `[batch, tokens, heads, qk_nope_head_dim]`.
        q_rope: `[batch, tokens, heads, qk_rope_head_dim]`, rotated.
        kv: `[batch, tokens, latent_width]`, of which `latent_row_transform` makes the row that the cache keeps.
        q_latent: `[batch, tokens, q_lora_rank]`, normalised; input of the index queries.
    """

    q_nope: jax.Array
    q_rope: jax.Array
    kv: jax.Array
    q_latent: jax.Array


def project(weights: dict[str, Any], config: ModelConfig, x: jax.Array, rotary: Rotary) -> Projected:
    """Queries, and what latent rows are made of, of normalised hidden states `x` `[batch, tokens, embed]`."""
    q_latent = _biased(linear(x, weights["q_a"]), weights.get("q_a_bias"))
    q_latent = rms_norm(q_latent, weights["q_a_norm"], config.latent_norm_eps)
    q = linear(q_latent, weights["q_b"])
    return Projected(
        q_nope=q[..., : config.qk_nope_head_dim],
        q_rope=rotary.rotate(q[..., config.qk_nope_head_dim :], interleave=config.rope_interleave),
        kv=_biased(linear(x, weights["kv_a"]), weights.get("kv_a_bias")),
        q_latent=q_latent,
    )


def latent_row_transform(weights: dict[str, Any], config: ModelConfig, rotary: Rotary) -> LatentRowTransform:
    """How the row of a token is made: its latent is normalised, its rope key rotated."""
    return LatentRowTransform(weights["kv_a_norm"], rotary, config.latent_norm_eps, config.rope_interleave)


def attention(
    weights: dict[str, Any],
    config: ModelConfig,
    projected: Projected,
    cache: PagedCache,
    layer: jax.Array | int,
    places: TokenPositions,
    selection: Selection,
    *,
    expanded: bool,
    backend: str,
    layout: Layout = SINGLE,
) -> jax.Array:
    """Attention of a chunk to the selected positions of its cache, and the output projection.

    On a mesh a device has some heads of its own tokens, and of the cache the pages that are dealt to it.

    Args:
        weights: one layer of the attention stack.
        projected: of the chunk, whose rows are already in the cache.
        places: where its tokens stand.
        selection: what each query that asks this device attends to here; a mask when `expanded`.

    Returns:
        `[batch, tokens, embed]`.
    """
    form = _expanded if expanded else _absorbed
    values = form(weights, config, projected, cache, layer, places, selection, backend, layout)
    heads = layout.axes_of("heads")
    out = linear(values, weights["o"], dims=2, dtype=jnp.float32 if heads else None)
    return _biased(psum(layout, out, heads).astype(values.dtype), weights.get("o_bias"))


def _absorbed(
    weights: dict[str, Any],
    config: ModelConfig,
    projected: Projected,
    cache: PagedCache,
    layer: jax.Array | int,
    places: TokenPositions,
    selection: Selection,
    backend: str,
    layout: Layout,
) -> jax.Array:
    # In this order of operands: XLA on the CPU has no batched bfloat16 product with a float32 result for the other one.
    queries = einsum("hnr,bshn->bshr", weights["k_up"], projected.q_nope, dtype=projected.q_nope.dtype)
    queries = jnp.concatenate([queries, projected.q_rope], axis=-1)
    # Every device has a part of the cache, so every query visits all that have another one.
    queries = all_gather(
        layout, all_gather(layout, queries, query_gather_axes(layout), 1), _heads_apart_from_pages(layout), 2
    )
    latent, lse = sparse_mla(
        queries,
        cache.latent,
        layer,
        cache.page_table,
        places.last_visible,
        selection,
        config.qk_head_dim**-0.5,
        kv_lora_rank=config.kv_lora_rank,
        expected=expected_row_count(config, cache, layout),
        backend=backend,
    )
    latent = _merged(layout, latent, lse)
    return einsum("bshr,hvr->bshv", latent, weights["v_up"])


def expected_row_count(config: ModelConfig, cache: PagedCache, layout: Layout) -> int:
    """Rows of this device that a query attends to, on average over a long context."""
    parts = layout.parts("kv_pages")
    return -(-min(config.index_topk, cache.capacity * parts) // parts)


def _expanded(
    weights: dict[str, Any],
    config: ModelConfig,
    projected: Projected,
    cache: PagedCache,
    layer: jax.Array | int,
    places: TokenPositions,
    selection: Selection,
    backend: str,
    layout: Layout,
) -> jax.Array:
    assert selection.mask is not None
    rows = context_rows(cache.latent, layer, cache.page_table, jnp.max(places.last_visible, axis=1) + 1)
    # Keys and values of a device's own heads need the rows of all devices; in which order does not matter.
    pages = layout.axes_of("kv_pages")
    rows = all_gather(layout, rows.astype(projected.kv.dtype), pages, 1)
    mask = local_shard(layout, all_gather(layout, selection.mask, pages, 2), query_gather_axes(layout), 1)
    positions = jnp.where(places.positions >= 0, mask.shape[2] - 1, -1) if pages else places.positions
    latent, k_rope = rows[..., : config.kv_lora_rank], rows[..., config.kv_lora_rank :]
    k_nope = linear(latent, weights["k_up"])
    k_rope = jnp.broadcast_to(k_rope[:, :, None], (*k_nope.shape[:3], k_rope.shape[-1]))
    return masked_attention(
        jnp.concatenate([projected.q_nope, projected.q_rope], axis=-1),
        jnp.concatenate([k_nope, k_rope], axis=-1),
        linear(latent, weights["v_up"]),
        positions,
        mask,
        config.qk_head_dim**-0.5,
        backend=backend,
    )


def _heads_apart_from_pages(layout: Layout) -> tuple[str, ...]:
    """Mesh axes along which devices have different heads and different pages."""
    return tuple(axis for axis in layout.axes_of("heads") if axis in layout.axes_of("kv_pages"))


def _merged(layout: Layout, out: jax.Array, lse: jax.Array) -> jax.Array:
    """Softmax attention over all devices' rows from that over each one's, for this device's own tokens and heads.

    Args:
        out: `[batch, asking tokens, all heads, kv_lora_rank]`, over this device's rows.
        lse: float32 `[batch, asking tokens, all heads]`, minus infinity where there are none.
    """
    pages = layout.axes_of("kv_pages")
    if not pages:
        return out
    top = pmax(layout, lse, pages)
    weight = jnp.exp(lse - jnp.where(jnp.isfinite(top), top, 0.0))
    total = psum(layout, weight, pages)
    share = out.astype(jnp.float32) * (weight / jnp.where(total > 0, total, 1.0))[..., None]
    tokens, heads = query_gather_axes(layout), _heads_apart_from_pages(layout)
    share = psum(layout, share, tuple(axis for axis in pages if axis not in (*tokens, *heads)))
    return psum_scatter(layout, psum_scatter(layout, share, heads, 2), tokens, 1).astype(out.dtype)


def _biased(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    return x if bias is None else x + bias
