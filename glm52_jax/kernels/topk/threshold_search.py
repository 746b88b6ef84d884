"""The k-th best score of each row, exactly and without a sort: parts of the bodies of kernels.

Scores arrive chunk by chunk. Their images stay in vector memory, and of each segment the best few of every place in a
register are kept as candidates. Counting candidates at or above trial thresholds gives the k-th best candidate, which
is no higher than the k-th best score; one count over all scores says whether it is that one and has no ties to cut.
Where it does not, the same search over all scores follows, and one for the position at which the ties are cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from glm52_jax.kernels.lib.pallas import LANES, SUBLANES
from glm52_jax.kernels.lib.sortable_bits import LOWEST, NOT_CANDIDATE
from glm52_jax.kernels.topk.tile_sizes import TopkTileSizes

_SHAPE = (SUBLANES, LANES)


def register(index: jax.Array | int) -> Any:
    """Rows of a two-dimensional array that are its register of that number."""
    start = index * SUBLANES
    return pl.ds(start if isinstance(start, int) else pl.multiple_of(start, SUBLANES), SUBLANES)


def position_in_register(blocks: TopkTileSizes) -> jax.Array:
    """Positions of the first register, `[8, 128]`; each next one has `1024 / rows` more."""
    run = jax.lax.broadcasted_iota(jnp.int32, _SHAPE, 0) // blocks.rows
    return run * LANES + jax.lax.broadcasted_iota(jnp.int32, _SHAPE, 1)


def absorb(
    blocks: TopkTileSizes, load: Callable[[Any], jax.Array], chunk: jax.Array | int, sortable: Any, kept: Any
) -> None:
    """Takes in one chunk.

    Args:
        load: the images of one register of the chunk, of which everything that may not be chosen is `NOT_CANDIDATE`.
        chunk: which one it is.
        image: int32 `[registers * 8, 128]`, all images.
        kept: the same of the candidates; not used without segments.
    """
    first = chunk * blocks.chunk_registers
    size = blocks.segment or 4
    step = 4

    def segment(index: jax.Array, carry: None) -> None:
        def four(number: jax.Array, best: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            values = []
            for i in range(step):
                at = index * size + number * step + i
                values.append(load(at))
                sortable[register(first + at), :] = values[-1]
            return _merged(best, values) if blocks.segment else best

        nothing = (jnp.full(_SHAPE, NOT_CANDIDATE, jnp.int32),) * blocks.kept if blocks.segment else ()
        best = unrolled(size // step, four, nothing, -(-blocks.unroll // step))
        for i, values in enumerate(best):
            kept[register((chunk * (blocks.chunk_registers // size) + index) * blocks.kept + i), :] = values

    jax.lax.fori_loop(0, blocks.chunk_registers // size, segment, None)


def _merged(best: Sequence[jax.Array], values: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """The four best, in order, of four in order and four more, place by place."""

    def ordered(array: list[jax.Array], *pairs: tuple[int, int]) -> list[jax.Array]:
        for a, b in pairs:
            array[a], array[b] = jnp.maximum(array[a], array[b]), jnp.minimum(array[a], array[b])
        return array

    sorted_values = ordered(list(values), (0, 1), (2, 3), (0, 2), (1, 3), (1, 2))
    top = [jnp.maximum(a, b) for a, b in zip(best, reversed(sorted_values), strict=True)]
    return tuple(ordered(top, (0, 2), (1, 3), (0, 1), (2, 3)))


def unrolled(count: int, body: Callable[[Any, Any], Any], carry: Any, unroll: int, times: Any = 1) -> Any:
    """`fori_loop` of a body over `count * times` numbers, several of which are written out; `times` may be traced."""
    if isinstance(times, int):
        count, times = count * times, 1
    unroll = max(1, min(unroll, count))
    while count % unroll:
        unroll -= 1

    def several(step: jax.Array, carry: Any) -> Any:
        for i in range(unroll):
            carry = body(step * unroll + i, carry)
        return carry

    if isinstance(times, int) and count == unroll:
        return several(jnp.int32(0), carry)
    return jax.lax.fori_loop(0, count // unroll * times, several, carry)


def _totals(
    blocks: TopkTileSizes, registers: int, used: Any, tests: Callable[[Any], Sequence[jax.Array]], count: int
) -> list[jax.Array]:
    """For each of `count` tests, float32 `[8, 128]`: in every place of a row how many of the row pass.

    Args:
        registers: of a chunk.
        used: chunks.
        tests: for the number of a register, whether each of its values passes.
    """

    # A sum of its own for each of a few registers, so that no addition waits for the one before.
    several = math.gcd(registers, min(blocks.unroll, 4))

    def add(index: jax.Array, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            tuple(s + jnp.where(test, 1, 0) for s, test in zip(own, tests(index * several + i), strict=True))
            for i, own in enumerate(sums)
        )

    zero = ((jnp.zeros(_SHAPE, jnp.int32),) * count,) * several
    unroll = -(-blocks.unroll // (several * (1 if count < 4 else 2)))
    found = unrolled(registers // several, add, zero, unroll, used)
    sums = [sum(own[1:], own[0]) for own in zip(*found, strict=True)]
    return [_over_row(blocks, s.astype(jnp.float32), jnp.add, jnp.sum) for s in sums]


def _over_row(blocks: TopkTileSizes, values: jax.Array, pair: Any, all_lanes: Any) -> jax.Array:
    """Combines what a row has in all places of a register, and gives it to all of them."""
    shift = blocks.rows
    while shift < SUBLANES:
        values = pair(values, pltpu.roll(values, shift, 0))
        shift *= 2
    return jnp.broadcast_to(all_lanes(values, axis=1, keepdims=True), _SHAPE)


def _kth(blocks: TopkTileSizes, source: Any, registers: int, used: Any, bits: int) -> jax.Array:
    """The largest threshold that `k` values reach, `[8, 128]`, found from its highest bits on."""

    def refine(step: jax.Array, found: jax.Array) -> jax.Array:
        shift = 32 - bits * (step + 1)
        trials = [found + (jnp.int32(i) << shift) for i in range(1, 1 << bits)]

        def tests(index: Any) -> list[jax.Array]:
            values = source[register(index), :]
            return [values >= trial for trial in trials]

        reached = [jnp.where(n >= blocks.k, 1, 0) for n in _totals(blocks, registers, used, tests, len(trials))]
        return found + (sum(reached[1:], reached[0]) << shift)

    return jax.lax.fori_loop(0, 32 // bits, refine, jnp.full(_SHAPE, LOWEST, jnp.int32))


def find_threshold(
    blocks: TopkTileSizes,
    sortable: Any,
    kept: Any,
    threshold: Any,
    used: Any,
    *,
    position_of: Callable[[Any], jax.Array],
    position_bits: int,
) -> jax.Array:
    """Leaves the `k` best of each row, or all if there are fewer, at or above the row's threshold.

    Args:
        image: all images; those at the threshold that are cut off become `NOT_CANDIDATE`.
        kept: the candidates.
        edge: int32 `[8, 128]`, gets the threshold: above `NOT_CANDIDATE`.
        used: chunks that were taken in, the first ones: an int or traced.
        position_of: positions of one register's values.
        position_bits: that a position has.

    Returns:
        float32 `[8, 128]`: how many values of the row are at or above the threshold.
    """
    candidates, registers = (kept, blocks.chunk_candidates) if blocks.segment else (sortable, blocks.chunk_registers)
    threshold[...] = jnp.maximum(_kth(blocks, candidates, registers, used, blocks.bits), NOT_CANDIDATE + 1)

    reached = threshold[...]
    (count,) = _totals(blocks, blocks.chunk_registers, used, lambda i: [sortable[register(i), :] >= reached], 1)

    @pl.when(jnp.max(count) > blocks.k)
    def _cut() -> None:
        if blocks.segment:
            threshold[...] = jnp.maximum(_kth(blocks, sortable, blocks.chunk_registers, used, 1), NOT_CANDIDATE + 1)
        bound = threshold[...]
        (above,) = _totals(blocks, blocks.chunk_registers, used, lambda i: [sortable[register(i), :] > bound], 1)
        wanted = blocks.k - above

        def refine(step: jax.Array, before: jax.Array) -> jax.Array:
            trial = before + (jnp.int32(1) << (position_bits - 1 - step))

            def tests(index: Any) -> list[jax.Array]:
                return [(sortable[register(index), :] == bound) & (position_of(index) < trial)]

            (ties,) = _totals(blocks, blocks.chunk_registers, used, tests, 1)
            return jnp.where(ties < wanted, trial, before)

        # The position of the last of the ties that are wanted: the largest with too few before it.
        last = jax.lax.fori_loop(0, position_bits, refine, jnp.zeros(_SHAPE, jnp.int32))

        def cut(index: jax.Array, carry: None) -> None:
            values = sortable[register(index), :]
            sortable[register(index), :] = jnp.where(
                (values == bound) & (position_of(index) > last), NOT_CANDIDATE, values
            )

        unrolled(blocks.chunk_registers, cut, None, blocks.unroll, used)

    return jnp.minimum(count, float(blocks.k))


def raise_threshold(blocks: TopkTileSizes, sortable: Any, threshold: Any, used: Any) -> None:
    """After `find_threshold`, makes the threshold of rows with `k` values the lowest of them, which it may be below."""

    @pl.when(jnp.min(threshold[...].astype(jnp.float32)) <= float(NOT_CANDIDATE + 1))
    def _exactly() -> None:
        threshold[...] = jnp.maximum(_kth(blocks, sortable, blocks.chunk_registers, used, 1), NOT_CANDIDATE + 1)


def last_position(
    blocks: TopkTileSizes, sortable: Any, threshold: Any, used: Any, position_of: Callable[[Any], jax.Array]
) -> jax.Array:
    """The highest position at each row's threshold, int32 `[8, 128]`; -1 if there is none."""
    bound = threshold[...]

    def highest(index: jax.Array, best: jax.Array) -> jax.Array:
        return jnp.maximum(best, jnp.where(sortable[register(index), :] == bound, position_of(index), -1))

    best = unrolled(blocks.chunk_registers, highest, jnp.full(_SHAPE, -1, jnp.int32), blocks.unroll, used)
    # Sums and maxima over lanes are those of float32, which holds a position in two parts.
    high = _over_row(blocks, (best >> 16).astype(jnp.float32), jnp.maximum, jnp.max).astype(jnp.int32)
    low = jnp.where((best >> 16) == high, best & 0xFFFF, -1).astype(jnp.float32)
    return (high << 16) | _over_row(blocks, low, jnp.maximum, jnp.max).astype(jnp.int32)
