"""Tokens to the devices that hold their experts, and the results back. No token is ever dropped.

Everything here runs on the shards of a mesh (inside of one `shard_map`). Tokens differ over the axes of `batch`
and `tokens`, experts are divided over those of `experts`, their width over those of `expert_mlp`. What an expert
computes is the business of `kernels.experts`, where its rows are sent that of `sharding.exchange`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from glm52_jax.kernels.experts.api import routed_experts
from glm52_jax.model.dispatch_policy import GATHER, DispatchPolicy, Hop, dispatch_axes, plan_hops
from glm52_jax.params.quantization import BlockQuantized, Weight
from sharding.collectives import all_gather, axis_index, local_shard, order_after, pmax, psum, psum_scatter
from sharding.exchange import exchange, join_rows, round_windows, rounds_needed, rows_to_send, split_rows, uninitialized
from sharding.layout import Layout

Compute = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Rows `[rows, embed]`, their experts by local number int32 `[rows, k]` (-1: none), gates; float32 `[rows, embed]`."""

Part = tuple[jax.Array, jax.Array, jax.Array]
"""Rows, their experts and gates, as `Compute` takes them."""


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
    form: DispatchPolicy = GATHER,
) -> jax.Array:
    """For each of this device's tokens the sum over the experts that it chose, wherever they are.

    Args:
        x: `[tokens, embed]`, the same on all devices along axes that divide neither `batch` nor `tokens`.
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
    first = axis_index(layout, layout.axes_of("experts")) * held

    def own_experts(x: jax.Array, experts: jax.Array, gates: jax.Array) -> jax.Array:
        return compute(x, _numbers_here(experts, first, held), gates)

    there, alike = dispatch_axes(layout)
    if form.name == "gather":
        total = psum(layout, _gathered(layout, there, own_experts, x, experts, gates), alike)
        # A TPU would move a cast of the sum before it, and add in bfloat16.
        return jax.lax.optimization_barrier(total)
    return _all_to_all(layout, alike, compute, x, experts, gates, held * layout.parts("experts"), form)


def _gathered(
    layout: Layout, axes: tuple[str, ...], compute: Compute, x: jax.Array, experts: jax.Array, gates: jax.Array
) -> jax.Array:
    """Every device along the axes computes its share for the tokens of all of them, and gets the sums of its own."""
    if not axes:
        return compute(x, experts, gates)
    packed = all_gather(layout, pack(experts, gates), axes)
    return psum_scatter(layout, compute(all_gather(layout, x, axes), *unpack(packed)), axes)


def _all_to_all(
    layout: Layout,
    alike: tuple[str, ...],
    compute: Compute,
    x: jax.Array,
    experts: jax.Array,
    gates: jax.Array,
    count: int,
    form: DispatchPolicy,
) -> jax.Array:
    """Sends rows to their experts and gets the sums.

    Where tokens are the same on several devices (`alike`) each of them sends its own share only, and the results are
    joined at the end: no row crosses the mesh twice, and the bytes of joining are half of those of a sum. Where widths
    are divided, what arrived is gathered along them, computed in parts, and reduced back.
    """
    tokens = x.shape[0]
    short = -tokens % layout.size(alike)
    x, experts, gates = (
        local_shard(layout, jnp.pad(array, ((0, short), (0, 0)), constant_values=fill), alike)
        for array, fill in ((x, 0), (experts, -1), (gates, 0))
    )
    share = x.shape[0]
    cuts = [0, (share + 1) // 2, share] if form.overlap and share > 1 else [0, share]
    parts = [(x[a:b], experts[a:b], gates[a:b]) for a, b in itertools.pairwise(cuts)]
    hops = [plan_hops(layout, b - a, count, experts.shape[1], form) for a, b in itertools.pairwise(cuts)]
    compute = functools.partial(_gathered, layout, layout.axes_of("expert_mlp"), compute)
    results = _exchange_over_hops(layout, hops, parts, compute, form.exchange_implementation)
    return all_gather(layout, jnp.concatenate(results), alike)[:tokens]


class _Outgoing(NamedTuple):
    """What one device sends at one hop, and how many rows all devices send each other.

    Attributes:
        rows: a token's hidden state in each row, in pieces.
        packed: int32, all experts of that token and its gates, in pieces; the receiver knows its own.
        counts: int32 `[sources, destinations]`.
        row_of: see `sharding.exchange.Sending`.
    """

    rows: jax.Array
    packed: jax.Array
    counts: jax.Array
    row_of: jax.Array


def _exchange_over_hops(
    layout: Layout, hops: list[tuple[Hop, ...]], parts: list[Part], compute: Compute, exchange_implementation: str
) -> list[jax.Array]:
    """The sums of the parts' tokens, float32 `[tokens, embed]` each; a trip is the hops that are still ahead of a part.

    Parts do not depend on each other. They share one loop, so that within its body one may travel while another is
    computed: a compiler moves nothing across loops.
    """
    if not hops[0]:
        return [compute(*part) for part in parts]
    sent = [_sort(trip[0], *part) for trip, part in zip(hops, parts, strict=True)]
    rounds = jnp.int32(0)
    for trip, outgoing in zip(hops, sent, strict=True):
        rounds = jnp.maximum(rounds, rounds_needed(outgoing.counts, trip[0].receives))
    # The group of this hop agrees, since all of it has the same counts. Those who meet later, inside of a round, must
    # too, or one would wait for a device that has gone home.
    for hop in hops[0][1:]:
        rounds = jnp.max(hop.group.gather(rounds))
    rounds = pmax(layout, rounds, layout.axes_of("expert_mlp"))

    def one_round(state: tuple[jax.Array, list[jax.Array]]) -> tuple[jax.Array, list[jax.Array]]:
        number, results = state
        back: list[jax.Array] = []
        for trip, outgoing, result in zip(hops, sent, results, strict=True):

            def ahead(
                x: jax.Array, experts: jax.Array, gates: jax.Array, rest: tuple[Hop, ...] = trip[1:]
            ) -> jax.Array:
                return _exchange_over_hops(layout, [rest], [(x, experts, gates)], compute, exchange_implementation)[0]

            if back and trip[1:]:  # a further hop has a loop of its own
                outgoing = outgoing._replace(rows=order_after(layout, outgoing.rows, back[-1]))
            back.append(_round(trip[0], outgoing, number, result, ahead, exchange_implementation))
        return number + 1, back

    room = [uninitialized((trip[0].sends, 1, parts[0][0].shape[1]), jnp.float32) for trip in hops]
    _, results = jax.lax.while_loop(lambda state: state[0] < rounds, one_round, (jnp.int32(0), room))
    return [_collect(outgoing.row_of, result) for outgoing, result in zip(sent, results, strict=True)]


def _sort(hop: Hop, x: jax.Array, experts: jax.Array, gates: jax.Array) -> _Outgoing:
    sending = rows_to_send(jnp.where(experts >= 0, experts // hop.held, -1), hop.group.size)
    token = sending.token_of
    rows, packed = split_rows(x)[token], split_rows(pack(experts, gates))[token]
    return _Outgoing(rows, packed, hop.group.gather(sending.counts), sending.row_of)


def _round(
    hop: Hop, outgoing: _Outgoing, number: jax.Array, result: jax.Array, ahead: Compute, exchange_implementation: str
) -> jax.Array:
    """`result` with the sums of the rows that this round's receivers had room for."""
    place = hop.group.place()
    there, back = round_windows(outgoing.counts, place, hop.receives, number)
    rows, packed = (
        join_rows(
            exchange(
                hop.group,
                sent,
                uninitialized((hop.receives, *sent.shape[1:]), sent.dtype),
                there,
                exchange_implementation,
            )
        )
        for sent in (outgoing.rows, outgoing.packed)
    )
    experts, gates = unpack(packed)
    # The buffer is filled from its start; what is behind the last row may be anything, and computes nothing.
    written = jnp.arange(hop.receives) < jnp.sum(there.recv_sizes)
    experts = jnp.where(written[:, None], _numbers_here(experts, place * hop.held, hop.held), -1)
    return exchange(hop.group, split_rows(ahead(rows, experts, gates)), result, back, exchange_implementation)


