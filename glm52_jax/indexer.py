"""The indexer: one key a token, scores of all cached positions, and the `Selection` made of the best.

Source: DeepSeek-V3.2 (arXiv 2512.02556, section 2.1) with GLM's rotary layout: the first `qk_rope_head_dim` dimensions
of queries and keys are rotated, in adjacent pairs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from glm52_jax.cache import Cache
from glm52_jax.config import ModelConfig
from glm52_jax.kernels.index_scores.api import index_scores
from glm52_jax.kernels.topk.api import topk_indices, topk_mask
from glm52_jax.primitives import Rotary, hadamard, layer_norm, linear
from glm52_jax.row_formats import RowStack, is_rotated
from glm52_jax.selection import Selection

K_NORM_EPS = 1e-6  # a LayerNorm with its own epsilon, in every implementation; no config field


def index_keys(weights: dict[str, Any], config: ModelConfig, x: jax.Array, rotary: Rotary) -> jax.Array:
    """Index keys `[batch, tokens, index_head_dim]`, float32, of normalised hidden states `x`."""
    keys = linear(x, weights["k"], dtype=jnp.float32)
    keys = layer_norm(keys, weights["k_norm"], weights["k_norm_bias"], K_NORM_EPS)
    return _rotate_first(config, keys, rotary)


def as_stored(values: jax.Array, index_keys: RowStack) -> jax.Array:
    """Index keys or queries, turned by the Hadamard rotation where a cache's format has it.

    The rotation is orthogonal, so scores stay what they are as long as keys and queries are both turned, which the
    format of the cache decides for both. It spreads a large value over the whole key, before that is rounded.
    """
    return hadamard(values) if is_rotated(index_keys) else values


def index_queries(weights: dict[str, Any], config: ModelConfig, q_latent: jax.Array, rotary: Rotary) -> jax.Array:
    """Index queries `[batch, tokens, index_n_heads, index_head_dim]`, float32, of the normalised query latent."""
    return _rotate_first(config, linear(q_latent, weights["q_b"], dtype=jnp.float32), rotary)


def head_weights(weights: dict[str, Any], config: ModelConfig, x: jax.Array) -> jax.Array:
    """float32 `[batch, tokens, index_n_heads]`: weight of each head, with the scales of heads and width folded in."""
    scale = config.index_n_heads**-0.5 * config.index_head_dim**-0.5
    return linear(x.astype(jnp.float32), weights["weights"].astype(jnp.float32)) * scale


def select(
    weights: dict[str, Any],
    config: ModelConfig,
    x: jax.Array,
    q_latent: jax.Array,
    rotary: Rotary,
    cache: Cache,
    indexer: jax.Array | int,
    positions: jax.Array,
    *,
    as_mask: bool,
    backend: str,
) -> Selection:
    """The `index_topk` best positions for each query, of those up to its own.

    Args:
        weights: one layer of the indexer stack.
        x: normalised hidden states `[batch, tokens, embed]`, whose index keys are already in the cache.
        q_latent: normalised query latent `[batch, tokens, q_lora_rank]`.
        indexer: ordinal of the indexer in the stack of index keys.
        as_mask: give the mask form.
    """
    scores = index_scores(
        as_stored(index_queries(weights, config, q_latent, rotary), cache.index_keys),
        head_weights(weights, config, x),
        cache.index_keys,
        indexer,
        cache.page_table,
        positions,
        backend=backend,
    )
    k = min(config.index_topk, cache.capacity)
    if as_mask:
        return Selection(mask=topk_mask(scores, k, backend=backend))
    return Selection(indices=topk_indices(scores, k, backend=backend))


def _rotate_first(config: ModelConfig, x: jax.Array, rotary: Rotary) -> jax.Array:
    width = config.qk_rope_head_dim
    rotated = rotary.rotate(x[..., :width], interleave=config.indexer_rope_interleave)
    return jnp.concatenate([rotated, x[..., width:]], axis=-1)
