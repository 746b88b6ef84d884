"""Which rows each expert has, without a sort: each token is compared with every expert, and comparisons are counted.

Rows are numbered expert by expert, each expert's from a whole tile of rows on. Only experts with rows have tiles, and
an assignment to none takes no row.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

_LANES = 128


class ExpertGroups(NamedTuple):
    """The experts that have rows, ascending, then the last one repeated.

    Attributes:
        expert, tile, rows: int32 `[experts]`: number, first tile and number of rows of each group; what is behind the
            last group has no rows.
        used: int32 `[2]`: how many groups and tiles hold rows.
        ranks: int32 `[experts, tokens]`, of every expert: how many of its rows are a token's or those of tokens before.
        gates: float32 `[experts, tokens]`.
    """

    expert: jax.Array
    tile: jax.Array
    rows: jax.Array
    used: jax.Array
    ranks: jax.Array
    gates: jax.Array


def groups_of(experts: jax.Array, gates: jax.Array, count: int, size: int) -> ExpertGroups:
    """The groups of assignments `[tokens, k]` to `count` experts, in tiles of `size` rows.

    An expert that a token chose twice has one row for it, with the sum of the gates.
    """
    numbers = jnp.arange(count, dtype=jnp.int32)[:, None]
    here = [experts[:, choice] == numbers for choice in range(experts.shape[1])]
    chosen = functools.reduce(jnp.logical_or, here)
    weight = jnp.asarray(sum(jnp.where(hit, gates[:, choice], 0.0) for choice, hit in enumerate(here)))
    ranks = jnp.cumsum(chosen, axis=1, dtype=jnp.int32)
    counts = ranks[:, -1]
    expert, held = in_use(counts > 0)
    tiles = -(-counts // size)
    first = running_sum(tiles) - tiles
    used = jnp.stack([held, jnp.sum(tiles, dtype=jnp.int32)])
    rows = jnp.where(jnp.arange(count) < held, counts[expert], 0)
    return ExpertGroups(expert, first[expert], rows, used, ranks, weight)


def in_use(chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Numbers of the experts that are chosen, ascending, the last one repeated; how many there are."""
    place, number = running_sum(chosen), jnp.arange(chosen.shape[0], dtype=jnp.int32)
    held = place[-1]
    wanted = jnp.minimum(number, jnp.maximum(held - 1, 0))
    # The expert at a place is the number of those that come before it.
    before = jnp.sum(place <= wanted[:, None], axis=1, dtype=jnp.int32)
    return jnp.minimum(before, chosen.shape[0] - 1), held


def running_sum(values: jax.Array) -> jax.Array:
    """`cumsum` of a few values in one go, where the compiler would make several programs of it."""
    number = jnp.arange(values.shape[0])
    return jnp.sum(jnp.where(number <= number[:, None], values, 0), axis=1, dtype=jnp.int32)


def group_at(groups: ExpertGroups, tile: jax.Array) -> jax.Array:
    """Number of the group that a tile belongs to; of the last group for tiles behind it."""
    count = groups.expert.shape[0]
    real = jnp.arange(count) < groups.used[0]
    before = jnp.sum(real & (groups.tile <= tile[..., None]), axis=-1, dtype=jnp.int32)
    return jnp.clip(before - 1, 0, count - 1)


def rows_of(groups: ExpertGroups, start: jax.Array, number: int, size: int) -> tuple[jax.Array, jax.Array]:
    """Tokens int32 and gates float32 `[number * size]` of the rows of some tiles; zero where a tile has no row.

    A row's token is the number of tokens up to which its expert has fewer rows. They are counted, since a scatter would
    take long: first whole runs of tokens, then within one, which a product with zeros and a one brings along.
    """
    tile = start + jnp.arange(number, dtype=jnp.int32)
    group = group_at(groups, tile)
    expert = groups.expert[group]
    rank = (tile - groups.tile[group])[:, None] * size + jnp.arange(size, dtype=jnp.int32)
    real = (rank < groups.rows[group][:, None]) & (tile < groups.used[1])[:, None]
    tokens = groups.ranks.shape[1]
    short = -tokens % _LANES
    ranks = jnp.pad(groups.ranks, ((0, 0), (0, short)), mode="edge").reshape(groups.ranks.shape[0], -1, _LANES)[expert]
    gates = jnp.pad(groups.gates, ((0, 0), (0, short))).reshape(groups.gates.shape[0], -1, _LANES)[expert]
    run = jnp.sum(ranks[:, None, :, -1] <= rank[:, :, None], axis=-1, dtype=jnp.int32)
    mine = (run[:, :, None] == jnp.arange(ranks.shape[1])).astype(jnp.float32)
    pick = functools.partial(jnp.einsum, "tsr,trl->tsl", mine, precision=jax.lax.Precision.HIGHEST)
    within = jnp.sum(pick(ranks.astype(jnp.float32)) <= rank[:, :, None], axis=-1, dtype=jnp.int32)
    token = jnp.where(real, run * _LANES + within, 0)
    lane = jnp.arange(_LANES) == within[:, :, None]
    gate = jnp.where(real, jnp.sum(jnp.where(lane, pick(gates), 0.0), axis=-1), 0.0)
    return token.reshape(-1), gate.reshape(-1)
