"""Signature of the router's choice."""

from __future__ import annotations

import jax

from glm52_jax.kernels import implementation
from glm52_jax.kernels.router.reference import choose_experts_reference
from glm52_jax.kernels.router.rule import RoutingRule

_IMPLEMENTATIONS = {"reference": choose_experts_reference, "tpu": "glm52_jax.kernels.router.tpu:choose_experts_tiled"}


def choose_experts(
    logits: jax.Array, bias: jax.Array, real: jax.Array, rule: RoutingRule, *, backend: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The best experts by `sigmoid(logits) + bias`, ties to the lower number, and `sigmoid(logits)` as their gates.

    A token of which any score is NaN has no best experts: it gets none, as padding does, in every form. What is
    chosen is always the number of an expert, so that no kernel has to check it.

    Args:
        logits: float32 `[tokens, experts]`.
        bias: float32 `[experts]`; it decides the choice only.
        real: bool `[tokens]`, false for padding, whose logits may be anything.
        backend: see `kernels.resolve_backend`.

    Returns:
        experts: int32 `[tokens, k]`, the best first, -1 for padding and NaN.
        gates: float32 of the same shape, zero for padding and NaN.
        counts: int32 `[experts]`, how many tokens chose each.
    """
    return implementation(_IMPLEMENTATIONS, backend)(logits, bias, real, rule)
