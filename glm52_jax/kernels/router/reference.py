"""The choice by `lax.top_k`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from glm52_jax.kernels.router.rule import RoutingRule


def choose_experts_reference(
    logits: jax.Array, bias: jax.Array, real: jax.Array, rule: RoutingRule
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `api.choose_experts`."""
    scores = jax.nn.sigmoid(logits)
    real = real & ~jnp.any(jnp.isnan(scores + bias), axis=-1)
    ranked = _within_best_groups(scores + bias, rule)
    _, experts = jax.lax.top_k(ranked, rule.k)
    gates = jnp.take_along_axis(scores, experts, axis=-1)
    if rule.normalise:
        gates = gates / (jnp.sum(gates, axis=-1, keepdims=True) + 1e-20)
    experts = jnp.where(real[:, None], experts, -1)
    counts = jnp.sum(experts.reshape(-1, 1) == jnp.arange(logits.shape[1]), axis=0, dtype=jnp.int32)
    return experts, jnp.where(real[:, None], gates * rule.scale, 0.0), counts


def _within_best_groups(ranked: jax.Array, rule: RoutingRule) -> jax.Array:
    """Minus infinity outside of the best groups."""
    if rule.kept_groups == rule.groups:
        return ranked
    grouped = ranked.reshape(ranked.shape[0], rule.groups, -1)
    best_two, _ = jax.lax.top_k(grouped, 2)
    _, groups = jax.lax.top_k(jnp.sum(best_two, axis=-1), rule.kept_groups)
    kept = jnp.any(groups[:, :, None] == jnp.arange(rule.groups), axis=1)
    return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(ranked.shape)
