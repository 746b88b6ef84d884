"""Plain experts: every expert for every token, one expert at a time, weighted by the gate or by zero."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from glm52_jax.kernels.linear import swiglu
from glm52_jax.params.quantization import Weight


def routed_experts_reference(
    x: jax.Array,
    experts: jax.Array,
    gates: jax.Array,
    gate_up: Weight,
    down: Weight,
    layer: jax.Array | int,
) -> jax.Array:
    """See `api.routed_experts`."""
    count = jax.tree.leaves(down)[0].shape[1]

    def add(total: jax.Array, expert: jax.Array) -> tuple[jax.Array, None]:
        chosen = experts == expert
        out = swiglu(x, gate_up, down, layer, expert).astype(jnp.float32)
        gate = jnp.sum(jnp.where(chosen, gates, 0.0), axis=-1, keepdims=True)
        # `where`, not a product: a padding token may hold NaN.
        return total + jnp.where(jnp.any(chosen, axis=-1, keepdims=True), gate * out, 0.0), None

    start = jnp.zeros(x.shape, jnp.float32)
    return jax.lax.scan(add, start, jnp.arange(count))[0]
