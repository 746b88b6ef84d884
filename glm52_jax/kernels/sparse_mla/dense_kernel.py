"""The body of the kernel `dense_mla`; see `dense`, which calls it."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from glm52_jax.kernels.lib.pallas import LANES
from glm52_jax.kernels.sparse_mla.dense_plan import WORD, DenseCall

LOWEST = -1e30  # of a maximum: finite, so that the difference of two is


_WORD_BITS = 5


LOG2_E = math.log2(math.e)


_STEP_ROWS = 64  # whose weights are computed between two products


_SLOT, _STARTED, _COUNTS = 0, 1, 2  # places in the kernel's state


@dataclasses.dataclass(frozen=True)
class Scratch:
    """The kernel's own memory; the first dimension of what is copied into is one of two buffers in turn.

    Attributes:
        seen: int8 `[2, queries, keys]`, a block of the mask.
        parts: `[2, pages, page, width]` each, a block of rows as the cache has them.
        mask: int32 `[queries, keys]`, of the block that is computed on.
        rows: `[keys, width]`, its rows as they meet the queries.
        queries: `[queries x heads, width]`, padded as the rows are.
        out, top, total: float32, of the online softmax; the top fills all lanes, the total is
            their sum.
        listed: int32 `[2 x blocks]`, the live blocks of this tile and of the next.
        state: int32: the buffer that is filled next, whether a tile's first block is on its way, lengths of the lists.
        arrived: a semaphore a buffer.
    """

    seen: Any
    parts: list[Any]
    mask: Any
    rows: Any
    queries: Any
    out: Any
    top: Any
    total: Any
    listed: Any
    state: Any
    arrived: Any


def kernel(plan: DenseCall, scale: float, layer: Any, lengths: Any, table: Any, live: Any, *refs: Any) -> None:
    """One tile of queries on one core; operands in the order of `dense.attend`."""
    layer_scale, queries, seen, *others = refs
    stacks = others[: len(plan.rows.names)]
    out, lse, *own = others[len(stacks) :]
    scratch = Scratch(*own)
    core, step = pl.program_id(0), pl.program_id(1)
    blocks = _Blocks(plan, layer[0], lengths, table, live, seen, stacks, scratch, core)
    state = scratch.state

    @pl.when(step == 0)
    def _first() -> None:
        state[_SLOT] = 0
        state[_STARTED] = 0
        blocks.list_live(0)

    @pl.when(step + 1 < plan.steps)
    def _next() -> None:
        blocks.list_live(step + 1)

    @pl.when(step + 1 == plan.steps)
    def _last() -> None:
        state[_COUNTS + ((step + 1) & 1)] = 0

    count, following = state[_COUNTS + (step & 1)], state[_COUNTS + ((step + 1) & 1)]

    @pl.when((count > 0) & (state[_STARTED] == 0))
    def _start() -> None:
        blocks.start(step, 0, state[_SLOT])

    state[_STARTED] = jnp.where(count > 0, following > 0, 0).astype(jnp.int32)
    _begin(plan, queries, scratch)
    factor = scale * LOG2_E * layer_scale[0]

    def block(number: jax.Array, carry: int) -> int:
        slot = state[_SLOT]
        more = number + 1 < count

        @pl.when(more | (following > 0))
        def _prefetch() -> None:
            blocks.start(jnp.where(more, step, step + 1), jnp.where(more, number + 1, 0), 1 - slot)

        blocks.wait(step, number, slot)
        rows = _load(plan, blocks.left(step, number), slot, scratch)
        _compute(plan, factor, rows, scratch)
        state[_SLOT] = 1 - slot
        return carry

    jax.lax.fori_loop(0, count, block, 0)
    total, top = jnp.sum(scratch.total[...], axis=1, keepdims=True), scratch.top[...]
    some = total > 0
    safe = jnp.where(some, total, 1.0)
    out[...] = (scratch.out[...] * (layer_scale[0] / safe)).astype(out.dtype)
    lse[...] = jnp.where(some, (top + jnp.log2(safe)) / LOG2_E, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """The live blocks of this core's tiles, and their copies."""

    plan: DenseCall
    layer: Any
    lengths: Any
    table: Any
    live: Any
    seen: Any
    stacks: list[Any]
    scratch: Scratch
    core: Any

    def list_live(self, step: Any) -> None:
        """Lists the blocks that this core reads for a tile."""
        plan, scratch = self.plan, self.scratch
        first = (step & 1) * plan.blocks
        words = plan.item(self.core, step) * plan.words

        def bit(block: Any) -> Any:
            return (self.live[words + (block >> _WORD_BITS)] >> (block & (WORD - 1))) & 1

        count = jax.lax.fori_loop(0, plan.blocks, lambda b, n: n + bit(b), 0) if plan.splits > 1 else plan.blocks
        low, high = (count * (self.core + end) // plan.splits if plan.splits > 1 else end * count for end in (0, 1))

        def add(block: jax.Array, found: jax.Array) -> jax.Array:
            # A block that is not to be read is overwritten by the next.
            scratch.listed[first + jnp.clip(found - low, 0, plan.blocks - 1)] = block
            return found + bit(block)

        found = jax.lax.fori_loop(0, plan.blocks, add, jnp.int32(0))
        scratch.state[_COUNTS + (step & 1)] = jnp.minimum(found, high) - low

    def _number(self, step: Any, number: Any) -> Any:
        return self.scratch.listed[(step & 1) * self.plan.blocks + number]

    def _sequence(self, step: Any) -> Any:
        return jax.lax.div(jnp.asarray(self.plan.item(self.core, step), jnp.int32), jnp.int32(self.plan.tiles))

    def left(self, step: Any, number: Any) -> Any:
        """Written rows from the start of a block on."""
        sequence = self._sequence(step)
        return self.lengths[sequence] - self._number(step, number) * self.plan.keys

    def start(self, step: Any, number: Any, slot: Any) -> None:
        """Starts the copies of a block of rows and of the mask."""
        plan = self.plan
        item, block = plan.item(self.core, step), self._number(step, number)
        keys = pl.ds(pl.multiple_of(block * plan.keys, plan.keys), plan.keys)
        self._copy(self.seen.at[item, :, keys], self.scratch.seen, slot).start()
        first = self._sequence(step) * plan.table + block * plan.pages
        last = self.stacks[0].shape[1] - 1

        def page(number: Any) -> None:
            where = jnp.clip(self.table[first + number], 0, last)
            for stack, buffer in zip(self.stacks, self.scratch.parts, strict=True):
                self._copy(stack.at[self.layer, where], buffer, slot, number).start()

        self._each(step, number, page)

    def wait(self, step: Any, number: Any, slot: Any) -> None:
        """Waits for all copies of a block; what is waited for is the number of bytes, whatever they are."""
        self._copy(self.scratch.seen.at[slot], self.scratch.seen, slot).wait()

        def page(number: Any) -> None:
            for buffer in self.scratch.parts:
                self._copy(buffer.at[slot, number], buffer, slot, number).wait()

        def whole() -> None:
            for buffer in self.scratch.parts:
                self._copy(buffer.at[slot], buffer, slot).wait()

        self._each(step, number, page, whole)

    def _copy(self, source: Any, buffer: Any, *place: Any) -> Any:
        return pltpu.make_async_copy(source, buffer.at[place], self.scratch.arrived.at[place[0]])

    def _each(self, step: Any, number: Any, page: Any, whole: Any = None) -> None:
        """Does something for each page of a block, without a loop for a full one; its length may cut the last one."""
        plan = self.plan
        # Of a live block something is left; a plain division of signed numbers takes twice the instructions.
        count = jax.lax.div(self.left(step, number) + plan.page - 1, jnp.int32(plan.page))

        @pl.when(count >= plan.pages)
        def _full() -> None:
            if whole is not None:
                whole()
            else:
                for number in range(plan.pages):
                    page(number)

        @pl.when(count < plan.pages)
        def _some() -> None:
            jax.lax.fori_loop(0, count, lambda number, carry: (page(number), carry)[1], 0)


def _begin(plan: DenseCall, queries: Any, scratch: Scratch) -> None:
    """Lays out a tile's queries and empties its sums."""
    place = 0
    for start, size, width in plan.rows.sections:
        part = queries[:, start : start + size]
        if size < width:
            part = jnp.concatenate([part, jnp.zeros((part.shape[0], width - size), part.dtype)], axis=1)
        scratch.queries[:, place : place + width] = part
        place += width
    scratch.out[...] = jnp.zeros_like(scratch.out)
    scratch.top[...] = jnp.full_like(scratch.top, LOWEST)
    scratch.total[...] = jnp.zeros_like(scratch.total)


def _load(plan: DenseCall, left: Any, slot: Any, scratch: Scratch) -> Any:
    """Lays out a block's mask and rows, with zeros for those never written.

    Returns:
        A function that gives rows of it: (first, end, first column, end).
    """
    scratch.mask[...] = scratch.seen[slot].astype(jnp.int32)
    if plan.plain:
        (held,) = scratch.parts

        @pl.when(left < plan.keys)
        def _cut() -> None:
            def cut(number: jax.Array, carry: int) -> int:
                held[slot, number] = _written(held[slot, number], left - number * plan.page)
                return carry

            jax.lax.fori_loop(jnp.maximum(left, 0) // plan.page, plan.pages, cut, 0)

        def take(start: int, stop: int, low: int, high: int) -> jax.Array:
            first, last = start // plan.page, -(-stop // plan.page)
            pages = held[slot, first:last, :, low:high].reshape((last - first) * plan.page, high - low)
            return pages[start - first * plan.page : stop - first * plan.page]

        return take
    keys, rows = plan.keys, scratch.rows
    parts = [buffer[slot].reshape(keys, buffer.shape[-1]) for buffer in scratch.parts]
    if plan.rows.groups is None:
        rows[...] = _cast(parts[0], plan.dtype)
    else:
        group, first = plan.rows.groups
        codes, scales = parts[0], parts[1].astype(jnp.float32)
        for start in range(0, codes.shape[-1], group):
            piece = codes[:, start : start + group].astype(jnp.float32)
            number = min(first + start // group, scales.shape[-1] - 1)
            rows[:, start : start + piece.shape[1]] = (piece * scales[:, number : number + 1]).astype(plan.dtype)
        rows[:, codes.shape[-1] :] = _cast(parts[-1], plan.dtype)

    @pl.when(left < keys)
    def _cut() -> None:
        rows[...] = _written(rows[...], left)

    return lambda start, stop, low, high: rows[start:stop, low:high]


def _written(rows: jax.Array, left: Any) -> jax.Array:
    """Zeros from row `left` on."""
    written = jax.lax.broadcasted_iota(jnp.int32, rows.shape, 0) < left
    return jnp.where(written, rows.astype(jnp.float32), 0.0).astype(rows.dtype)


def _cast(values: jax.Array, dtype: Any) -> jax.Array:
    return values if values.dtype == dtype else values.astype(jnp.float32).astype(dtype)


def _compute(plan: DenseCall, factor: Any, rows: Any, scratch: Scratch) -> None:
    """Adds a block to the online softmax of a tile, in powers of two.

    The work is cut into parts, of some queries and some keys. While the vector units compute the weights of one part,
    the matrix units compute the scores of the next and the averages of the one before; the compiler overlaps what
    stands close together, so each product is cut into columns, between which the weights of single queries are put.
    """
    parts = [
        _OnlineSoftmax(plan, factor, rows, scratch, (first, min(plan.product, plan.tile - first)), slice(start, stop))
        for start, stop in cuts(plan.keys, plan.chunk)
        for first in range(0, plan.tile, plan.product)
    ]
    mix(parts[0].score_steps())
    for before, part, after in zip([None, *parts], parts, [*parts[1:], None], strict=False):
        products = [*(after.score_steps() if after else []), *(before.average_steps() if before else [])]
        mix(products, part.weight_steps())
    mix(parts[-1].average_steps())


def cuts(size: int, width: int) -> list[tuple[int, int]]:
    """Starts and ends of pieces of `width`, the last one cut."""
    return [(start, min(start + width, size)) for start in range(0, size, width)]


def spread(column: jax.Array, width: int) -> jax.Array:
    """A column that fills all lanes, over any width; without a permutation where that is whole lanes."""
    if width % LANES:
        return jnp.broadcast_to(column[:, :1], (column.shape[0], width))
    return jnp.concatenate([column] * (width // LANES), axis=1)


def sum_to_lanes(values: jax.Array) -> jax.Array:
    """Sums over columns that are whole lanes apart; the lanes themselves are added up at the end."""
    padded = jnp.pad(values, ((0, 0), (0, -values.shape[1] % LANES)))
    return sum(padded[:, start : start + LANES] for start in range(LANES, padded.shape[1], LANES)) + padded[:, :LANES]


def mix(*lists: list[Any]) -> None:
    """Runs the steps of several lists, spread evenly over each other."""
    places = [((number + 1) / len(steps), step) for steps in lists for number, step in enumerate(steps)]
    for _, step in sorted(places, key=lambda place: place[0]):
        step()


class _OnlineSoftmax:
    """Some queries of a tile, on their way through a block."""

    def __init__(
        self, plan: DenseCall, factor: Any, rows: Any, scratch: Scratch, queries: tuple[int, int], keys: slice
    ) -> None:
        self.plan, self.factor, self.rows, self.scratch, self.keys = plan, factor, rows, scratch, keys
        first, count = self.first, self.count = queries
        self.precision = jax.lax.Precision.HIGHEST if plan.dtype == jnp.float32 else None
        self.tall = pl.ds(first * plan.heads, count * plan.heads)
        self.scores: list[jax.Array] = []
        self.weights: list[jax.Array] = []
        self.shrink: list[jax.Array] = []

    def score_steps(self) -> list[Any]:
        places = cuts(self.keys.stop - self.keys.start, self.plan.columns)
        return [
            functools.partial(self._score, self.keys.start + start, self.keys.start + stop) for start, stop in places
        ]

    def weight_steps(self) -> list[Any]:
        """A step for some queries whose heads fill whole tiles of two-byte values."""
        together = max(1, _STEP_ROWS // self.plan.heads)
        return [functools.partial(self._weigh, *cut) for cut in cuts(self.count, together)]

    def average_steps(self) -> list[Any]:
        return [functools.partial(self._average, *cut) for cut in cuts(self.plan.rows.values, self.plan.columns)]

    def _score(self, start: int, stop: int) -> None:
        self.scores.append(
            jax.lax.dot_general(
                self.scratch.queries[self.tall],
                self.rows(start, stop, 0, self.plan.rows.width),
                (((1,), (1,)), ((), ())),
                precision=self.precision,
                preferred_element_type=jnp.float32,
            )
        )

    def _weigh(self, start: int, stop: int) -> None:
        heads, scratch, first = self.plan.heads, self.scratch, self.first
        own = slice(start * heads, stop * heads)
        at = pl.ds((first + start) * heads, (stop - start) * heads)
        rows = [scratch.mask[first + query : first + query + 1, self.keys] for query in range(start, stop)]
        seen = jnp.concatenate([jnp.broadcast_to(row, (heads, row.shape[1])) for row in rows]) != 0
        scores = jnp.concatenate([piece[own] for piece in self.scores], axis=1)
        masked = jnp.where(seen, scores * self.factor, -jnp.inf)
        old = scratch.top[at]
        top = jnp.maximum(old, jnp.max(masked, axis=1, keepdims=True))
        weight = jnp.exp2(masked - spread(top, masked.shape[1]))
        shrink = jnp.exp2(old - top)
        scratch.top[at] = top
        scratch.total[at] = scratch.total[at] * shrink + sum_to_lanes(weight)
        self.weights.append(weight.astype(self.plan.dtype))
        self.shrink.append(shrink)

    def _average(self, start: int, stop: int) -> None:
        product = jax.lax.dot_general(
            jnp.concatenate(self.weights),
            self.rows(self.keys.start, self.keys.stop, start, stop),
            (((1,), (0,)), ((), ())),
            precision=self.precision,
            preferred_element_type=jnp.float32,
        )
        shrink = spread(jnp.concatenate(self.shrink), stop - start)
        out = self.scratch.out
        out[self.tall, start:stop] = out[self.tall, start:stop] * shrink + product
