"""Sparse attention that copies the selected rows of a paged cache into vector memory, a few rows a copy.

A copy brings a unit of neighbouring rows: the rows that share 32-bit words (two of bfloat16, four of float8), which is
the least that a TPU can address, or an aligned block of eight. What the units hold besides the selected rows is masked.
The rows of a chunk of units are copied while those of the chunk before are attended to; both are in one straight line
of instructions, which issues the copies between the products. The first chunk of a query is copied during the last one
of the query before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from glm52_jax.kernels import Target
from glm52_jax.kernels.lib.pallas import LANES, call
from glm52_jax.kernels.lib.selection import UNIT_BITS

_NOTHING = -1e30
"""Score of a row that is not selected; finite, since the difference of two infinities would be NaN."""


@dataclasses.dataclass(frozen=True)
class StoredPart:
    """One array of a stack, as the kernel copies it.

    Attributes:
        dtype: of its values.
        width: values a row.
        pack: rows that share the words that are copied; 1 where values are copied as they are.
        unit: rows a copy.
    """

    dtype: Any
    width: int
    pack: int
    unit: int

    @property
    def words(self) -> int:
        """Rows of words a copy."""
        return self.unit // self.pack

    @property
    def copied(self) -> Any:
        """Type of what is copied."""
        return jnp.uint32 if self.pack > 1 else self.dtype


@dataclasses.dataclass(frozen=True)
class GatherCall:
    """What is fixed when the kernel is made.

    Attributes:
        parts: of a row.
        unit: rows a copy.
        page_units: units a page.
        chunk: units that are copied and attended to at a time, a multiple of `lanes`.
        early: of those, units that are copied before the chunk before is waited for.
        piece: of those, units that are masked and multiplied together.
        entries: places of a query's list of units, a multiple of `2 * chunk`.
        pages: of a sequence, a multiple of 128.
        tokens: queries a sequence.
        per_core: queries that one core works through.
        rank: width of what is averaged.
        lanes: numbers of a row of what the kernel sees of the lists.
        straight: whether copies are started in a straight line, in which compilers for CPUs would lose themselves.
        given_words: whether the stack's arrays are words already, since simulators cannot take values for them.
    """

    parts: tuple[StoredPart, ...]
    unit: int
    page_units: int
    chunk: int
    early: int
    piece: int
    entries: int
    pages: int
    tokens: int
    per_core: int
    rank: int
    lanes: int
    straight: bool
    given_words: bool = False


def gather_attention(
    plan: GatherCall,
    queries: jax.Array,
    stack: Sequence[jax.Array],
    tables: jax.Array,
    entries: jax.Array,
    counts: jax.Array,
    decode: Any,
    scale: jax.Array,
    *,
    target: Target,
    cost: pl.CostEstimate,
) -> tuple[jax.Array, jax.Array]:
    """Attention of each query to the rows that its list names.

    Args:
        queries: `[cores * per_core, heads, width]`, as wide as the rows that `decode` makes.
        stack: the parts `[rows of all layers, width of the part]`, or their words where those are given.
        tables: int32 `[batch, 1, pages]`, the number of a page's first unit in the stack less that in the sequence.
        entries: int32 `[cores * per_core, entries]`, unit number and bits of its rows; 0 for none.
        counts: int32 `[cores * per_core]`, places of the list up to the last that is not 0.
        decode: of the parts' values in a kernel, `[rows, width of the part]` each, rows in the type of `queries`.
        scale: float32 `[2]`: what scores are multiplied by, and what the average of the decoded rows is.

    Returns:
        out: `[cores * per_core, heads, rank]`.
        lse: float32 `[cores * per_core, 1, heads]`.
    """
    count, heads, width = queries.shape
    cores, groups = count // plan.per_core, plan.entries // plan.lanes
    at = lambda core, step, *_: (core * plan.per_core + step, 0, 0)  # noqa: E731
    words = sorted({plan.unit, *(part.words for part in plan.parts)} - {1})
    spreads = [_spread(plan.lanes, times) for times in words]
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    whole = lambda array: pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim)  # noqa: E731

    def kernel(*refs: Any) -> None:
        _kernel(plan, dict(zip(words, refs[6 : 6 + len(words)], strict=True)), decode, refs[:6], refs[6 + len(words) :])

    out, lse = call(
        kernel,
        name=f"sparse_mla_{'blocks' if plan.unit == 8 else 'rows'}",
        target=target,
        cost=cost,
        semantics=("parallel", "arbitrary"),
        out_shape=(
            jax.ShapeDtypeStruct((count, heads, plan.rank), queries.dtype),
            jax.ShapeDtypeStruct((count, 1, heads), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(cores, plan.per_core),
            in_specs=[
                anywhere,
                anywhere,
                pl.BlockSpec((1, groups, plan.lanes), at),
                pl.BlockSpec((1, heads, width), at),
                *map(whole, spreads),
                *[anywhere] * len(stack),
            ],
            out_specs=(pl.BlockSpec((1, heads, plan.rank), at), pl.BlockSpec((1, 1, heads), at)),
            scratch_shapes=[
                pltpu.SMEM((2 * plan.pages,), jnp.int32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((heads, plan.rank), jnp.float32),
                pltpu.VMEM((heads, LANES), jnp.float32),
                pltpu.VMEM((heads, LANES), jnp.float32),
                pltpu.VMEM((plan.chunk * plan.unit, width), queries.dtype),
                pltpu.VMEM((heads, plan.chunk * plan.unit), jnp.float32),
                pltpu.SemaphoreType.DMA,
                *[pltpu.SMEM((plan.chunk,), jnp.int32)] * 2,
                *[pltpu.SemaphoreType.DMA] * 4,
                *[
                    pltpu.VMEM((plan.chunk * part.words, part.width), part.copied)
                    for part in plan.parts
                    for _ in (0, 1)
                ],
            ],
        ),
    )(
        counts,
        scale,
        (entries >> UNIT_BITS).reshape(-1, 1, plan.chunk),
        tables,
        (entries & ((1 << UNIT_BITS) - 1)).reshape(count, groups, plan.lanes),
        queries,
        *spreads,
        *stack,
    )
    return out, lse


def _kernel(plan: GatherCall, spreads: dict[int, Any], decode: Any, head: Sequence[Any], rest: Sequence[Any]) -> None:
    """One query. Copies that are under way go from one query of a core to the next."""
    counts, scale, lists, tables, bits, queries = head
    count = len(plan.parts)
    out, lse, table, under_way, total, top, norm, kept, scores, table_sem, *scratch = rest[count:]
    step, own = pl.program_id(1), pl.program_id(0) * plan.per_core + pl.program_id(1)
    side = step % 2
    pairs = pl.cdiv(counts[own], 2 * plan.chunk)
    after = own + jnp.where(step + 1 < plan.per_core, 1, 0)
    more = (after > own) & (counts[after] > 0)
    (units, odd_units, list_sem, odd_list_sem, sem, odd_sem), rows = scratch[:6], scratch[6:]
    even = _Buffer(plan, rest[:count], lists, units, list_sem, sem, rows[::2])
    odd = _Buffer(plan, rest[:count], lists, odd_units, odd_list_sem, odd_sem, rows[1::2])

    def table_of(query: Any, side: Any) -> Any:
        place = table.at[pl.ds(pl.multiple_of(side * plan.pages, LANES), plan.pages)]
        return pltpu.make_async_copy(tables.at[query // plan.tokens, 0], place, table_sem)

    @pl.when(step == 0)
    def _() -> None:
        under_way[0] = 0

    @pl.when((pairs > 0) & (under_way[0] == 0))
    def _() -> None:
        table_of(own, side).start()
        even.list_of(own, 0).start()
        odd.list_of(own, 1).start()
        table_of(own, side).wait()
        even.list_of(own, 0).wait()
        even.start_slowly(table.at[pl.ds(pl.multiple_of(side * plan.pages, LANES), plan.pages)])

    @pl.when(more)
    def _() -> None:
        table_of(after, 1 - side).start()

    total[...] = jnp.zeros_like(total)
    top[...] = jnp.full_like(top, _NOTHING)
    norm[...] = jnp.zeros_like(norm)

    @pl.loop(0, pairs)
    def _(pair: Any) -> None:
        last = pair + 1 == pairs

        @pl.when(last & more)
        def _() -> None:
            table_of(after, 1 - side).wait()

        # Where nothing is left to copy, the first chunk is copied again, which keeps this one straight line.
        query = jnp.where(last & more, after, own)
        chunk = jnp.where(last, 0, 2 * pair + 2)
        for now, then, first in ((even, odd, 0), (odd, even, 1)):
            then.list_of(own, 0).wait()
            there = jnp.where(last & more, 1 - side, side) if first else side
            found = table.at[pl.ds(pl.multiple_of(there * plan.pages, LANES), plan.pages)]
            following = now.list_of(query, chunk + first)

            # The next list and some copies before the wait, during the latency of the last of those waited for. They
            # are in a branch, which is always taken, since in a straight line the compiler would move the wait to the
            # front and the list to the end, where its own latency would be waited for.
            @pl.when(pairs > 0)
            def _(following: Any = following, then: Any = then, found: Any = found) -> None:
                following.start()
                then.start(found, range(plan.early))

            now.wait()
            then.start(found, range(plan.early, plan.chunk))
            groups = plan.chunk // plan.lanes
            listed = bits[0, pl.ds((2 * pair + first) * groups, groups), :]
            spread = _in_rows(plan, listed, spreads)
            _accumulate(plan, now, spread, decode, queries[0], scale, (total, top, norm, kept, scores))

    @pl.when((pairs > 0) & ~more)
    def _() -> None:
        even.wait()
        odd.list_of(own, 0).wait()

    @pl.when((pairs == 0) & more)
    def _() -> None:
        table_of(after, 1 - side).wait()

    under_way[0] = ((pairs > 0) & more).astype(jnp.int32)
    weight = norm[:, :1]
    share = scale[1] / jnp.where(weight > 0, weight, 1.0)
    out[0] = (total[...] * share).astype(out.dtype)
    logs = jnp.where(norm[...] > 0, top[...] + jnp.log(norm[...]), -jnp.inf)
    lse[0] = logs.T[:1]


class _Buffer:
    """One of the two places for a chunk: its list of units, and the rows that are copied for them."""

    def __init__(
        self,
        plan: GatherCall,
        parts: Sequence[Any],
        lists: Any,
        units: Any,
        list_sem: Any,
        sem: Any,
        rows: Sequence[Any],
    ):
        self.plan, self.lists, self.units, self.list_sem, self.sem, self.rows = (
            plan,
            lists,
            units,
            list_sem,
            sem,
            rows,
        )
        self.parts = [
            ref.bitcast(jnp.uint32) if part.pack > 1 and not plan.given_words else ref
            for ref, part in zip(parts, plan.parts, strict=True)
        ]

    def list_of(self, query: Any, chunk: Any) -> Any:
        """The copy of a chunk's list."""
        chunks = self.plan.entries // self.plan.chunk
        return pltpu.make_async_copy(self.lists.at[query * chunks + chunk, 0], self.units, self.list_sem)

    def _one(self, table: Any, place: Any) -> None:
        unit, units = self.units[place], self.plan.page_units
        unit += table[unit // units if units & (units - 1) else unit >> (units.bit_length() - 1)]
        for part, ref, rows in zip(self.plan.parts, self.parts, self.rows, strict=True):
            words = part.words
            source = ref.at[pl.ds(pl.multiple_of(unit * words, words), words)]
            where = rows.at[pl.ds(pl.multiple_of(place * words, words), words)]
            pltpu.make_async_copy(source, where, self.sem).start()

    def start(self, table: Any, places: range) -> None:
        """Starts the copies of those units of the chunk that is listed, in a straight line."""
        if self.plan.straight:
            for place in places:
                self._one(table, place)
        else:
            self._start_each(table, places)

    def start_slowly(self, table: Any) -> None:
        """Starts all of them in a loop, where nothing is computed meanwhile."""
        self._start_each(table, range(self.plan.chunk))

    def _start_each(self, table: Any, places: range) -> None:
        at_once = 8 if self.plan.straight else 1

        @pl.loop(0, len(places) // at_once)
        def _(group: Any) -> None:
            for place in range(at_once):
                self._one(table, places.start + group * at_once + place)

    def wait(self) -> None:
        """Waits for all copies of a chunk."""
        for rows in self.rows:
            pltpu.make_async_copy(rows, rows, self.sem).wait()

    def masked(self, spread: dict[int, jax.Array], piece: int) -> tuple[list[jax.Array], jax.Array]:
        """The rows of a piece of the chunk, zeros where they are not selected, and which are: a boolean row.

        What is not selected may be NaN, which would survive a weight of zero.

        Args:
            spread: the bits of the chunk's units, each so many times, in one row.
        """
        plan = self.plan

        def part_of(times: int) -> jax.Array:
            return spread[times][:, piece * plan.piece * times : (piece + 1) * plan.piece * times]

        lane = jax.lax.broadcasted_iota(jnp.int32, (1, plan.piece * plan.unit), 1) % plan.unit
        mask = ((part_of(plan.unit) >> lane) & 1) > 0
        columns = {words: _column(part_of(words)) for words in {part.words for part in plan.parts}}
        rows = []
        for part, ref in zip(plan.parts, self.rows, strict=True):
            keep = _words(columns[part.words], part)
            count = plan.piece * part.words
            values = ref[piece * count : (piece + 1) * count]
            keep = jnp.concatenate([keep] * (-(-part.width // LANES)), axis=1)[:, : part.width]
            if part.pack > 1:
                rows.append(pltpu.bitcast(values & keep, part.dtype))
            else:
                rows.append(jnp.where(keep != 0, values, jnp.zeros_like(values)))
        return rows, mask


def _in_rows(plan: GatherCall, bits: jax.Array, spreads: dict[int, Any]) -> dict[int, jax.Array]:
    """Numbers up to 255, which are exact in bfloat16, each so many times as the keys say, in one row.

    Args:
        bits: int32 `[groups, lanes]`.
    """
    found = {1: bits}
    values = bits.astype(jnp.float32).astype(jnp.bfloat16)
    for times, matrix in spreads.items():
        found[times] = jnp.dot(values, matrix[...], preferred_element_type=jnp.float32).astype(jnp.int32)
    groups = range(bits.shape[0])
    return {times: jnp.concatenate([rows[n : n + 1] for n in groups], axis=1) for times, rows in found.items()}


def _accumulate(
    plan: GatherCall, buffer: _Buffer, spread: dict[int, jax.Array], decode: Any, q: jax.Array, scale: Any, state: Any
) -> None:
    """Adds a chunk of rows to the softmax over all of them.

    Piece by piece: with all of a chunk in registers at once there would not be enough of them, and the compiler stops
    issuing copies where it is short of registers.
    """
    total, top, norm, kept, scores = state
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def product(a: jax.Array, b: jax.Array, contract: int) -> jax.Array:
        dims = (((1,), (contract,)), ((), ()))
        return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)

    size = plan.piece * plan.unit
    pieces = [slice(start, start + size) for start in range(0, plan.chunk * plan.unit, size)]
    before = top[...]
    now = before
    for number, place in enumerate(pieces):
        parts, mask = buffer.masked(spread, number)
        rows = decode(parts)
        kept[place] = rows
        found = jnp.where(mask, product(q, rows, 1) * scale[0], _NOTHING)
        scores[:, place] = found
        now = jnp.maximum(now, jnp.max(found, axis=1, keepdims=True))
    fade = jnp.exp(before - now)
    top[...] = now
    added = norm[...] * fade
    result = total[...] * fade[:, :1]
    for place in pieces:
        found = scores[:, place]
        weights = jnp.where(found > _NOTHING, jnp.exp(found - now[:, :1]), 0.0)
        added += jnp.sum(weights, axis=1, keepdims=True)
        result += product(weights.astype(q.dtype), kept[place, : plan.rank], 0)
    norm[...] = added
    total[...] = result


def in_words(rows: jax.Array, pack: int) -> jax.Array:
    """uint32 `[rows / pack, width]` of rows, as a TPU has neighbouring ones in its words; the rows themselves for 1."""
    if pack == 1:
        return rows
    together = jnp.moveaxis(rows.reshape(-1, pack, rows.shape[1]), 1, 2)
    return jax.lax.bitcast_convert_type(together, jnp.uint32)


def _spread(count: int, times: int) -> np.ndarray:
    """bfloat16 `[count, count * times]` that repeats each of `count` numbers when a row of them is multiplied by it."""
    return (np.arange(count * times)[None] // times == np.arange(count)[:, None]).astype(jnp.bfloat16)


def _column(row: jax.Array) -> jax.Array:
    """The numbers of a row `[1, n]` as a column, in every one of 128 lanes: `[n, 128]`."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def _words(column: jax.Array, part: StoredPart) -> jax.Array:
    """uint32 `[words, 128]`, all ones in the bits of rows that are selected.

    Args:
        column: int32 `[words, 128]`, for every row of words the bits of the unit that it is of.
    """
    place = jax.lax.broadcasted_iota(jnp.int32, column.shape, 0) % part.words
    column = column >> (place * part.pack) if part.words > 1 else column
    width = 32 // part.pack
    # The bit of each row to the lowest of its own bits in the word, and from there to all of them.
    low = column & 1
    for row in range(1, part.pack):
        low |= (column & (1 << row)) << (row * (width - 1))
    ones = -low if part.pack == 1 else (low << width) - low
    return jax.lax.bitcast_convert_type(ones, jnp.uint32)
