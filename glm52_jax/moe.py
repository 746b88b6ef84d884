"""Mixture of experts: the router's choice, the routed experts, the shared expert. No token is ever dropped.

Source: DeepSeek-V3 (arXiv 2412.19437, section 2.1.2): sigmoid scores, a correction bias that decides the choice and
never the mixing weight ("noaux_tc").
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from glm52_jax.config import ModelConfig
from glm52_jax.kernels.experts.api import routed_experts
from glm52_jax.moe_dispatch import dispatch_experts
from glm52_jax.moe_form import GATHER, DispatchForm
from glm52_jax.primitives import linear, swiglu, take
from sharding.collectives import psum
from sharding.layout import SINGLE, Layout


def route(
    weight: jax.Array, bias: jax.Array, config: ModelConfig, x: jax.Array, real: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The experts of each token and their gates, in float32 throughout.

    Args:
        weight: router `[experts, embed]`.
        bias: float32 correction bias `[experts]`; it decides the choice only.
        x: `[tokens, embed]`.
        real: bool `[tokens]`, false for padding.

    Returns:
        experts: int32 `[tokens, num_experts_per_tok]`, -1 for padding.
        gates: float32 of the same shape, zero for padding.
    """
    scores = jax.nn.sigmoid(linear(x.astype(jnp.float32), weight.astype(jnp.float32)))
    ranked = _within_best_groups(scores + bias, config)
    _, experts = jax.lax.top_k(ranked, config.num_experts_per_tok)
    gates = jnp.take_along_axis(scores, experts, axis=-1)
    if config.norm_topk_prob:
        gates = gates / (jnp.sum(gates, axis=-1, keepdims=True) + 1e-20)
    gates = gates * config.routed_scaling_factor
    return jnp.where(real[:, None], experts, -1), jnp.where(real[:, None], gates, 0.0)


def _within_best_groups(ranked: jax.Array, config: ModelConfig) -> jax.Array:
    """Minus infinity outside of the `topk_group` best groups; a group is ranked by the sum of its best two."""
    if config.topk_group == config.n_group:
        return ranked
    grouped = ranked.reshape(ranked.shape[0], config.n_group, -1)
    best_two, _ = jax.lax.top_k(grouped, 2)
    _, groups = jax.lax.top_k(jnp.sum(best_two, axis=-1), config.topk_group)
    kept = jnp.any(groups[:, :, None] == jnp.arange(config.n_group), axis=1)
    return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(ranked.shape)


def moe(
    stack: dict[str, Any],
    config: ModelConfig,
    layer: jax.Array | int,
    x: jax.Array,
    real: jax.Array,
    *,
    backend: str,
    layout: Layout = SINGLE,
    dispatch: DispatchForm = GATHER,
) -> tuple[jax.Array, jax.Array]:
    """One MoE layer.

    Args:
        stack: the whole MoE stack; the experts stay in it, so that a kernel reads them there.
        layer: which layer of the stack.
        x: normalised hidden states `[batch, tokens, embed]`.
        real: bool `[batch, tokens]`, false for padding, which is not routed.
        dispatch: how tokens reach experts on other devices.

    Returns:
        `[batch, tokens, embed]`, and the chosen experts, int32 `[batch * tokens, num_experts_per_tok]`.
    """
    flat = x.reshape(-1, x.shape[-1])
    router, bias = take((stack["router"], stack["router_bias"]), layer)
    experts, gates = route(router, bias, config, flat, real.reshape(-1))
    weights = stack["gate_up"], stack["down"]
    if layout.devices == 1:
        routed = routed_experts(flat, experts, gates, *weights, layer, backend=backend)
    else:
        routed = dispatch_experts(layout, flat, experts, gates, *weights, layer, backend=backend, form=dispatch)
    shared = sharded_mlp(layout, flat, stack["shared_gate_up"], stack["shared_down"], layer, backend=backend)
    return (routed + shared.astype(jnp.float32)).astype(x.dtype).reshape(x.shape), experts


def sharded_mlp(
    layout: Layout, x: jax.Array, gate_up: Any, down: Any, layer: jax.Array | int, *, backend: str
) -> jax.Array:
    """A dense MLP of which each device has a part of the width; as `swiglu`."""
    axes = layout.axes_of("mlp")
    out = swiglu(x, gate_up, down, layer, dtype=jnp.float32 if axes else None, backend=backend)
    return psum(layout, out, axes).astype(x.dtype)
