"""The list of what is at or above a row's threshold, in order of position: parts of the bodies of kernels.

First products with triangles of ones count, for every score, the chosen ones before it in its run of 128 and in all
runs. Then, in each run, the chosen move to the front: by how many lanes is what was counted, and bit by bit of that all
move together. What moves is that distance itself, seven bits, so that four runs share a word; at its new place it says
which lane it is from, and position and score are taken from there. At last the eight runs of a register, turned to
where their part of the list begins, are one row without overlap, which is put at the end of the list.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from glm52_jax.kernels.pallas import LANES, SUBLANES
from glm52_jax.kernels.topk.blocks import Blocks
from glm52_jax.kernels.topk.image import scores_of
from glm52_jax.kernels.topk.threshold import register

_FIELDS = 4  # in a word
_FIELD = 8  # bits of one, of which a distance within a run takes seven
_ONES = 0x01010101


def scratch(blocks: Blocks) -> list[Any]:
    """What `write_lists` works in: packed distances, starts of runs, the list's positions and images, one register."""
    end = blocks.list_rows + 1
    return [
        pltpu.VMEM((blocks.runs // _FIELDS, LANES), jnp.int32),
        pltpu.VMEM((blocks.runs, LANES), jnp.int32),
        pltpu.VMEM((end, LANES), jnp.int32),
        pltpu.VMEM((end, LANES), jnp.int32),
        pltpu.VMEM((3 * SUBLANES, LANES), jnp.int32),
    ]


def write_lists(blocks: Blocks, image: Any, edge: Any, indices: Any, values: Any, scratch: Any) -> None:
    """Writes the lists of all rows.

    Args:
        image: int32 `[registers * 8, 128]`: of each row, no more than `k` are at or above its threshold.
        edge: int32 `[8, 128]`, the thresholds.
        indices, values: int32 and float32 `[rows, list_rows, 128]`.
    """
    packed, starts, *lists, spare = scratch

    def row(number: jax.Array | int, carry: None) -> None:
        runs = _Runs(blocks, image, number)
        total = _count(blocks, runs, edge, packed, starts)
        _move(blocks, packed)
        _place(blocks, runs, packed, starts, lists, spare, total)
        entries = lists[0][: blocks.list_rows, :], lists[1][: blocks.list_rows, :]
        entry = jax.lax.broadcasted_iota(jnp.int32, (blocks.list_rows, LANES), 0) * LANES + _lane(blocks.list_rows)
        indices[number] = jnp.where(entry < total, entries[0], -1)
        values[number] = jnp.where(entry < total, scores_of(entries[1]), -jnp.inf)

    if blocks.rows == 1:
        row(0, None)
    else:
        jax.lax.fori_loop(0, blocks.rows, row, None)


def write_nothing(indices: Any, values: Any) -> None:
    """Lists of rows of which nothing is chosen."""
    indices[...] = jnp.full(indices.shape, -1, jnp.int32)
    values[...] = jnp.full(values.shape, -jnp.inf, jnp.float32)


class _Runs:
    """The runs of 128 positions of one row."""

    def __init__(self, blocks: Blocks, image: Any, number: jax.Array | int) -> None:
        self.blocks, self.image, self.number = blocks, image, number

    def __call__(self, first: jax.Array, count: int) -> jax.Array:
        rows = self.blocks.rows
        if rows == 1:
            return self.image[pl.ds(pl.multiple_of(first, SUBLANES), count), :]
        return self.image[pl.ds(first * rows + self.number, count, stride=rows), :]


def _lane(rows: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)


def _count(blocks: Blocks, runs: _Runs, edge: Any, packed: Any, starts: Any) -> jax.Array:
    """Distances that the chosen move, packed, and where each run's part of the list starts, with its length.

    Returns:
        int32 scalar: how many there are.
    """
    size = blocks.group
    bound = edge[pl.ds(runs.number, 1), :]

    def triangle(rows: int, before: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
        a, b = (jax.lax.broadcasted_iota(jnp.int32, (rows, rows), axis) for axis in (0, 1))
        return jnp.where(before(a, b), 1.0, 0.0).astype(jnp.bfloat16)

    # Counts up to 128 are exact in bfloat16, their sums in float32.
    up_to = jnp.concatenate([triangle(LANES, jax.lax.le), jnp.ones((LANES, LANES), jnp.bfloat16)], axis=1)
    earlier = triangle(size, jax.lax.gt)

    def group(index: jax.Array, start: jax.Array) -> jax.Array:
        chosen = runs(index * size, size) >= bound
        counted = _dot(jnp.where(chosen, 1.0, 0.0).astype(jnp.bfloat16), up_to)
        length = counted[:, LANES:]
        before = _dot(earlier, length.astype(jnp.bfloat16)) + start
        distance = jnp.where(chosen, _lane(size) + 1 - counted[:, :LANES].astype(jnp.int32), 0)
        part = size // _FIELDS
        word = distance[:part]
        for field in range(1, _FIELDS):
            word = word | (distance[field * part : (field + 1) * part] << (_FIELD * field))
        packed[pl.ds(pl.multiple_of(index * part, SUBLANES), part), :] = word
        at = pl.ds(pl.multiple_of(index * size, SUBLANES), size)
        starts[at, :] = (before.astype(jnp.int32) << _FIELD) | length.astype(jnp.int32)
        return before[-1:] + length[-1:]

    total = jax.lax.fori_loop(0, blocks.runs // size, group, jnp.zeros((1, LANES), jnp.float32))
    return total.astype(jnp.int32)[0, 0]


def _dot(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.dot(left, right, preferred_element_type=jnp.float32)


def _move(blocks: Blocks, packed: Any) -> None:
    """Moves every distance by itself towards lane 0: in each run, the chosen are then side by side."""
    registers = blocks.runs // (_FIELDS * SUBLANES)
    size = blocks.unroll
    while registers % size:
        size -= 1

    def group(index: jax.Array, carry: None) -> None:
        at = pl.ds(pl.multiple_of(index * size * SUBLANES, SUBLANES), size * SUBLANES)
        words = packed[at, :]
        for bit in range(7):
            # Lowest bit first: then no two ever meet. Ones where that bit of a field is set:
            moves = (words >> bit) & _ONES
            moving = words & ((moves << _FIELD) - moves)
            words = (words ^ moving) | pltpu.roll(moving, LANES - (1 << bit), 1)
        packed[at, :] = words

    jax.lax.fori_loop(0, registers // size, group, None)


def _place(
    blocks: Blocks,
    runs: _Runs,
    packed: Any,
    starts: Any,
    lists: Any,
    spare: Any,
    total: jax.Array,
) -> None:
    """Puts each run's chosen into the list."""
    registers = blocks.runs // SUBLANES
    group_registers = blocks.group // SUBLANES
    part = group_registers // _FIELDS
    lane = _lane(SUBLANES)
    in_register = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 0) * LANES

    def turned(word: Any, field: int, first: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The chosen of eight runs from that one on, turned: where there are any, positions and images."""
        start = starts[pl.ds(first, SUBLANES), :]
        entry = (lane - (start >> _FIELD)) & (LANES - 1)
        distance = (packed[pl.ds(word, SUBLANES), :] >> (_FIELD * field)) & (LANES - 1)
        source = (entry + jnp.take_along_axis(distance, entry, axis=1)) & (LANES - 1)
        found = jnp.take_along_axis(runs(first, SUBLANES), source, axis=1)
        return entry < (start & ((1 << _FIELD) - 1)), first * LANES + in_register + source, found

    def append(at: jax.Array, rows: tuple[Any, ...], open_rows: tuple[Any, ...], length: jax.Array) -> tuple[Any, ...]:
        """Puts rows of no more than 128 entries at the end of the list; its last row, which is open, is held."""
        shift = at & (LANES - 1)
        fills = shift + length >= LANES
        held = []
        for entries, new, old in zip(lists, rows, open_rows, strict=True):
            merged = jnp.where(_lane(1) >= shift, new, old)
            entries[pl.ds(at >> 7, 1), :] = merged
            held.append(jnp.where(fills, new, merged))
        return tuple(held)

    def group(index: jax.Array, carry: None) -> None:
        first = index * blocks.group
        word = index * part * SUBLANES
        # Starts of the registers' parts of the list, and of the next group's.
        at = [starts[pl.ds(first + i * SUBLANES, 1), :][0, 0] >> _FIELD for i in range(group_registers)]
        last = starts[pl.ds(first + blocks.group - 1, 1), :][0, 0]
        at.append((last >> _FIELD) + (last & ((1 << _FIELD) - 1)))
        longest = functools.reduce(jnp.maximum, [b - a for a, b in itertools.pairwise(at)])
        arguments = [
            (pl.multiple_of(word + i % part * SUBLANES, SUBLANES), i // part, pl.multiple_of(first + i * SUBLANES, 8))
            for i in range(group_registers)
        ]
        end = tuple(entries[pl.ds(at[0] >> 7, 1), :] for entries in lists)

        @pl.when((longest > 0) & (longest <= LANES))
        def _sparse() -> None:
            held = end
            for i, place in enumerate(arguments):
                is_entry, position, found = turned(*place)
                rows = tuple(jnp.sum(jnp.where(is_entry, v, 0), axis=0, keepdims=True) for v in (position, found))
                held = append(at[i], rows, held, at[i + 1] - at[i])
            for entries, row in zip(lists, held, strict=True):
                entries[pl.ds(at[-1] >> 7, 1), :] = row

        @pl.when(longest > LANES)
        def _dense() -> None:
            for i, place in enumerate(arguments):
                _, position, found = turned(*place)
                spare[:SUBLANES, :], spare[SUBLANES : 2 * SUBLANES, :] = position, found

                def one(run: jax.Array, carry: None, first: Any = place[2]) -> None:
                    start = starts[pl.ds(first + run, 1), :][0, 0]
                    here, length = start >> _FIELD, start & ((1 << _FIELD) - 1)
                    rows = tuple(spare[pl.ds(run + part * SUBLANES, 1), :] for part in range(2))
                    old = tuple(entries[pl.ds(here >> 7, 1), :] for entries in lists)
                    held = append(here, rows, old, length)
                    for entries, row in zip(lists, held, strict=True):
                        entries[pl.ds((here + length) >> 7, 1), :] = row

                jax.lax.fori_loop(0, SUBLANES, one, None)

    jax.lax.fori_loop(0, registers // group_registers, group, None)
