"""Signature of the routed experts."""

from __future__ import annotations

import jax

from glm52_jax.kernels import implementation
from glm52_jax.kernels.experts.cpu import routed_experts_sorted
from glm52_jax.kernels.experts.reference import routed_experts_reference
from glm52_jax.params.quantization import Weight

_IMPLEMENTATIONS = {
    "reference": routed_experts_reference,
    "cpu": routed_experts_sorted,
    "tpu": "glm52_jax.kernels.experts.tpu:routed_experts",
}


def routed_experts(
    x: jax.Array,
    experts: jax.Array,
    gates: jax.Array,
    gate_up: Weight,
    down: Weight,
    layer: jax.Array | int,
    *,
    backend: str,
) -> jax.Array:
    """`sum_e gate_e * down_e(silu(gate_e x) * up_e x)` over the experts that each token chose; no token is dropped.

    Args:
        x: `[tokens, embed]`.
        experts: int32 `[tokens, k]`, -1 throughout for padding, which costs nothing where the form can tell.
        gates: float32 `[tokens, k]`.
        gate_up: stack `[layers, experts, 2, width, embed]`, plain or in FP8 blocks.
        down: stack `[layers, experts, embed, width]`.
        layer: which layer of the stacks.
        backend: see `kernels.resolve_backend`.

    Returns:
        float32 `[tokens, embed]`; the result of a token does not depend on the other ones.
    """
    return implementation(_IMPLEMENTATIONS, backend)(x, experts, gates, gate_up, down, layer)
