"""Values that are no numbers: how a step tells that its logits hold NaN or infinity, and what a user reads then.

A step answers with tokens. Where its model gave no finite logits it answers with a negative number in place of a token,
which says at which position that was; nothing more is computed or sent for it than a reduction over values that are
there anyway. Only rows and positions that count are looked at: padding, and cache slots that were never written, may
hold anything.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glm52_jax.params.init import leaf_at
from glm52_jax.params.quantization import BlockQuantized
from sharding.errors import InputError

NOWHERE = jnp.iinfo(jnp.int32).max
"""No position: what the least one of none is."""
_OF_DRAFTS = 1 << 30  # added to a position where it is the MTP layer's output that is not finite
# Weights that only choose. A score that is NaN is never the best, so NaN in one of them can end in a finite but wrong
# choice that no logit shows.
_CHOOSING = ("indexer.q_b", "indexer.k", "indexer.k_norm", "indexer.k_norm_bias", "indexer.weights")
_CHOOSING += ("moe.router", "moe.router_bias")


def is_finite(values: jax.Array) -> jax.Array:
    """Whether all values of the last dimension are finite, bool `[...]`."""
    return jnp.all(jnp.isfinite(values), axis=-1)


def mark_not_finite(tokens: jax.Array, whole: jax.Array, positions: jax.Array, *, of_drafts: bool = False) -> jax.Array:
    """`tokens`; where `whole` is false, a negative number that says at which of `positions` values are not finite."""
    return jnp.where(whole, tokens, -1 - positions - (_OF_DRAFTS if of_drafts else 0))


def refuse_not_finite(row: int, token: int, prompt_length: int) -> None:
    """Raises when a step answered with a mark in place of a token.

    Args:
        row: of the batch, from 0.

    Raises:
        InputError: naming the prompt and the position.
    """
    if token >= 0:
        return
    # Of a prompt this is the first position of a chunk that what is wrong spreads to, at or before the one it is from.
    of_drafts, position = divmod(-1 - token, _OF_DRAFTS)
    where = "in the prompt" if position < prompt_length else "after the prompt"
    whose = "the MTP layer's output" if of_drafts else "the model's output"
    raise InputError(
        f"prompt {row + 1}: {whose} is NaN or infinite from position {position} on, {where}, so no token can be "
        "chosen; a weight is damaged or overflows its type (glm52 verify compares every weight with its source)"
    )


def check_selection_scores(params: dict[str, Any]) -> None:
    """Refuses NaN and infinity in weights that only choose positions or experts; all others show in the logits.

    Raises:
        InputError: naming the parameter and the first of its layers that holds such a value.
    """
    held = {path: leaf for path in _CHOOSING if (leaf := leaf_at(params, path)) is not None}
    for path, whole in _whole_layers(held).items():
        layers = np.flatnonzero(~np.asarray(whole))
        if layers.size:
            raise InputError(
                f"parameter {path} holds NaN or infinity in entry {layers[0]} of its {len(whole)} layers, so what is "
                "chosen by it is wrong (glm52 verify compares every weight with its source)"
            )


@jax.jit
def _whole_layers(held: dict[str, Any]) -> dict[str, jax.Array]:
    """For each stacked parameter whether a layer's values are finite, bool `[layers]`."""

    def one(leaf: Any) -> jax.Array:
        arrays = [leaf.codes, leaf.scales] if isinstance(leaf, BlockQuantized) else [leaf]
        found = [jnp.isfinite(a.astype(jnp.float32)).reshape(len(a), -1).all(axis=1) for a in arrays]
        return jnp.all(jnp.stack(found), axis=0)

    return {path: one(leaf) for path, leaf in held.items()}
