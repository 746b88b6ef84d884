"""Gradient of masked attention: one kernel for the queries, one for keys and values.

Both compute a block's weights from the log-sum-exp of its rows. That for keys and values works on transposed scores, so
that no product needs a transposed operand.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from glm52_jax.kernels import Target
from glm52_jax.kernels.lib.pallas import call
from glm52_jax.kernels.masked_attention import tile_sizes as sizes
from glm52_jax.kernels.masked_attention.chunk import AttentionTile, bias_of, flat, product
from glm52_jax.kernels.masked_attention.tile_sizes import MaskedAttentionTileSizes
from glm52_jax.kernels.sparse_mla.dense_kernel import LOG2_E


def gradient(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    scale: float,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    *,
    target: Target,
    blocks: MaskedAttentionTileSizes | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cotangents of queries, keys and values.

    Args:
        out, lse: what the forward kernel gave.
        d_out: cotangent of `out`.
    """
    tokens, heads = queries.shape[1:3]
    blocks = blocks or sizes.choose(target, tokens, keys.shape[1], heads, backward=True)
    # A query that attends to nothing has no part in any gradient, and may hold anything.
    attends = jnp.any(mask, axis=-1)[..., None, None]
    chunk = AttentionTile.of(jnp.where(attends, queries, 0), keys, values, mask, blocks)
    # The gradient of a score is its weight times what its product differs from this.
    mean = jnp.einsum("bthv,bthv->bht", d_out.astype(jnp.float32), out.astype(jnp.float32))
    rows = [jnp.where(jnp.isfinite(lse), lse, 0.0) * LOG2_E, mean]
    rows = [jnp.pad(row, ((0, 0), (0, 0), (0, -tokens % blocks.queries))) for row in rows]
    call_ = _Backward(chunk, target, heads, scale, flat(d_out.astype(queries.dtype), blocks.queries))
    d_queries = call_.queries([row[..., None] for row in rows])
    d_keys, d_values = call_.keys([row[:, :, None] for row in rows])

    def whole(d: jax.Array, like: jax.Array) -> jax.Array:
        return d.reshape(*d.shape[:2], heads, -1)[:, : like.shape[1], :, : like.shape[3]].astype(like.dtype)

    return whole(d_queries, queries), whole(d_keys, keys), whole(d_values, values)


