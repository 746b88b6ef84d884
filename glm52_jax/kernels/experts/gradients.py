"""Gradients of the routed experts, in the same tiles of rows as their values.

The hidden values are computed again. Rows of the cotangent go back through the transposes of the weights, and the
gradient of a weight is the sum of its expert's outer products; both are kernels that go from tile to tile.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from glm52_jax.kernels import Target
from glm52_jax.kernels.experts import tile_sizes
from glm52_jax.kernels.experts.groups import ExpertGroups, group_at, groups_of, rows_of
from glm52_jax.kernels.lib.pallas import call

_ROWS = 128
_COLUMNS = 512


class _Tiles(NamedTuple):
    """Expert and place among its expert's tiles, of each tile; how many hold rows, `[1]`."""

    expert: jax.Array
    place: jax.Array
    used: jax.Array


class Gradients(NamedTuple):
    """Of the rows, of the gates, and of one layer's weights in float32."""

    x: jax.Array
    gates: jax.Array
    gate_up: jax.Array
    down: jax.Array


def gradients(
    target: Target,
    x: jax.Array,
    experts: jax.Array,
    gates: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    layer: jax.Array,
    cotangent: jax.Array,
) -> Gradients:
    """For plain stacks and the cotangent float32 `[tokens, embed]` of the result."""
    tokens, k = experts.shape
    count = down.shape[1]
    groups = groups_of(experts, gates, count, _ROWS)
    room = tile_sizes.most_tiles(tokens, k, count, _ROWS)
    tiles, expert_of = _tiles(groups, room)
    token, gate = rows_of(groups, jnp.int32(0), room, _ROWS)
    real = _real(groups, tiles, room)[:, None]

    def gather(array: jax.Array) -> jax.Array:
        # Rows that are none are zero, so that they add nothing to a weight's gradient.
        return jnp.where(real, jnp.take(array, token, axis=0, mode="clip"), 0)

    times = functools.partial(_times, target, tiles, layer)
    rows, sent, gate = gather(x), gather(cotangent), gate[:, None]
    a, b = times(rows, gate_up, 0), times(rows, gate_up, 1)
    hidden, back = jax.vjp(lambda a, b: jax.nn.silu(a) * b, a, b)
    whole_down = down.reshape(*down.shape[:2], 1, *down.shape[2:])
    through = times(sent.astype(x.dtype), whole_down, 0, transpose=True)
    of_gate = jnp.sum(jnp.where(real, through * hidden.astype(x.dtype), 0.0), axis=1)
    inner = [jnp.where(real, part, 0.0).astype(x.dtype) for part in back(through * gate)]
    of_row = sum(times(part, gate_up, half, transpose=True) for half, part in enumerate(inner))
    outer = functools.partial(_outer, target, tiles, count)
    held = (groups.ranks[:, -1] > 0)[:, None, None]
    of_gate_up = [jnp.where(held, outer(part, rows), 0.0) for part in inner]
    of_down = outer((sent * gate).astype(x.dtype), jnp.where(real, hidden, 0.0).astype(x.dtype))
    by_token = jnp.zeros((tokens, x.shape[1]), jnp.float32).at[token].add(jnp.where(real, of_row, 0.0))
    by_expert = jnp.zeros((count, tokens), jnp.float32).at[expert_of, token].add(of_gate)
    here = experts >= 0
    chosen = by_expert[jnp.where(here, experts, 0), jnp.arange(tokens)[:, None]]
    return Gradients(
        by_token.astype(x.dtype),
        jnp.where(here, chosen, 0.0),
        jnp.stack(of_gate_up, axis=1),
        jnp.where(held, of_down, 0.0),
    )


def _tiles(groups: ExpertGroups, room: int) -> tuple[_Tiles, jax.Array]:
    """The tiles, and the expert of each row."""
    number = jnp.arange(room, dtype=jnp.int32)
    last = jnp.minimum(number, jnp.maximum(groups.used[1] - 1, 0))
    group = group_at(groups, last)
    expert = groups.expert[group]
    return _Tiles(expert, last - groups.tile[group], groups.used[1:]), jnp.repeat(expert, _ROWS)


