"""Experts on a TPU: few rows go through every expert in use, many are put in the order of their experts."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from glm52_jax.kernels import Target
from glm52_jax.kernels.block_matmul.product import Stack
from glm52_jax.kernels.experts import tile_sizes
from glm52_jax.kernels.experts.few import routed_experts_few
from glm52_jax.kernels.experts.gradients import gradients
from glm52_jax.kernels.experts.grouped import routed_experts_grouped
from glm52_jax.kernels.lib.stacks import layer_of
from glm52_jax.params.quantization import BlockQuantized

_Residuals = tuple[jax.Array, jax.Array, jax.Array, Stack, Stack, jax.Array]


def routed_experts(
    x: jax.Array,
    experts: jax.Array,
    gates: jax.Array,
    gate_up: Stack,
    down: Stack,
    layer: jax.Array | int,
    *,
    target: Target,
) -> jax.Array:
    """See `api.routed_experts`. It has gradients of everything but codes and their scales."""
    return _routed(target, x, experts, gates, gate_up, down, jnp.asarray(layer, jnp.int32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _routed(
    target: Target,
    x: jax.Array,
    experts: jax.Array,
    gates: jax.Array,
    gate_up: Stack,
    down: Stack,
    layer: jax.Array,
) -> jax.Array:
    tokens = x.shape[0]
    x, experts, gates = _parts(tile_sizes.MOST_TOKENS, x, experts, gates)
    compute = routed_experts_few if x.shape[1] <= tile_sizes.FEW else routed_experts_grouped

    def one(part: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        # Without the barrier the compiler fuses the last kernel with its place in the result, and forgets its memory.
        return jax.lax.optimization_barrier(compute(*part, gate_up, down, layer, target=target))

    out = one((x[0], experts[0], gates[0])) if x.shape[0] == 1 else jax.lax.map(one, (x, experts, gates))
    return out.reshape(-1, out.shape[-1])[:tokens]


def _parts(most: int, x: jax.Array, experts: jax.Array, gates: jax.Array, *more: jax.Array) -> tuple[jax.Array, ...]:
    """Tokens in equal parts of at most so many, padded to what the units take: `[parts, tokens, ...]`."""
    tokens = x.shape[0]
    parts = -(-tokens // most)
    size = -(-tokens // (parts * tile_sizes.TOKENS)) * tile_sizes.TOKENS
    filled = ((x, 0), (experts, -1), (gates, 0), *((array, 0) for array in more))
    return tuple(
        jnp.pad(array, ((0, parts * size - tokens), (0, 0)), constant_values=fill).reshape(parts, size, -1)
        for array, fill in filled
    )


def _forward(target: Target, *operands: Any) -> tuple[jax.Array, _Residuals]:
    return _routed(target, *operands), operands


def _backward(target: Target, kept: _Residuals, cotangent: jax.Array) -> tuple[Any, ...]:
    x, experts, gates, gate_up, down, layer = kept
    tokens = x.shape[0]
    # The transposed products know no codes: one layer's weights are made plain for them.
    (plain_gate_up, own), (plain_down, _) = _plain(gate_up, layer, x.dtype), _plain(down, layer, x.dtype)

    def add(total: tuple[jax.Array, jax.Array], part: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        x, experts, gates, cotangent = part
        got = gradients(target, x, experts, gates, plain_gate_up, plain_down, own.reshape(1), cotangent)
        return (total[0] + got.gate_up, total[1] + got.down), (got.x, got.gates)

    start = jnp.zeros(plain_gate_up.shape[1:], jnp.float32), jnp.zeros(plain_down.shape[1:], jnp.float32)
    (of_gate_up, of_down), (of_x, of_gates) = jax.lax.scan(
        add, start, _parts(tile_sizes.MOST_BACK, x, experts, gates, cotangent)
    )
    return (
        of_x.reshape(-1, x.shape[1])[:tokens],
        None,
        of_gates.reshape(-1, gates.shape[1])[:tokens],
        _in_stack(gate_up, of_gate_up, layer),
        _in_stack(down, of_down, layer),
        None,
    )


def _plain(weight: Stack, layer: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """A plain stack, and the layer's number in it."""
    if isinstance(weight, BlockQuantized):
        weight = dataclasses.replace(layer_of(weight, layer), logical_shape=weight.codes.shape[-2:], row_dims=1)
        return weight.dequantize(dtype)[None], jnp.zeros_like(layer)
    return weight, layer


def _in_stack(weight: Stack, gradient: jax.Array, layer: jax.Array) -> jax.Array | None:
    if isinstance(weight, BlockQuantized):
        return None
    return jnp.zeros_like(weight).at[layer].set(gradient.astype(weight.dtype))


_routed.defvjp(_forward, _backward)