@dataclasses.dataclass(frozen=True)
class _Backward:
    """The two kernels, with what they share."""

    chunk: AttentionTile
    target: Target
    heads: int
    scale: float
    d_out: jax.Array

    def _widths(self) -> tuple[int, int]:
        return self.chunk.sizes.heads * self.chunk.plan.width, self.chunk.sizes.heads * self.chunk.plan.value_width

    def _cost(self, products: int) -> pl.CostEstimate:
        """Of so many products of the width of a head for each score."""
        plan, of = self.chunk.plan, self.chunk.sizes
        pairs = plan.batch * plan.tiles * of.queries * plan.blocks * of.keys * self.heads
        operands = (self.chunk.queries, self.chunk.keys, self.chunk.values, self.d_out, self.chunk.mask)
        moved = sum(operand.size * operand.dtype.itemsize for operand in operands)
        return pl.CostEstimate(flops=2 * pairs * products * plan.width, transcendentals=pairs, bytes_accessed=moved)

    def queries(self, rows: list[jax.Array]) -> jax.Array:
        """Cotangent of the queries; `rows` are `[batch, heads, tokens, 1]`."""
        chunk, plan, of = self.chunk, self.chunk.plan, self.chunk.sizes
        listed, counts = chunk.live()
        wide, tall = self._widths()

        def at(i: Any, b: Any, j: Any, lists: Any) -> Any:
            return lists[(b * plan.tiles + i) * plan.blocks + j]

        column = pl.BlockSpec((None, of.heads, of.queries, 1), lambda b, h, i, j, *_: (b, h, i, 0))
        own = pl.BlockSpec((None, of.queries, wide), lambda b, h, i, j, *_: (b, i, h))
        return call(
            functools.partial(_query_kernel, self._form(plan.tiles, plan.blocks)),
            name="masked_attention_dq",
            target=self.target,
            cost=self._cost(3),
            out_shape=jax.ShapeDtypeStruct(chunk.queries.shape, jnp.float32),
            semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(plan.batch, self.heads // of.heads, plan.tiles, plan.blocks),
                in_specs=[
                    own,
                    pl.BlockSpec((None, of.keys, wide), lambda b, h, i, j, n, _: (b, at(i, b, j, n), h)),
                    pl.BlockSpec((None, of.keys, tall), lambda b, h, i, j, n, _: (b, at(i, b, j, n), h)),
                    pl.BlockSpec((None, of.queries, tall), lambda b, h, i, j, *_: (b, i, h)),
                    pl.BlockSpec((None, of.queries, of.keys), lambda b, h, i, j, n, _: (b, i, at(i, b, j, n))),
                    column,
                    column,
                ],
                out_specs=own,
            ),
        )(listed, counts, chunk.queries, chunk.keys, chunk.values, self.d_out, chunk.mask, *rows)

    def keys(self, rows: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Cotangents of keys and values; `rows` are `[batch, heads, 1, tokens]`."""
        chunk, plan, of = self.chunk, self.chunk.plan, self.chunk.sizes
        listed, counts = chunk.live(by_key=True)
        wide, tall = self._widths()

        def at(j: Any, b: Any, i: Any, lists: Any) -> Any:
            return lists[(b * plan.blocks + j) * plan.tiles + i]

        row = pl.BlockSpec((None, of.heads, 1, of.queries), lambda b, h, j, i, n, _: (b, h, 0, at(j, b, i, n)))
        key = pl.BlockSpec((None, of.keys, wide), lambda b, h, j, i, *_: (b, j, h))
        value = pl.BlockSpec((None, of.keys, tall), lambda b, h, j, i, *_: (b, j, h))
        return call(
            functools.partial(_key_kernel, self._form(plan.blocks, plan.tiles)),
            name="masked_attention_dkv",
            target=self.target,
            cost=self._cost(4),
            out_shape=[
                jax.ShapeDtypeStruct(chunk.keys.shape, jnp.float32),
                jax.ShapeDtypeStruct(chunk.values.shape, jnp.float32),
            ],
            semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(plan.batch, self.heads // of.heads, plan.blocks, plan.tiles),
                in_specs=[
                    pl.BlockSpec((None, of.queries, wide), lambda b, h, j, i, n, _: (b, at(j, b, i, n), h)),
                    key,
                    value,
                    pl.BlockSpec((None, of.queries, tall), lambda b, h, j, i, n, _: (b, at(j, b, i, n), h)),
                    pl.BlockSpec((None, of.keys, of.queries), lambda b, h, j, i, n, _: (b, j, at(j, b, i, n))),
                    row,
                    row,
                ],
                out_specs=[key, value],
            ),
        )(
            listed, counts, chunk.queries, chunk.keys, chunk.values, self.d_out,
            jnp.swapaxes(chunk.mask, 1, 2), *rows,
        )  # fmt: skip

    def _form(self, outer: int, inner: int) -> _BackwardTile:
        plan = self.chunk.plan
        return _BackwardTile(self.chunk.sizes.heads, outer, inner, plan.width, plan.value_width, self.scale)


@dataclasses.dataclass(frozen=True)
class _BackwardTile:
    """What is static in a kernel: heads of a block, sizes of the last two dimensions of the grid, widths of a head."""

    heads: int
    outer: int
    inner: int
    width: int
    value_width: int
    scale: float

    def own(self, head: int) -> tuple[slice, slice]:
        width, tall = self.width, self.value_width
        return slice(head * width, (head + 1) * width), slice(head * tall, (head + 1) * tall)

    def live(self, counts: Any) -> Any:
        return pl.program_id(3) < counts[pl.program_id(0) * self.outer + pl.program_id(2)]


def _query_kernel(form: _BackwardTile, _: Any, counts: Any, q: Any, k: Any, v: Any, d: Any, *refs: Any) -> None:
    mask, lse, mean, d_q = refs

    @pl.when(pl.program_id(3) == 0)
    def _begin() -> None:
        d_q[...] = jnp.zeros_like(d_q)

    @pl.when(form.live(counts))
    def _block() -> None:
        bias = bias_of(mask[...])
        for head in range(form.heads):
            own, tall = form.own(head)
            scores = product(q[:, own], k[:, own], 1, 1) * (form.scale * LOG2_E)
            weights = jnp.exp2(scores + bias - lse[head])
            products = product(d[:, tall], v[:, tall], 1, 1)
            d_scores = weights * (products - mean[head]) * form.scale
            d_q[:, own] += product(d_scores.astype(k.dtype), k[:, own], 1, 0)


def _key_kernel(form: _BackwardTile, _: Any, counts: Any, q: Any, k: Any, v: Any, d: Any, *refs: Any) -> None:
    mask, lse, mean, d_k, d_v = refs

    @pl.when(pl.program_id(3) == 0)
    def _begin() -> None:
        d_k[...] = jnp.zeros_like(d_k)
        d_v[...] = jnp.zeros_like(d_v)

    @pl.when(form.live(counts))
    def _block() -> None:
        bias = bias_of(mask[...])
        for head in range(form.heads):
            own, tall = form.own(head)
            scores = product(k[:, own], q[:, own], 1, 1) * (form.scale * LOG2_E)
            weights = jnp.exp2(scores + bias - lse[head])
            d_v[:, tall] += product(weights.astype(d.dtype), d[:, tall], 1, 0)
            products = product(v[:, tall], d[:, tall], 1, 1)
            d_scores = weights * (products - mean[head]) * form.scale
            d_k[:, own] += product(d_scores.astype(q.dtype), q[:, own], 1, 0)
