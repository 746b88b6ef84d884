"""Experts for few rows: every row through every expert that any of them chose, in one kernel.

With up to as many rows as the units multiply while a weight arrives, rows that did not choose an expert cost nothing,
and neither gather nor scatter is needed: a gate of none weighs the hidden values of such a row to zero. What is read
are the weights of the experts in use, once, and nothing else of note.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from glm52_jax.kernels import Target
from glm52_jax.kernels.block_matmul.product import Scales, Stack, WeightEncoding, scales_of, values_of
from glm52_jax.kernels.experts import tile_sizes
from glm52_jax.kernels.experts.groups import in_use
from glm52_jax.kernels.lib.pallas import call


def routed_experts_few(
    x: jax.Array,
    experts: jax.Array,
    gates: jax.Array,
    gate_up: Stack,
    down: Stack,
    layer: jax.Array | int,
    *,
    target: Target,
) -> jax.Array:
    """See `api.routed_experts`; rows and their number as the units take them."""
    tokens, embed = x.shape
    count = values_of(gate_up).shape[1]
    tile, cores, steps = tile_sizes.few(target, gate_up)
    up_form, down_form = WeightEncoding.of(gate_up, x, tile, target), WeightEncoding.of(down, x, embed, target)
    active, used = in_use(jnp.any(jnp.arange(count)[:, None, None] == experts.T, axis=(1, 2)))

    def at(*index: Any) -> Any:
        def of(core: Any, slot: Any, step: Any, layer: Any, active: Any, used: Any) -> tuple[Any, ...]:
            return layer[0], active[slot], *(core * steps + step if i is None else i for i in index)

        return of

    # Narrow arrays lie with their long side in the lanes.
    operands = [x.astype(up_form.dtype), experts.T, gates.T, values_of(gate_up), values_of(down)]
    specs = [
        *(pl.BlockSpec(array.shape, lambda *_: (0, 0)) for array in operands[:3]),
        pl.BlockSpec((None, None, 2, tile, embed), at(0, None, 0)),
        pl.BlockSpec((None, None, embed, tile), at(0, None)),
    ]
    scales = scales_of(gate_up), scales_of(down)
    for held, pieces in zip(scales, ((2,), ()), strict=True):
        if held is not None:
            operands.append(held.array)
            specs.append(held.spec(at(), pieces))
    out = call(
        functools.partial(_kernel, up_form, down_form, scales, steps),
        name="experts_few",
        target=target,
        cost=tile_sizes.cost(tokens, used_experts(tokens, experts.shape[1], count), gate_up, down),
        out_shape=jax.ShapeDtypeStruct((cores, tokens, embed), jnp.float32),
        semantics=("parallel", "arbitrary", "arbitrary"),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            # Where there is no row at all, little is fetched in vain.
            grid=(cores, jnp.maximum(used, 1), jnp.where(used > 0, steps, 1)),
            in_specs=specs,
            out_specs=pl.BlockSpec((None, tokens, embed), lambda core, *_: (core, 0, 0)),
            scratch_shapes=[
                pltpu.VMEM(x.shape, up_form.dtype),
                *(pltpu.VMEM(experts.shape, array.dtype) for array in (experts, gates)),
                pltpu.VMEM((tokens, tile), down_form.dtype),
            ],
        ),
    )(jnp.asarray(layer, jnp.int32).reshape(1), active, used.reshape(1), *operands)
    return jnp.sum(out, axis=0)


def used_experts(tokens: int, k: int, count: int) -> int:
    """At most so many experts are chosen."""
    return min(count, tokens * k)


def _kernel(
    up: WeightEncoding,
    down: WeightEncoding,
    scales: tuple[Scales | None, Scales | None],
    steps: int,
    layer: Any,
    active: Any,
    used: Any,
    *refs: Any,
) -> None:
    del layer
    rows, experts_across, gates_across, gate_up, down_values, *held, out, x, experts, gates, hidden = refs
    up_scales, down_scales = scales
    core, slot, step = (pl.program_id(axis) for axis in range(3))
    tile = gate_up.shape[1]

    @pl.when((slot == 0) & (step == 0))
    def _start() -> None:
        out[...] = jnp.zeros(out.shape, out.dtype)
        x[...] = up.prepare(rows[...])
        experts[...], gates[...] = experts_across[...].T, gates_across[...].T

    @pl.when(slot < used[0])
    def _expert() -> None:
        # Everything that depends on a row alone first: whether it chose this expert, and with what gate.
        here = experts[...] == active[slot]
        chosen = jnp.max(here.astype(jnp.int32), axis=1, keepdims=True) > 0
        gate_of = jnp.sum(jnp.where(here, gates[...], 0.0), axis=1, keepdims=True)
        block = (core * steps + step) * tile
        for first, size in up.groups(tile):
            row = block + first
            halves = []
            for half in range(2):

                def scale(number: int, column: int, half: int = half, row: Any = row) -> Any:
                    assert up.block is not None
                    assert up_scales is not None
                    return up_scales.of(held[0], row // up.block[0] + number, column, half)

                halves.append(up.sums(x, gate_up.at[half, pl.ds(first, size)], scale))
            values = jax.nn.silu(halves[0]) * halves[1] * gate_of
            # `where`, not the product alone: a row that is padding may hold NaN.
            values = jnp.where(chosen, values, 0.0).astype(x.dtype)
            hidden[:, pl.ds(first, size)] = down.prepare(up.in_order(values))

        for first, size in down.groups(out.shape[1]):

            def scale_down(number: int, column: int, first: int = first) -> Any:
                assert down.block is not None
                assert down_scales is not None
                columns = block // down.block[1] + column
                return down_scales.of(held[1], first // down.block[0] + number, columns)

            here = pl.ds(first, size)
            out[:, here] += down.sums(hidden, down_values.at[here], scale_down)

    @pl.when((slot == pl.num_programs(1) - 1) & (step == pl.num_programs(2) - 1))
    def _finish() -> None:
        for first, size in down.groups(out.shape[1]) if down.spread else []:
            columns = pl.ds(first, size)
            out[:, columns] = down.in_order(out[:, columns])
