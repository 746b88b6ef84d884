"""Experts on a TPU: few rows go through every expert in use, many are put in the order of their experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from glm52_jax.kernels import Target
from glm52_jax.kernels.experts import blocks
from glm52_jax.kernels.experts.few import routed_experts_few
from glm52_jax.kernels.experts.grouped import routed_experts_grouped
from glm52_jax.quant import Weight


def routed_experts(
    x: jax.Array,
    experts: jax.Array,
    gates: jax.Array,
    gate_up: Weight,
    down: Weight,
    layer: jax.Array | int,
    *,
    target: Target,
) -> jax.Array:
    """See `api.routed_experts`."""
    tokens = x.shape[0]
    # More tokens than a block of the result has room for are taken a part at a time.
    parts = -(-tokens // blocks.MOST_TOKENS)
    size = -(-tokens // (parts * blocks.TOKENS)) * blocks.TOKENS
    short = parts * size - tokens
    x, experts, gates = (
        jnp.pad(array, ((0, short), (0, 0)), constant_values=fill).reshape(parts, size, -1)
        for array, fill in ((x, 0), (experts, -1), (gates, 0))
    )
    compute = routed_experts_few if size <= blocks.FEW else routed_experts_grouped

    def one(part: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        return compute(*part, gate_up, down, layer, target=target)

    out = one((x[0], experts[0], gates[0])) if parts == 1 else jax.lax.map(one, (x, experts, gates))
    return out.reshape(parts * size, -1)[:tokens]
