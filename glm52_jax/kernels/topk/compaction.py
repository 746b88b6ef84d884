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
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from glm52_jax.kernels.lib.pallas import LANES, SUBLANES
from glm52_jax.kernels.lib.sortable_bits import from_sortable_bits
from glm52_jax.kernels.topk.threshold_search import unrolled
from glm52_jax.kernels.topk.tile_sizes import TopkTileSizes

_FIELDS = 4  # in a word
_FIELD = 8  # bits of one, of which a distance within a run takes seven
_ONES = 0x01010101


def scratch(blocks: TopkTileSizes) -> list[Any]:
    """What `write_lists` works in: packed distances, lengths and starts of runs, the list's positions and images,
    registers of both, and registers laid into rows."""
    end = blocks.list_rows + 1
    return [
        pltpu.VMEM((blocks.runs // _FIELDS, LANES), jnp.int32),
        pltpu.VMEM((blocks.runs, LANES), jnp.bfloat16),
        pltpu.VMEM((blocks.runs, LANES), jnp.int32),
        pltpu.VMEM((end, LANES), jnp.int32),
        pltpu.VMEM((end, LANES), jnp.int32),
        pltpu.VMEM((2 * _turned_together(blocks) * SUBLANES, LANES), jnp.int32),
        *[pltpu.VMEM((blocks.runs // SUBLANES, LANES), jnp.int32)] * 2,
    ]


def write_lists(
    blocks: TopkTileSizes, sortable: Any, threshold: Any, used: Any, indices: Any, values: Any, scratch: Any, rows: Any
) -> None:
    """Writes the lists of the first rows.

    Args:
        image: int32 `[registers * 8, 128]`: of each row, no more than `k` are at or above its threshold.
        edge: int32 `[8, 128]`, the thresholds.
        used: chunks that were taken in.
        indices, values: int32 and float32 `[blocks.rows, list_rows, 128]`.
        rows: how many there are, an int or traced.
    """
    packed, lengths, starts, *lists, spare, row_positions, row_images = scratch
    laid = row_positions, row_images

    def row(number: jax.Array | int, carry: None) -> None:
        runs = _Runs(blocks, sortable, number)
        total = _count(blocks, runs, threshold, used, packed, lengths, starts)
        _move(blocks, used, packed)
        _turn(blocks, runs, used, packed, starts, spare, laid)
        _append(blocks, runs, used, packed, starts, laid, lists, spare)
        entries = lists[0][: blocks.list_rows, :], lists[1][: blocks.list_rows, :]
        entry = jax.lax.broadcasted_iota(jnp.int32, (blocks.list_rows, LANES), 0) * LANES + _lane(blocks.list_rows)
        indices[number] = jnp.where(entry < total, entries[0], -1)
        values[number] = jnp.where(entry < total, from_sortable_bits(entries[1]), -jnp.inf)

    if blocks.rows == 1:
        row(0, None)
    else:
        jax.lax.fori_loop(0, rows, row, None)


def write_nothing(indices: Any, values: Any) -> None:
    """Lists of rows of which nothing is chosen."""
    indices[...] = jnp.full(indices.shape, -1, jnp.int32)
    values[...] = jnp.full(values.shape, -jnp.inf, jnp.float32)


class _Runs:
    """The runs of 128 positions of one row."""

    def __init__(self, blocks: TopkTileSizes, sortable: Any, number: jax.Array | int) -> None:
        self.blocks, self.sortable, self.number = blocks, sortable, number

    def __call__(self, first: jax.Array, count: int) -> jax.Array:
        rows = self.blocks.rows
        if rows == 1:
            return self.sortable[pl.ds(pl.multiple_of(first, SUBLANES), count), :]
        return self.sortable[pl.ds(first * rows + self.number, count, stride=rows), :]


def _lane(rows: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)


def _count(
    blocks: TopkTileSizes, runs: _Runs, threshold: Any, used: Any, packed: Any, lengths: Any, starts: Any
) -> jax.Array:
    """Distances that the chosen move, packed, and where each run's part of the list starts, with its length.

    Returns:
        int32 scalar: how many there are.
    """
    size = blocks.group
    bound = threshold[pl.ds(runs.number, 1), :]

    def triangle(rows: int, before: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
        a, b = (jax.lax.broadcasted_iota(jnp.int32, (rows, rows), axis) for axis in (0, 1))
        return jnp.where(before(a, b), 1.0, 0.0).astype(jnp.bfloat16)

    # Counts up to 128 are exact in bfloat16, their sums in float32.
    up_to = jnp.concatenate([triangle(LANES, jax.lax.lt), jnp.ones((LANES, LANES), jnp.bfloat16)], axis=1)
    earlier = triangle(size, jax.lax.gt)

    def within(index: jax.Array, carry: None) -> None:
        at = pl.ds(pl.multiple_of(index * size, SUBLANES), size)
        chosen = runs(index * size, size) >= bound
        # A score moves by as many lanes as there are others that are not chosen before it.
        counted = _dot(jnp.where(chosen, 0.0, 1.0).astype(jnp.bfloat16), up_to)
        lengths[at, :] = (LANES - counted[:, LANES:]).astype(jnp.bfloat16)
        distance = jnp.where(chosen, counted[:, :LANES], 0.0).astype(jnp.int32)
        part = size // _FIELDS
        word = distance[:part]
        for field in range(1, _FIELDS):
            word = word | (distance[field * part : (field + 1) * part] << (_FIELD * field))
        packed[pl.ds(pl.multiple_of(index * part, SUBLANES), part), :] = word

    def across(index: jax.Array, start: jax.Array) -> jax.Array:
        at = pl.ds(pl.multiple_of(index * size, SUBLANES), size)
        length = lengths[at, :]
        before = _dot(earlier, length) + start
        length = length.astype(jnp.float32)
        starts[at, :] = (before * (1 << _FIELD) + length).astype(jnp.int32)
        return before[-1:] + length[-1:]

    # One after the other, so that no product waits for the one before.
    groups = blocks.chunk_runs // size
    unrolled(groups, within, None, blocks.unroll // 16, used)
    total = unrolled(groups, across, jnp.zeros((1, LANES), jnp.float32), blocks.unroll // 8, used)
    return total.astype(jnp.int32)[0, 0]


def _dot(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.dot(left, right, preferred_element_type=jnp.float32)


def _move(blocks: TopkTileSizes, used: Any, packed: Any) -> None:
    """Moves every distance by itself towards lane 0: in each run, the chosen are then side by side."""
    registers, in_chunk = (runs // (_FIELDS * SUBLANES) for runs in (blocks.runs, blocks.chunk_runs))
    size = min(registers, blocks.unroll)
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

    # What is moved beyond the last chunk is never looked at.
    jax.lax.fori_loop(0, pl.cdiv(in_chunk * used, size), group, None)


def _turned(
    runs: _Runs, packed: Any, starts: Any, register: Any, word: Any, field: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The chosen of a register's eight runs, turned to where they are in the list: where there are any, positions and
    images.

    Args:
        word, field: where its distances are.
    """
    first = pl.multiple_of(register * SUBLANES, SUBLANES)
    start = starts[pl.ds(first, SUBLANES), :]
    entry = (_lane(SUBLANES) - (start >> _FIELD)) & (LANES - 1)
    distance = packed[pl.ds(pl.multiple_of(word * SUBLANES, SUBLANES), SUBLANES), :] >> (_FIELD * field)
    source = (entry + jnp.take_along_axis(distance & (LANES - 1), entry, axis=1)) & (LANES - 1)
    run = first + jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 0)
    found = jnp.take_along_axis(runs(first, SUBLANES), source, axis=1)
    return entry < (start & ((1 << _FIELD) - 1)), run * LANES + source, found


def _turn(blocks: TopkTileSizes, runs: _Runs, used: Any, packed: Any, starts: Any, laid: Any, rows: Any) -> None:
    """Lays the runs of each register over each other: a row of it, if they have no more than 128 entries together."""
    group = blocks.group // SUBLANES
    part = group // _FIELDS
    size = _turned_together(blocks)

    def several(index: jax.Array, carry: None) -> None:
        for i in range(size):
            register = index * size + i
            word = (index * (size // group) + i // group) * part + i % part
            is_entry, *turned = _turned(runs, packed, starts, register, word, i % group // part)
            for number, values in enumerate(turned):
                laid[pl.ds((number * size + i) * SUBLANES, SUBLANES), :] = jnp.where(is_entry, values, 0)
        # Each run of several registers at a time: sums of whole registers.
        for number, row in enumerate(rows):
            first = number * size * SUBLANES
            parts = [laid[pl.ds(first + run, size, stride=SUBLANES), :] for run in range(SUBLANES)]
            row[pl.ds(index * size, size), :] = sum(parts[1:], parts[0])

    unrolled(blocks.chunk_runs // (SUBLANES * size), several, None, 1, used)


def _turned_together(blocks: TopkTileSizes) -> int:
    """Registers, of whole groups, that are turned without waiting for each other."""
    group = blocks.group // SUBLANES
    return group * math.gcd(blocks.chunk_runs // blocks.group, max(1, blocks.unroll // group))


def _append(
    blocks: TopkTileSizes, runs: _Runs, used: Any, packed: Any, starts: Any, rows: Any, lists: Any, spare: Any
) -> None:
    """Puts the rows of registers one after the other into the list."""
    registers = blocks.chunk_runs // SUBLANES
    size = math.gcd(registers, blocks.unroll)
    group_size = blocks.group // SUBLANES
    part = group_size // _FIELDS

    def put(at: jax.Array, end: jax.Array, new: tuple[Any, ...], old: tuple[Any, ...]) -> tuple[Any, ...]:
        """Puts entries of a row from `at` to `end` into the list, whose last row is held until it is full."""
        held = []
        for entries, a, b in zip(lists, new, old, strict=True):
            merged = jnp.where(_lane(1) >= (at & (LANES - 1)), a, b)
            entries[pl.ds(at >> 7, 1), :] = merged
            held.append(jnp.where((end >> 7) > (at >> 7), a, merged))
        return tuple(held)

    def hold(at: jax.Array) -> tuple[Any, ...]:
        return tuple(entries[pl.ds(at >> 7, 1), :] for entries in lists)

    def let_go(at: jax.Array, held: tuple[Any, ...]) -> None:
        for entries, row in zip(lists, held, strict=True):
            entries[pl.ds(at >> 7, 1), :] = row

    def ends(run: Any) -> tuple[jax.Array, jax.Array]:
        """Where the part of a run begins and ends."""
        start = starts[pl.ds(run, 1), :][0, 0]
        return start >> _FIELD, (start >> _FIELD) + (start & ((1 << _FIELD) - 1))

    def one_by_one(register: jax.Array) -> None:
        """Runs that have more than 128 entries together."""
        group, i = register // group_size, register % group_size
        _, *turned = _turned(runs, packed, starts, register, group * part + i % part, i // part)
        spare[:SUBLANES, :], spare[SUBLANES : 2 * SUBLANES, :] = turned

        def one(run: jax.Array, carry: None) -> None:
            at, end = ends(register * SUBLANES + run)
            new = tuple(spare[pl.ds(run + i * SUBLANES, 1), :] for i in range(2))
            let_go(end, put(at, end, new, hold(at)))

        jax.lax.fori_loop(0, SUBLANES, one, None)

    def several(index: jax.Array, begin: jax.Array) -> jax.Array:
        first = index * size
        at = [begin, *(ends((first + i) * SUBLANES)[0] for i in range(1, size)), ends((first + size) * SUBLANES - 1)[1]]
        longest = functools.reduce(jnp.maximum, [b - a for a, b in itertools.pairwise(at)])

        @pl.when((longest > 0) & (longest <= LANES))
        def _sparse() -> None:
            held = hold(begin)
            for i, (a, b) in enumerate(itertools.pairwise(at)):
                held = put(a, b, tuple(row[pl.ds(first + i, 1), :] for row in rows), held)
            let_go(at[-1], held)

        @pl.when(longest > LANES)
        def _dense() -> None:
            jax.lax.fori_loop(0, size, lambda i, _: one_by_one(first + i), None)

        return at[-1]

    jax.lax.fori_loop(0, registers // size * used, several, jnp.int32(0))
