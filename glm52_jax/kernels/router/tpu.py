"""The router's choice on a TPU: the best expert, then the best of the others, and so on.

Scores lie with the tokens side by side, an expert in each row, so that the search goes over registers, not within them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from glm52_jax.kernels import Target
from glm52_jax.kernels.lib.pallas import call
from glm52_jax.kernels.router import tile_sizes
from glm52_jax.kernels.router.rule import RoutingRule


def choose_experts_tiled(
    logits: jax.Array, bias: jax.Array, real: jax.Array, rule: RoutingRule, *, target: Target
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `api.choose_experts`."""
    tokens, count = logits.shape
    cores, steps = tile_sizes.split(target, tokens)
    size = tile_sizes.TOKENS
    short = cores * steps * size - tokens

    def across(rows: int) -> pl.BlockSpec:
        return pl.BlockSpec((rows, size), lambda core, step: (0, core * steps + step))

    experts, gates, counts = call(
        functools.partial(_kernel, rule),
        name="choose_experts",
        target=target,
        cost=tile_sizes.cost(tokens, count, rule.k),
        out_shape=(
            jax.ShapeDtypeStruct((rule.k, tokens + short), jnp.int32),
            jax.ShapeDtypeStruct((rule.k, tokens + short), jnp.float32),
            jax.ShapeDtypeStruct((cores, count, size), jnp.int32),
        ),
        semantics=("parallel", "arbitrary"),
        grid=(cores, steps),
        in_specs=[across(count), pl.BlockSpec((count, 1), lambda core, step: (0, 0)), across(1)],
        out_specs=(
            across(rule.k),
            across(rule.k),
            pl.BlockSpec((None, count, size), lambda core, step: (core, 0, 0)),
        ),
    )(
        jnp.pad(logits, ((0, short), (0, 0))).T,
        bias[:, None],
        jnp.pad(real, (0, short)).astype(jnp.int32)[None, :],
    )
    return experts.T[:tokens], gates.T[:tokens], jnp.sum(counts, axis=(0, 2))


def _kernel(rule: RoutingRule, logits: Any, bias: Any, real: Any, experts: Any, gates: Any, counts: Any) -> None:
    @pl.when(pl.program_id(1) == 0)
    def _start() -> None:
        counts[...] = jnp.zeros(counts.shape, counts.dtype)

    scores = jax.nn.sigmoid(logits[...])
    ranked = scores + bias[...]
    wrong = jnp.max(jnp.where(ranked != ranked, 1, 0), axis=0, keepdims=True)  # NaN
    here = (real[...] > 0) & (wrong == 0)
    ranked = _within_best_groups(ranked, rule)
    free = jnp.ones(ranked.shape, jnp.bool_)
    picked = []
    for choice in range(rule.k):
        chosen, number = _best(ranked, free)
        free &= ~chosen
        picked.append(jnp.sum(jnp.where(chosen, scores, 0.0), axis=0, keepdims=True))
        experts[pl.ds(choice, 1)] = jnp.where(here, number, -1)
    factor = functools.reduce(jnp.add, picked) + 1e-20 if rule.normalise else 1.0
    for choice, gate in enumerate(picked):
        gates[pl.ds(choice, 1)] = jnp.where(here, gate / factor * rule.scale, 0.0)
    counts[...] += jnp.where(~free & here, 1, 0)


def _best(ranked: jax.Array, free: jax.Array) -> tuple[jax.Array, jax.Array]:
    """In each column the best of the free rows, ties to the first: where it is, and its number `[1, columns]`."""
    row = jax.lax.broadcasted_iota(jnp.int32, ranked.shape, 0)
    best = jnp.max(jnp.where(free, ranked, -jnp.inf), axis=0, keepdims=True)
    number = jnp.min(jnp.where(free & (ranked == best), row, ranked.shape[0]), axis=0, keepdims=True)
    return row == number, number


def _within_best_groups(ranked: jax.Array, rule: RoutingRule) -> jax.Array:
    """Minus infinity outside of the best groups, by the sum of their best two."""
    if rule.kept_groups == rule.groups:
        return ranked
    size = ranked.shape[0] // rule.groups
    sums = []
    for group in range(rule.groups):
        part = ranked[group * size : (group + 1) * size]
        free = jnp.ones(part.shape, jnp.bool_)
        chosen, _ = _best(part, free)
        first = jnp.max(part, axis=0, keepdims=True)
        sums.append(first + jnp.max(jnp.where(chosen, -jnp.inf, part), axis=0, keepdims=True))
    total = jnp.concatenate(sums)
    free = jnp.ones(total.shape, jnp.bool_)
    for _ in range(rule.kept_groups):
        free &= ~_best(total, free)[0]
    parts = [
        jnp.where(free[group : group + 1], -jnp.inf, ranked[group * size : (group + 1) * size])
        for group in range(rule.groups)
    ]
    return jnp.concatenate(parts)
