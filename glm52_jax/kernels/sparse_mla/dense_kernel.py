"""The body of the kernel `dense_mla`; see `dense`, which calls it."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

if TYPE_CHECKING:
    from glm52_jax.kernels.sparse_mla.dense import Plan

LOWEST = -1e30  # of a maximum: finite, so that the difference of two is
WORD = 32
_LOG2_E = math.log2(math.e)
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
        out, top, total: float32, of the online softmax; the latter two fill all lanes.
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


def kernel(plan: Plan, scale: float, layer: Any, lengths: Any, table: Any, live: Any, *refs: Any) -> None:
    """One tile of queries on one core; operands in the order of `dense.attend`."""
    layer_scale, queries, seen, *refs = refs
    stacks, refs = refs[: len(plan.rows.names)], refs[len(plan.rows.names) :]
    out, lse, *own = refs
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
        state[_COUNTS + (step + 1) % 2] = 0

    count, following = state[_COUNTS + step % 2], state[_COUNTS + (step + 1) % 2]

    @pl.when((count > 0) & (state[_STARTED] == 0))
    def _start() -> None:
        blocks.start(step, 0, state[_SLOT])

    state[_STARTED] = jnp.where(count > 0, following > 0, 0).astype(jnp.int32)
    _begin(plan, queries, scratch)
    factor = scale * _LOG2_E * layer_scale[0]

    def block(number: jax.Array, carry: int) -> int:
        slot = state[_SLOT]
        more = number + 1 < count

        @pl.when(more | (following > 0))
        def _prefetch() -> None:
            blocks.start(jnp.where(more, step, step + 1), jnp.where(more, number + 1, 0), 1 - slot)

        blocks.wait(step, number, slot)
        _load(plan, blocks.left(step, number), slot, scratch)
        _compute(plan, factor, scratch)
        state[_SLOT] = 1 - slot
        return carry

    jax.lax.fori_loop(0, count, block, 0)
    total, top = scratch.total[...], scratch.top[...]
    some = total > 0
    safe = jnp.where(some, total, 1.0)
    out[...] = (scratch.out[...] * (layer_scale[0] / safe)[:, :1]).astype(out.dtype)
    lse[...] = jnp.where(some, (top + jnp.log2(safe)) / _LOG2_E, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """The live blocks of this core's tiles, and their copies."""

    plan: Plan
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
        first = step % 2 * plan.blocks
        words = plan.item(self.core, step) * plan.words

        def bit(block: Any) -> Any:
            return (self.live[words + block // WORD] >> (block % WORD)) & 1

        count = jax.lax.fori_loop(0, plan.blocks, lambda b, n: n + bit(b), 0) if plan.splits > 1 else plan.blocks
        low, high = (count * (self.core + end) // plan.splits if plan.splits > 1 else end * count for end in (0, 1))

        def add(block: jax.Array, found: jax.Array) -> jax.Array:
            # A block that is not to be read is overwritten by the next.
            scratch.listed[first + jnp.clip(found - low, 0, plan.blocks - 1)] = block
            return found + bit(block)

        found = jax.lax.fori_loop(0, plan.blocks, add, jnp.int32(0))
        scratch.state[_COUNTS + step % 2] = jnp.minimum(found, high) - low

    def _number(self, step: Any, number: Any) -> Any:
        return self.scratch.listed[step % 2 * self.plan.blocks + number]

    def left(self, step: Any, number: Any) -> Any:
        """Written rows from the start of a block on."""
        sequence = self.plan.item(self.core, step) // self.plan.tiles
        return self.lengths[sequence] - self._number(step, number) * self.plan.keys

    def start(self, step: Any, number: Any, slot: Any) -> None:
        self._each(step, number, slot, lambda copy: copy.start())

    def wait(self, step: Any, number: Any, slot: Any) -> None:
        self._each(step, number, slot, lambda copy: copy.wait())

    def _each(self, step: Any, number: Any, slot: Any, act: Any) -> None:
        plan, scratch = self.plan, self.scratch
        item, block = plan.item(self.core, step), self._number(step, number)
        arrived = scratch.arrived.at[slot]
        keys = pl.ds(pl.multiple_of(block * plan.keys, plan.keys), plan.keys)
        act(pltpu.make_async_copy(self.seen.at[item, :, keys], scratch.seen.at[slot], arrived))
        first = item // plan.tiles * plan.table + block * plan.pages
        # The last block of a sequence may be cut by its length or by the table's.
        left = self.lengths[item // plan.tiles] - block * plan.keys
        count = jnp.minimum((left + plan.page - 1) // plan.page, plan.pages)

        def page(number: jax.Array, carry: int) -> int:
            where = jnp.clip(self.table[first + number], 0, self.stacks[0].shape[1] - 1)
            for stack, buffer in zip(self.stacks, scratch.parts, strict=True):
                act(pltpu.make_async_copy(stack.at[self.layer, where], buffer.at[slot, number], arrived))
            return carry

        jax.lax.fori_loop(0, count, page, 0)


def _begin(plan: Plan, queries: Any, scratch: Scratch) -> None:
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


def _load(plan: Plan, left: Any, slot: Any, scratch: Scratch) -> None:
    """Lays out a block's rows and mask; rows that were never written become zeros."""
    scratch.mask[...] = scratch.seen[slot].astype(jnp.int32)
    keys = plan.keys
    parts = [buffer[slot].reshape(keys, buffer.shape[-1]) for buffer in scratch.parts]
    if plan.rows.groups is None:
        scratch.rows[...] = _cast(parts[0], plan.dtype)
    else:
        group, first = plan.rows.groups
        codes, scales = parts[0], parts[1].astype(jnp.float32)
        for start in range(0, codes.shape[-1], group):
            piece = codes[:, start : start + group].astype(jnp.float32)
            number = min(first + start // group, scales.shape[-1] - 1)
            scratch.rows[:, start : start + group] = (piece * scales[:, number : number + 1]).astype(plan.dtype)
        scratch.rows[:, codes.shape[-1] :] = _cast(parts[-1], plan.dtype)

    @pl.when(left < keys)
    def _cut() -> None:
        rows = scratch.rows[...].astype(jnp.float32)
        written = jax.lax.broadcasted_iota(jnp.int32, rows.shape, 0) < left
        scratch.rows[...] = jnp.where(written, rows, 0.0).astype(plan.dtype)


def _cast(values: jax.Array, dtype: Any) -> jax.Array:
    return values if values.dtype == dtype else values.astype(jnp.float32).astype(dtype)


def _compute(plan: Plan, factor: Any, scratch: Scratch) -> None:
    """Adds a block to the online softmax of a tile, in powers of two."""
    precision = jax.lax.Precision.HIGHEST if plan.dtype == jnp.float32 else None
    heads = plan.heads
    for first in range(0, plan.tile, plan.product):
        count = min(plan.product, plan.tile - first)
        tall = pl.ds(first * heads, count * heads)
        scores = jax.lax.dot_general(
            scratch.queries[tall],
            scratch.rows[...],
            (((1,), (1,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        weights, scaled = [], []
        for query in range(count):
            own = slice(query * heads, (query + 1) * heads)
            at = pl.ds((first + query) * heads, heads)
            seen = jnp.broadcast_to(scratch.mask[first + query : first + query + 1], (heads, plan.keys)) != 0
            masked = jnp.where(seen, scores[own] * factor, -jnp.inf)
            old = scratch.top[at]
            top = jnp.maximum(old, jnp.max(masked, axis=1, keepdims=True))
            weight = jnp.exp2(masked - top[:, :1])
            shrink = jnp.exp2(old - top)
            scratch.top[at] = top
            scratch.total[at] = scratch.total[at] * shrink + jnp.sum(weight, axis=1, keepdims=True)
            weights.append(weight.astype(plan.dtype))
            scaled.append(scratch.out[at] * shrink[:, :1])
        product = jax.lax.dot_general(
            jnp.concatenate(weights),
            scratch.rows[:, : plan.rows.values],
            (((1,), (0,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        scratch.out[tall] = jnp.concatenate(scaled) + product
