"""Tokens to the devices that hold their experts, and the results back. No token is ever dropped.

Everything here runs on the shards of a mesh (inside of one `shard_map`). Tokens differ over the axes of `batch`,
experts are divided over those of `experts`, their width over those of `expert_mlp`. What an expert computes is the
business of `kernels.experts`, where its rows are sent that of `sharding.ragged`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from glm52_jax.kernels.experts.api import routed_experts
from glm52_jax.quant import BlockQuantized, Weight
from sharding.collectives import all_gather, index, psum, psum_scatter
from sharding.layout import Layout

Compute = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Rows `[rows, embed]`, their experts by local number int32 `[rows, k]` (-1: none), gates -> float32 `[rows, embed]`."""


@dataclasses.dataclass(frozen=True)
class DispatchForm:
    """How tokens reach their experts; chosen when a step is built (`choose_form`), and equal in results.

    Attributes:
        name: "gather" or "all_to_all".
    """

    name: str = "gather"


GATHER = DispatchForm("gather")


def dispatch_experts(
    layout: Layout,
    x: jax.Array,
    experts: jax.Array,
    gates: jax.Array,
    gate_up: Weight,
    down: Weight,
    layer: jax.Array | int,
    *,
    backend: str,
    form: DispatchForm = GATHER,
) -> jax.Array:
    """For each of this device's tokens the sum over the experts that it chose, wherever they are.

    Args:
        x: `[tokens, embed]`, the same on all devices along axes that do not divide `batch`.
        experts: int32 `[tokens, k]`, numbers in the whole model, -1 throughout for padding, which is not sent.
        gates: float32 `[tokens, k]`.
        gate_up: this device's part of the stack `[layers, experts, 2, width, embed]`, plain or in blocks.
        down: this device's part of the stack `[layers, experts, embed, width]`.
        layer: which layer of the stacks.
        backend: see `kernels.resolve_backend`.
        form: see `choose_form`.

    Returns:
        float32 `[tokens, embed]`, complete on every device; that of `routed_experts` with all experts on one device.
    """
    gate_up, down = _as_shard(gate_up), _as_shard(down)

    def compute(x: jax.Array, experts: jax.Array, gates: jax.Array) -> jax.Array:
        return routed_experts(x, experts, gates, gate_up, down, layer, backend=backend)

    held = jax.tree.leaves(down)[0].shape[1]
    first = index(layout, layout.axes_of("experts")) * held

    def own_experts(x: jax.Array, experts: jax.Array, gates: jax.Array) -> jax.Array:
        own = experts - first
        return compute(x, jnp.where((own >= 0) & (own < held), own, -1), gates)

    differ = layout.axes_of("batch")
    divided = tuple(dict.fromkeys((*layout.axes_of("experts"), *layout.axes_of("expert_mlp"))))
    there = tuple(axis for axis in divided if axis in differ)
    total = _gathered(layout, there, own_experts, x, experts, gates)
    return psum(layout, total, tuple(axis for axis in divided if axis not in differ))


def _gathered(
    layout: Layout, axes: tuple[str, ...], compute: Compute, x: jax.Array, experts: jax.Array, gates: jax.Array
) -> jax.Array:
    """Every device along the axes computes its share for the tokens of all of them, and gets the sums of its own."""
    if not axes:
        return compute(x, experts, gates)
    packed = all_gather(layout, pack(experts, gates), axes)
    return psum_scatter(layout, compute(all_gather(layout, x, axes), *unpack(packed)), axes)


def expert_loads(layout: Layout, experts: jax.Array, count: int) -> jax.Array:
    """How many assignments each expert got on the whole mesh, int32 `[count]`; padding (-1) counts nothing.

    Args:
        experts: int32 `[tokens, k]` of this device.
        count: routed experts of the model.
    """
    own = jnp.sum(experts.reshape(-1, 1) == jnp.arange(count), axis=0, dtype=jnp.int32)
    return psum(layout, own, layout.axes_of("batch"))


def pack(experts: jax.Array, gates: jax.Array) -> jax.Array:
    """Experts and gates as one int32 `[tokens, 2 k]`, so that one collective moves both."""
    return jnp.concatenate([experts, jax.lax.bitcast_convert_type(gates, jnp.int32)], axis=-1)


def unpack(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The experts and the gates of `pack`."""
    experts, gates = jnp.split(packed, 2, axis=-1)
    return experts, jax.lax.bitcast_convert_type(gates, jnp.float32)


def _as_shard(weight: Weight) -> Weight:
    """An expert's matrices are stored in the shape that they are computed with, which in a shard is the shard's."""
    if isinstance(weight, BlockQuantized):
        return dataclasses.replace(weight, view=weight.codes.shape[-2:])
    return weight
