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
from glm52_jax.kernels.lib.stacks import layer_of
from glm52_jax.kernels.linear import linear, swiglu
from glm52_jax.kernels.router.api import choose_experts
from glm52_jax.kernels.router.rule import RoutingRule
from glm52_jax.model.dispatch_policy import GATHER, DispatchPolicy
from glm52_jax.model.expert_dispatch import dispatch_experts
from glm52_jax.model.sharded_matmul import column_parallel, row_parallel
from sharding.collectives import all_gather, order_after
from sharding.layout import SINGLE, Layout


def route(
    weight: jax.Array,
    bias: jax.Array,
    config: ModelConfig,
    x: jax.Array,
    real: jax.Array,
    *,
    backend: str,
    layout: Layout = SINGLE,
) -> tuple[jax.Array, jax.Array]:
    """The experts of each token and their gates, in float32 throughout.

    Args:
        weight: router `[experts, embed]`, or this device's part of it.
        bias: float32 correction bias `[experts]`, or this device's part; it decides the choice only.
        x: `[tokens, embed]`.
        real: bool `[tokens]`, false for padding.
        backend: see `kernels.resolve_backend`.

    Returns:
        experts: int32 `[tokens, num_experts_per_tok]`, -1 for padding and for a token with a score that is NaN.
        gates: float32 of the same shape, zero where there is no expert.
    """
    weight = weight.astype(jnp.float32)
    logits = column_parallel(layout, "router_experts", x.astype(jnp.float32), lambda rows: linear(rows, weight))
    bias = all_gather(layout, bias, layout.axes_of("router_experts"))
    experts, gates, _ = choose_experts(logits, bias, real, routing_rule(config), backend=backend)
    return experts, gates


def routing_rule(config: ModelConfig) -> RoutingRule:
    """How a model's router chooses."""
    return RoutingRule(
        k=config.num_experts_per_tok,
        groups=config.n_group,
        kept_groups=config.topk_group,
        normalise=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
    )


def moe(
    stack: dict[str, Any],
    config: ModelConfig,
    layer: jax.Array | int,
    x: jax.Array,
    real: jax.Array,
    *,
    backend: str,
    layout: Layout = SINGLE,
    dispatch: DispatchPolicy = GATHER,
) -> tuple[jax.Array, jax.Array]:
    """One MoE layer.

    Args:
        stack: the whole MoE stack; the experts stay in it, so that a kernel reads them there.
        layer: which layer of the stack.
        x: normalised hidden states `[batch, tokens, embed]`.
        real: bool `[batch, tokens]`, false for padding, which is not routed.
        dispatch: how tokens reach experts on other devices.

    Returns:
        `[batch, tokens, embed]`, NaN for a token with such a score of the router, and the chosen experts, int32
        `[batch * tokens, num_experts_per_tok]`.
    """
    flat = x.reshape(-1, x.shape[-1])
    router, bias = layer_of((stack["router"], stack["router_bias"]), layer)
    experts, gates = route(router, bias, config, flat, real.reshape(-1), backend=backend, layout=layout)
    weights = stack["gate_up"], stack["down"]
    if layout.devices == 1:
        routed = routed_experts(flat, experts, gates, *weights, layer, backend=backend)
    else:
        routed = dispatch_experts(layout, flat, experts, gates, *weights, layer, backend=backend, form=dispatch)
    # A real token without experts has a NaN among its scores, which would not show in a sum over no experts.
    lost = real.reshape(-1) & (experts[:, 0] < 0)
    routed = jnp.where(lost[:, None], jnp.nan, routed)
    shared = sharded_mlp(
        layout, order_after(layout, flat, routed), stack["shared_gate_up"], stack["shared_down"], layer, backend=backend
    )
    return (routed + shared.astype(jnp.float32)).astype(x.dtype).reshape(x.shape), experts


def sharded_mlp(
    layout: Layout, x: jax.Array, gate_up: Any, down: Any, layer: jax.Array | int, *, backend: str
) -> jax.Array:
    """A dense MLP of which each device has a part of the width; as `swiglu`."""
    dtype = jnp.float32 if layout.axes_of("mlp") else None

    def share(rows: jax.Array) -> jax.Array:
        return swiglu(rows, gate_up, down, layer, dtype=dtype, backend=backend)

    return row_parallel(layout, "mlp", x.reshape(-1, x.shape[-1]), share).astype(x.dtype).reshape(x.shape)
