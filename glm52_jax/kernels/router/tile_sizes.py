"""Sizes of the router's kernel, and what a call costs."""

from __future__ import annotations

from jax.experimental import pallas as pl

from glm52_jax.kernels import Target
from glm52_jax.kernels.lib.pallas import LANES

TOKENS = LANES
"""Tokens of a step, side by side in the lanes: what is compared lies in one lane, and no lane waits for another."""


def split(target: Target, tokens: int) -> tuple[int, int]:
    """Cores that share so many tokens, and the steps of each."""
    steps = -(-tokens // TOKENS)
    cores = min(target.chip.cores_per_device, steps)
    return cores, -(-steps // cores)


def cost(tokens: int, experts: int, k: int) -> pl.CostEstimate:
    """Each of the `k` choices looks at all scores: a comparison for the best, one for its place, a sum for the gate."""
    return pl.CostEstimate(
        flops=tokens * experts * (3 * k + 1),
        bytes_accessed=4 * (tokens * (experts + 2 * k + 1) + 2 * experts),
        transcendentals=tokens * experts,
    )