def _real(groups: ExpertGroups, tiles: _Tiles, room: int) -> jax.Array:
    """Whether each row is one, bool `[rows]`."""
    counts = groups.ranks[:, -1][tiles.expert]
    rank = tiles.place[:, None] * _ROWS + jnp.arange(_ROWS)
    return ((rank < counts[:, None]) & (jnp.arange(room) < tiles.used)[:, None]).reshape(-1)


def _block(width: int) -> int:
    return next((size for size in (_COLUMNS, 256, 128) if width % size == 0), width)


def _dot(left: Any, right: Any, contract: tuple[int, int]) -> jax.Array:
    exact = jnp.float32 in (left.dtype, right.dtype)
    return jax.lax.dot_general(
        left,
        right,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )


def _times(
    target: Target,
    tiles: _Tiles,
    layer: jax.Array,
    rows: jax.Array,
    weight: jax.Array,
    piece: int,
    *,
    transpose: bool = False,
) -> jax.Array:
    """Float32 rows by the transposes of their experts' matrices `[layers, experts, pieces, out, in]`, or by themselves.

    Rows of tiles behind the last one that is used may be anything.
    """
    out, inner = weight.shape[-2:]
    width, result = (out, inner) if transpose else (inner, out)
    block = _block(result)

    def of_weight(column: Any, tile: Any, layer: Any, expert: Any) -> tuple[Any, ...]:
        return layer[0], expert[tile], piece, *((0, column) if transpose else (column, 0))

    def kernel(layer: Any, expert: Any, rows: Any, weight: Any, out: Any) -> None:
        del layer, expert
        out[...] = _dot(rows[...], weight[...], (1, 0 if transpose else 1))

    held = (None, None, None, width, block) if transpose else (None, None, None, block, width)
    return call(
        kernel,
        name="experts_back" if transpose else "experts_again",
        target=target,
        cost=tile_sizes.plain_cost(rows.shape[0], result, width, weight.shape[1]),
        out_shape=jax.ShapeDtypeStruct((rows.shape[0], result), jnp.float32),
        semantics=("parallel", "arbitrary"),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(result // block, jnp.maximum(tiles.used[0], 1)),
            in_specs=[
                pl.BlockSpec((_ROWS, width), lambda column, tile, *_: (tile, 0)),
                pl.BlockSpec(held, of_weight),
            ],
            out_specs=pl.BlockSpec((_ROWS, block), lambda column, tile, *_: (tile, column)),
        ),
    )(layer, tiles.expert, rows, weight)


def _outer(target: Target, tiles: _Tiles, count: int, left: jax.Array, right: jax.Array) -> jax.Array:
    """Float32 `[experts, left's width, right's width]`: the sums of the outer products of each expert's rows.

    That of an expert without rows may be anything.
    """
    high, wide = _block(left.shape[1]), _block(right.shape[1])

    def kernel(expert: Any, place: Any, left: Any, right: Any, out: Any) -> None:
        product = _dot(left[...], right[...], (0, 0))
        first = place[pl.program_id(2)] == 0

        @pl.when(first)
        def _start() -> None:
            out[...] = product

        @pl.when(~first)
        def _add() -> None:
            out[...] += product

    return call(
        kernel,
        name="experts_outer",
        target=target,
        cost=tile_sizes.plain_cost(left.shape[0], left.shape[1], right.shape[1], count),
        out_shape=jax.ShapeDtypeStruct((count, left.shape[1], right.shape[1]), jnp.float32),
        semantics=("parallel", "parallel", "arbitrary"),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(left.shape[1] // high, right.shape[1] // wide, jnp.maximum(tiles.used[0], 1)),
            in_specs=[
                pl.BlockSpec((_ROWS, high), lambda row, column, tile, *_: (tile, row)),
                pl.BlockSpec((_ROWS, wide), lambda row, column, tile, *_: (tile, column)),
            ],
            out_specs=pl.BlockSpec(
                (None, high, wide), lambda row, column, tile, expert, _: (expert[tile], row, column)
            ),
        ),
    )(tiles.expert, tiles.place, left, right)