def _collect(row_of: jax.Array, result: jax.Array) -> jax.Array:
    """The sum of each token's rows `[rows, 1, embed]`, one choice at a time.

    All at once would hold `k` results a token once more.
    """

    def add(choice: jax.Array, total: jax.Array) -> jax.Array:
        row = row_of[:, choice]
        return total + jnp.where(row[:, None, None] >= 0, result[row], 0.0)

    start = jnp.zeros((row_of.shape[0], *result.shape[1:]), jnp.float32)
    return join_rows(jax.lax.fori_loop(0, row_of.shape[1], add, start))


def expert_loads(layout: Layout, experts: jax.Array, count: int) -> jax.Array:
    """How many assignments each expert got on the whole mesh, int32 `[count]`; padding (-1) counts nothing.

    Args:
        experts: int32 `[tokens, k]` of this device.
        count: routed experts of the model.
    """
    own = jnp.sum(experts.reshape(-1, 1) == jnp.arange(count), axis=0, dtype=jnp.int32)
    return psum(layout, own, (*layout.axes_of("batch"), *layout.axes_of("tokens")))


def pack(experts: jax.Array, gates: jax.Array) -> jax.Array:
    """Experts and gates as one int32 `[tokens, 2 k]`, so that one collective moves both."""
    return jnp.concatenate([experts, jax.lax.bitcast_convert_type(gates, jnp.int32)], axis=-1)


def unpack(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The experts and the gates of `pack`."""
    experts, gates = jnp.split(packed, 2, axis=-1)
    return experts, jax.lax.bitcast_convert_type(gates, jnp.float32)


def _numbers_here(experts: jax.Array, first: jax.Array | int, held: int) -> jax.Array:
    """Numbers of experts from `first` on, -1 for those that are not here."""
    own = experts - first
    return jnp.where((own >= 0) & (own < held), own, -1)


def _as_shard(weight: Weight) -> Weight:
    """An expert's matrices are stored in the shape that they are computed with, which in a shard is the shard's."""
    if isinstance(weight, BlockQuantized):
        return dataclasses.replace(weight, logical_shape=weight.codes.shape[-2:])
    return weight
