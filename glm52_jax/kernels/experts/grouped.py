"""Experts for many rows: rows in the order of their experts, in tiles of which each has one expert.

Only tiles that hold rows are worked on. Two kernels do the work, in whose steps one expert's block of weights is
multiplied by all its rows while the next one arrives. The first multiplies by gate and up and leaves the hidden values,
weighted by the gates; its rows come in windows of a fixed number of tiles, since room for every assignment that there
could be would be gigabytes. The second multiplies them by down, and adds each row to its token in a block of columns of
the result that holds all tokens: no row of an expert's output ever leaves the vector memory, and a token's sum is in
the order of its experts whatever the others chose.
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
from glm52_jax.kernels.experts.groups import ExpertGroups, group_at, groups_of, rows_of
from glm52_jax.kernels.lib.pallas import SUBLANES, call


def routed_experts_grouped(
    x: jax.Array,
    experts: jax.Array,
    gates: jax.Array,
    gate_up: Stack,
    down: Stack,
    layer: jax.Array | int,
    *,
    target: Target,
) -> jax.Array:
    """See `api.routed_experts`; the number of tokens as the units take it."""
    tokens, k = experts.shape
    count, width = values_of(gate_up).shape[1], values_of(gate_up).shape[3]
    sizes = tile_sizes.grouped(target, x.dtype, gate_up, down)
    room = tile_sizes.most_tiles(tokens, k, count, sizes.rows)
    sizes = sizes.within(room)
    room = -(-room // sizes.window) * sizes.window
    groups = groups_of(experts, gates, count, sizes.rows)
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    forms = WeightEncoding.of(gate_up, x, sizes.up, target), WeightEncoding.of(down, x, sizes.down, target)

    def one_window(number: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        hidden, token_of = state
        start = number * sizes.window
        token, gate = rows_of(groups, start, sizes.window, sizes.rows)
        rows = jnp.take(x, token, axis=0, mode="clip").astype(forms[0].dtype)
        hidden = _hidden(rows, gate[:, None], gate_up, hidden, groups, number, layer, forms, sizes, target)
        return hidden, jax.lax.dynamic_update_slice(token_of, token, (start * sizes.rows,))

    state = (
        jax.lax.empty((room * sizes.rows, width), forms[1].dtype),
        jax.lax.empty((room * sizes.rows,), jnp.int32),
    )
    windows = (groups.used[1] + sizes.window - 1) // sizes.window
    hidden, token_of = jax.lax.fori_loop(0, windows if room > sizes.window else 1, one_window, state)
    return _outputs(hidden, token_of, down, groups, tokens, layer, forms[1], sizes, target)


def _hidden(
    rows: jax.Array,
    gate: jax.Array,
    weight: Stack,
    hidden: jax.Array,
    groups: ExpertGroups,
    number: jax.Array | int,
    layer: jax.Array,
    forms: tuple[WeightEncoding, WeightEncoding],
    sizes: tile_sizes.GroupedTileSizes,
    target: Target,
) -> jax.Array:
    """`hidden` with the values of one window's rows."""
    count, width, embed = (values_of(weight).shape[axis] for axis in (1, 3, 4))
    start = number * sizes.window
    ends = group_at(groups, jnp.stack([start, jnp.minimum(start + sizes.window, groups.used[1]) - 1]))
    # Number of the window, its first tile, tiles behind its last one, and its first group.
    window = jnp.stack([number, start, jnp.minimum(start + sizes.window, groups.used[1]), ends[0]]).astype(jnp.int32)
    cores, steps = tile_sizes.split(target, width // sizes.up)

    def at(*index: Any) -> Any:
        def of(core: Any, step: Any, slot: Any, layer: Any, window: Any, expert: Any, *_: Any) -> tuple[Any, ...]:
            return layer[0], expert[window[3] + slot], *(core * steps + step if i is None else i for i in index)

        return of

    operands, specs = (
        [rows, gate, values_of(weight)],
        [
            pl.BlockSpec(memory_space=pl.ANY),
            pl.BlockSpec(gate.shape, lambda *_: (0, 0)),
            pl.BlockSpec((None, None, 2, sizes.up, embed), at(0, None, 0)),
        ],
    )
    if (scales := scales_of(weight)) is not None:
        operands.append(scales.array)
        specs.append(scales.spec(at(), (2,)))
    return call(
        functools.partial(_hidden_kernel, forms, scales, sizes, steps),
        name="experts_hidden",
        target=target,
        cost=tile_sizes.product_cost(rows.shape[0], min(count, sizes.window), weight),
        out_shape=jax.ShapeDtypeStruct(hidden.shape, hidden.dtype),
        semantics=("parallel", "arbitrary", "arbitrary"),
        aliases={5 + len(operands): 0},
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(cores, steps, jnp.maximum(ends[1] - ends[0] + 1, 1)),
            in_specs=[*specs, pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec(
                (sizes.window * sizes.rows, sizes.up),
                lambda core, step, slot, layer, window, *_: (window[0], core * steps + step),
            ),
            scratch_shapes=[pltpu.VMEM(rows.shape, rows.dtype), pltpu.SemaphoreType.DMA((sizes.window,))],
        ),
    )(layer, window, groups.expert, groups.tile, groups.rows, *operands, hidden)


def _hidden_kernel(
    forms: tuple[WeightEncoding, WeightEncoding],
    scales: Scales | None,
    sizes: tile_sizes.GroupedTileSizes,
    steps: int,
    layer: Any,
    window: Any,
    expert: Any,
    tiles: Any,
    counts: Any,
    rows: Any,
    gate: Any,
    weight: Any,
    *refs: Any,
) -> None:
    """One expert's rows of a window by one block of its width."""
    del layer, expert
    (*scale_refs, _, out, held, arrived), (up, down) = refs, forms
    core, step, slot = (pl.program_id(axis) for axis in range(3))
    _, start, end, first_group = (window[i] for i in range(4))
    block, group = (core * steps + step) * sizes.up, first_group + slot
    last = tiles[group] + _in_tiles(counts[group], sizes.rows)

    def copy(tile: Any) -> Any:
        here = pl.ds(pl.multiple_of(tile * sizes.rows, sizes.rows), sizes.rows)
        return pltpu.make_async_copy(rows.at[here], held.at[here], arrived.at[tile])

    @pl.when((step == 0) & (slot == 0))
    def _fetch() -> None:
        jax.lax.fori_loop(0, end - start, lambda tile, _: copy(tile).start(), None)

    def one_tile(tile: Any, carry: Any) -> Any:
        local = tile - start
        here = pl.ds(pl.multiple_of(local * sizes.rows, sizes.rows), sizes.rows)

        @pl.when(step == 0)
        def _wait() -> None:
            copy(local).wait()
            if up.spread:
                held[here] = up.prepare(held[here])

        def columns(first: Any, size: int) -> None:
            halves = []
            for half in range(2):

                def scale(number: int, column: int, half: int = half) -> Any:
                    assert up.block is not None
                    assert scales is not None
                    return scales.of(scale_refs[0], (block + first) // up.block[0] + number, column, half)

                halves.append(up.sums(held.at[here], weight.at[half, pl.ds(first, size)], scale))
            values = jax.nn.silu(halves[0]) * halves[1] * gate[here]
            row = (tile - tiles[group]) * sizes.rows + jax.lax.broadcasted_iota(jnp.int32, (sizes.rows, 1), 0)
            values = jnp.where(row < counts[group], values, 0.0).astype(sizes.dtype)
            out[here, pl.ds(first, size)] = down.prepare(up.in_order(values))

        up.each_group(sizes.up, columns, 2 * weight.shape[-1])
        return carry

    jax.lax.fori_loop(jnp.maximum(tiles[group], start), jnp.minimum(last, end), one_tile, None)


def _outputs(
    hidden: jax.Array,
    token_of: jax.Array,
    weight: Stack,
    groups: ExpertGroups,
    tokens: int,
    layer: jax.Array,
    form: WeightEncoding,
    sizes: tile_sizes.GroupedTileSizes,
    target: Target,
) -> jax.Array:
    """Float32 `[tokens, embed]`: the sum of each token's rows."""
    _, count, embed, width = values_of(weight).shape
    cores, steps = tile_sizes.split(target, embed // sizes.down)

    def at(*index: Any) -> Any:
        def of(core: Any, step: Any, slot: Any, layer: Any, used: Any, expert: Any, *_: Any) -> tuple[Any, ...]:
            return layer[0], expert[slot], *(core * steps + step if i is None else i for i in index)

        return of

    operands, specs = (
        [hidden, values_of(weight)],
        [
            pl.BlockSpec(memory_space=pl.ANY),
            pl.BlockSpec((None, None, sizes.down, width), at(None, 0)),
        ],
    )
    if (scales := scales_of(weight)) is not None:
        operands.append(scales.array)
        specs.append(scales.spec(at()))
    return call(
        functools.partial(_outputs_kernel, form, scales, sizes, steps),
        name="experts_outputs",
        target=target,
        # Of one window, like the first kernel: how many there are is known when they run.
        cost=tile_sizes.product_cost(sizes.window * sizes.rows, min(count, sizes.window), weight),
        out_shape=jax.ShapeDtypeStruct((tokens, embed), jnp.float32),
        semantics=("parallel", "arbitrary", "arbitrary"),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(cores, steps, jnp.maximum(groups.used[0], 1)),
            in_specs=specs,
            out_specs=pl.BlockSpec((tokens, sizes.down), lambda core, step, *_: (0, core * steps + step)),
            scratch_shapes=[
                pltpu.VMEM((2, sizes.rows, width), hidden.dtype),
                pltpu.VMEM((sizes.rows, sizes.down), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
    )(layer, groups.used, groups.expert, groups.tile, groups.rows, token_of, *operands)


def _outputs_kernel(
    form: WeightEncoding,
    scales: Scales | None,
    sizes: tile_sizes.GroupedTileSizes,
    steps: int,
    layer: Any,
    used: Any,
    expert: Any,
    tiles: Any,
    counts: Any,
    token_of: Any,
    hidden: Any,
    weight: Any,
    *refs: Any,
) -> None:
    """One expert's rows by one block of columns of the result, each added to its token."""
    del layer, expert
    *scale_refs, out, held, results, arrived = refs
    core, step, group = (pl.program_id(axis) for axis in range(3))
    block, end = (core * steps + step) * sizes.down, used[1]
    first = tiles[group]

    def copy(tile: Any, place: Any) -> Any:
        here = pl.ds(pl.multiple_of(tile * sizes.rows, sizes.rows), sizes.rows)
        return pltpu.make_async_copy(hidden.at[here], held.at[place], arrived.at[place])

    @pl.when(group == 0)
    def _start() -> None:
        out[...] = jnp.zeros(out.shape, out.dtype)

    @pl.when((group == 0) & (step == 0) & (end > 0))
    def _fetch() -> None:
        copy(0, 0).start()

    def one_tile(tile: Any, carry: Any) -> Any:
        # All tiles follow each other, and after the last one those of the next block.
        number = step * end + tile

        @pl.when(number + 1 < steps * end)
        def _next() -> None:
            copy(jnp.where(tile + 1 < end, tile + 1, 0), (number + 1) % 2).start()

        place = number % 2
        copy(tile, place).wait()

        def columns(first: Any, size: int) -> None:
            def scale(number: int, column: int) -> Any:
                assert form.block is not None
                assert scales is not None
                return scales.of(scale_refs[0], (block + first) // form.block[0] + number, column)

            sums = form.sums(held.at[place], weight.at[pl.ds(first, size)], scale)
            results[:, pl.ds(first, size)] = form.in_order(sums)

        form.each_group(sizes.down, columns, weight.shape[-1])
        rows = jnp.minimum(counts[group] - (tile - first) * sizes.rows, sizes.rows)

        def add_rows(eight: Any, carry: Any) -> Any:
            # Rows behind the last one are zero, and are added to token 0.
            row = pl.multiple_of(eight * SUBLANES, SUBLANES)
            for after in range(SUBLANES):
                token = pl.ds(token_of[tile * sizes.rows + row + after], 1)
                out[token] += results[pl.ds(row + after, 1)]
            return carry

        return jax.lax.fori_loop(0, _in_tiles(rows, SUBLANES), add_rows, carry)

    jax.lax.fori_loop(first, first + _in_tiles(counts[group], sizes.rows), one_tile, None)


def _in_tiles(rows: jax.Array, size: int) -> jax.Array:
    """Tiles of so many rows, of which there are not less than none: no sign to look after."""
    return jax.lax.div(rows + (size - 1), jnp.int32(size))
