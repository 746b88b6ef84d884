"""The multi-token-prediction layer: from a hidden state and the token that followed it, the token after that.

It is one more decoder layer (number `num_hidden_layers` of the stacks, with its own indexer and its own cache rows)
behind a projection of [norm of the next token's embedding, norm of the hidden state], in that order. Its output after
`shared_head.norm` goes to the model's head and, in a chain of drafts, back in as the next hidden state.

Source: DeepSeek-V3 (arXiv 2412.19437, section 2.2), with GLM-5.2's differences: hidden states enter after their final
norm, and later draft steps reuse the first one's selection (`index_share_for_mtp_iteration`).
"""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp

from glm52_jax.cache.page_sharding import TokenPositions
from glm52_jax.cache.paged_cache import PagedCache
from glm52_jax.config import ModelConfig
from glm52_jax.kernels.lib.layers import Rotary, rms_norm
from glm52_jax.kernels.lib.selection import Selection
from glm52_jax.kernels.linear import linear
from glm52_jax.model.decoder_layer import ExecutionPolicy, LayerIndex, decoder_layer
from glm52_jax.model.embedding import embed_tokens, project_logits
from sharding.collectives import order_after
from sharding.layout import SINGLE, Layout


def mtp_layer(
    params: dict[str, Any],
    config: ModelConfig,
    hidden: jax.Array,
    next_tokens: jax.Array,
    positions: jax.Array,
    cache: PagedCache,
    policy: ExecutionPolicy,
    *,
    selection: Selection | None = None,
) -> tuple[jax.Array, PagedCache, Selection]:
    """Runs the MTP layer over a chunk.

    Args:
        hidden: `[batch, tokens, embed]`, of the model after its final norm, or of this layer in a chain of drafts.
        next_tokens: int32 `[batch, tokens]`, the token after each of them.
        positions: int32 `[batch, tokens]` of the hidden states, -1 for padding.
        selection: what to attend to in place of the own indexer's choice.

    Returns:
        The layer's output after its final norm `[batch, tokens, embed]`, the cache with this layer's rows, and the
        selection that was used.
    """
    chex.assert_rank(hidden, 3)
    chex.assert_equal_shape((next_tokens, positions))
    chex.assert_equal_shape_prefix((hidden, positions), 2)
    weights = params["mtp"]
    next_tokens, positions = order_after(policy.layout, (next_tokens, positions), hidden)
    embedding = embed_tokens(weights.get("embed", params["embed"]), next_tokens, hidden.dtype, policy.layout)
    x = jnp.concatenate(
        [
            rms_norm(embedding, weights["embed_norm"], config.rms_norm_eps),
            rms_norm(hidden, weights["hidden_norm"], config.rms_norm_eps),
        ],
        axis=-1,
    )
    x = linear(x, weights["project"])
    rotary = Rotary.at(positions, config.qk_rope_head_dim, config.rope_theta)
    place = LayerIndex.of_mtp(config, own_selection=selection is None)
    if selection is None:
        selection = policy.no_selection(config, cache, *positions.shape)
    places = TokenPositions.of(policy.layout, cache, positions)
    x, cache, selection, _ = decoder_layer(params, config, place, x, rotary, places, cache, selection, policy)
    return rms_norm(x, weights["norm"], config.rms_norm_eps), cache, selection


def mtp_logits(params: dict[str, Any], hidden: jax.Array, layout: Layout = SINGLE) -> jax.Array:
    """float32 `[..., vocab]` of the layer's output, by the model's own head unless the file has another."""
    return project_logits(params["mtp"].get("head", params["head"]), hidden, layout)
