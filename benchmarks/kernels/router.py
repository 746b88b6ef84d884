"""The router's choice of 8 of 256."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from benchmarks.kernels.case import OURS, Built, Case
from glm52_jax.kernels.router.api import choose_experts
from glm52_jax.kernels.router.rule import RoutingRule

EXPERTS, RULE = 256, RoutingRule(8, scale=2.5)


def _build(tokens: int, backend: str, chip: str) -> Built:
    operands = (
        jax.ShapeDtypeStruct((tokens, EXPERTS), jnp.float32),
        jax.ShapeDtypeStruct((EXPERTS,), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.bool_),
    )
    backend = f"tpu:{chip}" if backend == "tpu" else backend
    return Built(functools.partial(choose_experts, rule=RULE, backend=backend), operands)


def cases() -> list[Case]:
    """One token to a chunk of 4,096; what it is bound by are comparisons, which no floor here counts."""
    return [
        Case(
            "router",
            f"{tokens} tokens",
            form,
            functools.partial(_build, tokens, backend),
            4.0 * tokens * (EXPERTS + 2 * RULE.k),
            0.0,
        )
        for tokens in (1, 64, 4096)
        for form, backend in ((OURS, "tpu"), ("xla", "reference"))
    ]
