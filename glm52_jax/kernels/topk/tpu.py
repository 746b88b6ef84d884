"""Selection on a TPU: rows of scores arrive chunk by chunk and stay in vector memory until their best are listed."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from glm52_jax.kernels import Target
from glm52_jax.kernels.lib.pallas import LANES, SUBLANES, call
from glm52_jax.kernels.lib.sortable_bits import NOT_CANDIDATE, from_sortable_bits, is_selected, sortable_bits
from glm52_jax.kernels.topk import compaction, threshold_search
from glm52_jax.kernels.topk.tile_sizes import TopkTileSizes, choose, cost, threshold_cost


def topk(
    scores: jax.Array, k: int, *, target: Target, blocks: TopkTileSizes | None = None
) -> tuple[jax.Array, jax.Array]:
    """See `api.topk`. The lists are in order of position."""
    rows = _Rows.of(scores.shape, k, bool(target.interpret), blocks)
    out = (rows.outer, rows.tiles * rows.blocks.rows, rows.blocks.list_rows, LANES)
    listed = pl.BlockSpec((None, rows.blocks.rows, *out[2:]), lambda o, i, c: (o, i, 0, 0))
    lists = call(
        functools.partial(_list_kernel, rows=rows),
        name="topk",
        target=target,
        cost=cost(rows.outer * rows.inner, rows.positions, k),
        semantics=("parallel", "parallel", "arbitrary"),
        out_shape=[jax.ShapeDtypeStruct(out, jnp.int32), jax.ShapeDtypeStruct(out, jnp.float32)],
        grid=rows.grid,
        in_specs=[rows.spec],
        out_specs=[listed, listed],
        scratch_shapes=[*rows.scratch, *compaction.scratch(rows.blocks)],
    )(rows.view(scores))
    indices, values = (
        array.reshape(*out[:2], -1)[:, : rows.inner, :k].reshape(*scores.shape[:-1], k) for array in lists
    )
    return indices, values


def topk_indices(scores: jax.Array, k: int, *, target: Target) -> jax.Array:
    """See `api.topk_indices`."""
    return topk(scores, k, target=target)[0]


def topk_mask(scores: jax.Array, k: int, *, target: Target) -> jax.Array:
    """See `api.topk_mask`. The kernel finds the last one that is chosen; comparing with it is left to XLA."""
    positions = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    last, position = _last(scores, None, k, target)
    return is_selected(scores, positions, last[..., None], position[..., None])


def compact(indices: jax.Array, *, target: Target) -> jax.Array:
    """See `api.compact`: all of what is there is selected, with the numbers as its scores, which float32 holds."""
    scores = jnp.where(indices >= 0, indices.astype(jnp.float32), -jnp.inf)
    place, values = topk(scores, indices.shape[-1], target=target)
    return jnp.where(place >= 0, values, -1).astype(jnp.int32)


def kth_best(scores: jax.Array, positions: jax.Array, k: int, *, target: Target) -> tuple[jax.Array, jax.Array]:
    """See `api.kth_best`."""
    return _last(scores, positions, k, target)


def _last(
    scores: jax.Array, positions: jax.Array | None, k: int, target: Target, blocks: TopkTileSizes | None = None
) -> tuple[jax.Array, jax.Array]:
    """Score and position of the k-th in order, `[...]`; positions are those in the row if none are given."""
    rows = _Rows.of(scores.shape, k, bool(target.interpret), blocks)
    arrays = [scores] if positions is None else [scores, positions]
    out = (rows.outer, rows.tiles * SUBLANES, LANES)
    found = pl.BlockSpec((None, SUBLANES, LANES), lambda o, i, c: (o, i, 0))
    kept_positions = [] if positions is None else [pltpu.VMEM(rows.registers, jnp.int32)]
    parts = call(
        functools.partial(_last_kernel, rows=rows, listed=positions is not None),
        name="topk_last",
        target=target,
        cost=threshold_cost(rows.outer * rows.inner, rows.positions, len(arrays)),
        semantics=("parallel", "parallel", "arbitrary"),
        out_shape=[jax.ShapeDtypeStruct(out, jnp.float32), jax.ShapeDtypeStruct(out, jnp.int32)],
        grid=rows.grid,
        in_specs=[rows.spec] * len(arrays),
        out_specs=[found, found],
        scratch_shapes=[*rows.scratch, *kept_positions],
    )(*(rows.view(array) for array in arrays))
    score, position = (part[:, : rows.inner, 0].reshape(scores.shape[:-1]) for part in parts)
    return score, position


@dataclasses.dataclass(frozen=True)
class _Rows:
    """How rows of scores are given to a kernel.

    A single row, or one in each element of the dimensions before, is in memory as registers hold it, and goes alone.
    Otherwise rows are selected from eight at a time, as a tile has them.

    Attributes:
        outer, inner: numbers of arrays of rows, and of rows in one.
        positions: of a row.
    """

    outer: int
    inner: int
    positions: int
    blocks: TopkTileSizes

    @classmethod
    def of(cls, shape: tuple[int, ...], k: int, interpret: bool, blocks: TopkTileSizes | None) -> _Rows:
        *outer, inner, positions = (1, *shape) if len(shape) == 1 else shape
        count = math.prod(outer)
        if inner % SUBLANES == 0:
            count, inner = 1, count * inner
        height = 1 if inner == 1 else SUBLANES
        return cls(count, inner, positions, blocks or choose(height, positions, k, interpret=interpret))

    @property
    def tiles(self) -> int:
        return -(-self.inner // self.blocks.rows)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.outer, self.tiles, self.blocks.positions // self.blocks.chunk

    @property
    def spec(self) -> pl.BlockSpec:
        if self.blocks.rows == 1:
            return pl.BlockSpec((None, self.blocks.chunk // LANES, LANES), lambda o, i, c: (o, c, 0))
        return pl.BlockSpec((None, SUBLANES, self.blocks.chunk), lambda o, i, c: (o, i, c))

    @property
    def registers(self) -> tuple[int, int]:
        return self.blocks.registers * SUBLANES, LANES

    @property
    def scratch(self) -> list[Any]:
        """All images, the candidates, and the threshold."""
        kept = max(1, self.blocks.candidates) * SUBLANES, LANES
        return [pltpu.VMEM(shape, jnp.int32) for shape in (self.registers, kept, (SUBLANES, LANES))]

    def view(self, array: jax.Array) -> jax.Array:
        """The array as `spec` cuts it. What is padded is masked by position, whatever it holds."""
        flat = array.reshape(self.outer, self.inner, self.positions)
        short = max(0, self.blocks.chunk - self.positions)
        if self.blocks.rows == 1:
            flat = jnp.pad(flat, ((0, 0), (0, 0), (0, short or -self.positions % LANES)))
            return flat.reshape(self.outer, -1, LANES)
        return jnp.pad(flat, ((0, 0), (0, 0), (0, short))) if short else flat

    def register(self, ref: Any, index: jax.Array) -> jax.Array:
        """One register of a chunk."""
        if self.blocks.rows == 1:
            return ref[threshold_search.register(index), :]
        return ref[:, pl.ds(pl.multiple_of(index * LANES, LANES), LANES)]

    def position(self, index: jax.Array) -> jax.Array:
        """Positions of one register of all."""
        step = SUBLANES // self.blocks.rows * LANES
        return threshold_search.position_in_register(self.blocks) + index * step

    def absorb(self, scores: Any, sortable: Any, kept: Any) -> None:
        """Takes in the chunk of this step."""
        chunk = pl.program_id(2)
        # Rows that are not there would be searched for ties.
        there = self.inner - pl.program_id(1) * self.blocks.rows
        is_row = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 0) % self.blocks.rows < there

        def load(index: jax.Array) -> jax.Array:
            values = sortable_bits(self.register(scores, index))
            if self.inner % self.blocks.rows:
                values = jnp.where(is_row, values, NOT_CANDIDATE)
            if self.blocks.positions == self.positions:
                return values
            position = self.position(chunk * self.blocks.chunk_registers + index)
            return jnp.where(position < self.positions, values, NOT_CANDIDATE)

        threshold_search.absorb(self.blocks, load, chunk, sortable, kept)

    def find_edge(self, sortable: Any, kept: Any, threshold: Any, positions: Any = None) -> jax.Array:
        """See `threshold.find_threshold`; positions are those in the row if none are given."""
        bits = 31
        of = lambda i: positions[threshold_search.register(i), :]  # noqa: E731
        if positions is None:
            of, bits = self.position, (self.blocks.positions - 1).bit_length()
        return threshold_search.find_threshold(
            self.blocks, sortable, kept, threshold, self.grid[2], position_of=of, position_bits=bits
        )


def _is_last_chunk() -> jax.Array:
    return pl.program_id(2) == pl.num_programs(2) - 1


def _list_kernel(scores, indices, values, sortable, kept, threshold, *scratch, rows: _Rows):  # noqa: ANN001, ANN002, ANN202
    """Lists of the rows of one block, at its last chunk."""
    rows.absorb(scores, sortable, kept)
    there = jnp.minimum(rows.inner - pl.program_id(1) * rows.blocks.rows, rows.blocks.rows)

    @pl.when(_is_last_chunk())
    def _() -> None:
        most = jnp.max(rows.find_edge(sortable, kept, threshold))

        @pl.when(most > 0)
        def _() -> None:
            compaction.write_lists(rows.blocks, sortable, threshold, rows.grid[2], indices, values, scratch, there)

        @pl.when(most == 0)
        def _() -> None:
            compaction.write_nothing(indices, values)


def _last_kernel(*refs, rows: _Rows, listed: bool):  # noqa: ANN002, ANN202
    """The last ones that are chosen from the rows of one block, at its last chunk."""
    scores, *given = refs[: 2 if listed else 1]
    score, position, sortable, kept, threshold, *copies = refs[2 if listed else 1 :]
    rows.absorb(scores, sortable, kept)
    positions = copies[0] if listed else None
    if listed:
        first = pl.program_id(2) * rows.blocks.chunk_registers

        def copy(index: jax.Array, carry: None) -> None:
            copies[0][threshold_search.register(first + index), :] = rows.register(given[0], index)

        jax.lax.fori_loop(0, rows.blocks.chunk_registers, copy, None)

    @pl.when(_is_last_chunk())
    def _() -> None:
        enough = rows.find_edge(sortable, kept, threshold, positions) >= rows.blocks.k
        threshold_search.raise_threshold(rows.blocks, sortable, threshold, rows.grid[2])
        of = rows.position if positions is None else lambda i: positions[threshold_search.register(i), :]
        score[...] = jnp.where(enough, from_sortable_bits(threshold[...]), -jnp.inf)
        position[...] = threshold_search.last_position(rows.blocks, sortable, threshold, rows.grid[2], of)
