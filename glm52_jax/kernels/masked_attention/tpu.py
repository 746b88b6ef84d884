"""Masked attention on TPUs: blocks of scores that never leave the core, and none for blocks without an attended key.

The gradient computes the weights of a block once more from the log-sum-exp of its rows; see `gradient`.
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
from glm52_jax.kernels.lib.pallas import LANES, call
from glm52_jax.kernels.masked_attention import tile_sizes as sizes
from glm52_jax.kernels.masked_attention.chunk import AttentionTile, bias_of, product
from glm52_jax.kernels.masked_attention.gradient import gradient
from glm52_jax.kernels.masked_attention.tile_sizes import MaskedAttentionTileSizes
from glm52_jax.kernels.sparse_mla.dense_kernel import LOG2_E, LOWEST, cuts, mix, spread, sum_to_lanes


def masked_attention_tpu(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    scale: float,
    *,
    target: Target,
) -> jax.Array:
    """See `api.masked_attention`; differentiable by queries, keys and values.

    Which blocks count is read from the mask, so the positions are not needed.
    """
    del positions

    @jax.custom_vjp
    def run(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
        return masked_attention_forward(q, k, v, seen, scale, target=target)[0]

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> tuple[jax.Array, Any]:
        out, lse = masked_attention_forward(q, k, v, seen, scale, target=target, with_lse=True)
        return out, (q, k, v, seen, out, lse)

    def backward(kept: Any, d_out: jax.Array) -> tuple[Any, ...]:
        q, k, v, seen, out, lse = kept
        return *gradient(q, k, v, seen, scale, out, lse, d_out, target=target), None

    run.defvjp(forward, backward)
    return run(queries, keys, values, mask)


def masked_attention_forward(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    scale: float,
    *,
    target: Target,
    with_lse: bool = False,
    blocks: MaskedAttentionTileSizes | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """The output, and where it is asked for the log-sum-exp, float32 `[batch, heads, tokens]`."""
    tokens, heads = queries.shape[1:3]
    blocks = blocks or sizes.choose(target, tokens, keys.shape[1], heads)
    chunk = AttentionTile.of(queries, keys, values, mask, blocks)
    plan = chunk.plan
    listed, counts = chunk.live()
    group, wide = blocks.heads, plan.width

    def key_block(b: Any, h: Any, i: Any, j: Any, lists: Any, _: Any) -> tuple[Any, ...]:
        return b, lists[(b * plan.tiles + i) * plan.blocks + j], h

    def mask_block(b: Any, h: Any, i: Any, j: Any, lists: Any, _: Any) -> tuple[Any, ...]:
        return b, i, lists[(b * plan.tiles + i) * plan.blocks + j]

    own = pl.BlockSpec((None, blocks.queries, group * wide), lambda b, h, i, j, *_: (b, i, h))
    out_spec = pl.BlockSpec((None, blocks.queries, group * plan.value_width), lambda b, h, i, j, *_: (b, i, h))
    lse_spec = pl.BlockSpec((None, group, blocks.queries, 1), lambda b, h, i, j, *_: (b, h, i, 0))
    results = [
        (out_spec, jax.ShapeDtypeStruct((plan.batch, chunk.queries.shape[1], heads * plan.value_width), queries.dtype)),
        (lse_spec, jax.ShapeDtypeStruct((plan.batch, heads, chunk.queries.shape[1], 1), jnp.float32)),
    ][: 2 if with_lse else 1]
    out, *rest = call(
        functools.partial(_kernel, _Forward(blocks, plan.blocks, plan.tiles, wide, plan.value_width, scale)),
        name="masked_attention",
        target=target,
        cost=sizes.cost(
            plan.batch, tokens, keys.shape[1], heads, queries.shape[3], values.shape[3], queries.dtype.itemsize
        ),
        out_shape=[shape for _, shape in results],
        semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(plan.batch, heads // group, plan.tiles, plan.blocks),
            in_specs=[
                own,
                pl.BlockSpec((None, blocks.keys, group * wide), key_block),
                pl.BlockSpec((None, blocks.keys, group * plan.value_width), key_block),
                pl.BlockSpec((None, blocks.queries, blocks.keys), mask_block),
            ],
            out_specs=[spec for spec, _ in results],
            scratch_shapes=[
                pltpu.VMEM((blocks.queries, blocks.keys), jnp.float32),
                pltpu.VMEM((blocks.queries, group * plan.value_width), jnp.float32),
                pltpu.VMEM((group, blocks.queries, LANES), jnp.float32),
                pltpu.VMEM((group, blocks.queries, LANES), jnp.float32),
            ],
        ),
    )(listed, counts, chunk.queries, chunk.keys, chunk.values, chunk.mask)
    out = out[:, :tokens].reshape(plan.batch, tokens, heads, plan.value_width)[..., : values.shape[3]]
    return out, rest[0][:, :, :tokens, 0] if with_lse else None


@dataclasses.dataclass(frozen=True)
class _Forward:
    """What is static in the kernel: sizes, how many blocks and tiles there are, widths of a head."""

    blocks: MaskedAttentionTileSizes
    count: int
    tiles: int
    width: int
    value_width: int
    scale: float


def _kernel(form: _Forward, listed: Any, counts: Any, q: Any, k: Any, v: Any, mask: Any, *refs: Any) -> None:
    """One block of keys for one tile of queries of some heads."""
    out, *rest = refs
    lse = rest[0] if len(rest) == 5 else None
    bias, total_out, top, total = rest[-4:]
    step = pl.program_id(3)

    @pl.when(step == 0)
    def _begin() -> None:
        total_out[...] = jnp.zeros_like(total_out)
        top[...] = jnp.full_like(top, LOWEST)
        total[...] = jnp.zeros_like(total)

    @pl.when(step < counts[pl.program_id(0) * form.tiles + pl.program_id(2)])
    def _block() -> None:
        bias[...] = bias_of(mask[...])
        parts = [
            _OnlineSoftmax(form, head, (start, stop), q, k, v, bias, total_out, top, total)
            for head in range(form.blocks.heads)
            for start, stop in cuts(form.blocks.queries, form.blocks.rows)
        ]
        mix(parts[0].score_steps())
        for before, part, after in zip([None, *parts], parts, [*parts[1:], None], strict=False):
            products = [*(after.score_steps() if after else []), *(before.average_steps() if before else [])]
            mix(products, part.weight_steps())
        mix(parts[-1].average_steps())

    @pl.when(step + 1 == form.count)
    def _end() -> None:
        for head in range(form.blocks.heads):
            own = slice(head * form.value_width, (head + 1) * form.value_width)
            sums = jnp.sum(total[head], axis=1, keepdims=True)
            some = sums > 0
            safe = jnp.where(some, sums, 1.0)
            out[:, own] = jnp.where(some, total_out[:, own] * (1.0 / safe), 0.0).astype(out.dtype)
            if lse is not None:
                lse[head] = jnp.where(some, (top[head][:, :1] + jnp.log2(safe)) / LOG2_E, -jnp.inf)


class _OnlineSoftmax:
    """Some queries of a head, on their way through a block; cut into steps as those of `dense_kernel`."""

    def __init__(self, form: _Forward, head: int, rows: tuple[int, int], *refs: Any) -> None:
        self.form, self.head, self.rows = form, head, rows
        self.q, self.k, self.v, self.bias, self.out, self.top, self.total = refs
        self.own = slice(head * form.width, (head + 1) * form.width)
        self.scores: list[jax.Array] = []
        self.weights: list[jax.Array] = []
        self.shrink: list[jax.Array] = []

    def score_steps(self) -> list[Any]:
        return [functools.partial(self._score, *cut) for cut in cuts(self.form.blocks.keys, 2 * LANES)]

    def weight_steps(self) -> list[Any]:
        start, stop = self.rows
        return [functools.partial(self._weigh, start + first, start + last) for first, last in cuts(stop - start, 64)]

    def average_steps(self) -> list[Any]:
        return [functools.partial(self._average, *cut) for cut in cuts(self.form.value_width, 2 * LANES)]

    def _score(self, start: int, stop: int) -> None:
        self.scores.append(product(self.q[slice(*self.rows), self.own], self.k[start:stop, self.own], 1, 1))

    def _weigh(self, first: int, last: int) -> None:
        head, rows, base = self.head, slice(first, last), self.rows[0]
        scores = jnp.concatenate([piece[first - base : last - base] for piece in self.scores], axis=1)
        masked = scores * (self.form.scale * LOG2_E) + self.bias[rows]
        old = self.top[head, rows]
        top = jnp.maximum(old, jnp.max(masked, axis=1, keepdims=True))
        weight = jnp.exp2(masked - spread(top, masked.shape[1]))
        shrink = jnp.exp2(old - top)
        self.top[head, rows] = top
        self.total[head, rows] = self.total[head, rows] * shrink + sum_to_lanes(weight)
        self.weights.append(weight.astype(self.q.dtype))
        self.shrink.append(shrink)

    def _average(self, start: int, stop: int) -> None:
        first = self.head * self.form.value_width
        own = slice(first + start, first + stop)
        added = product(jnp.concatenate(self.weights), self.v[:, own], 1, 0)
        rows = slice(*self.rows)
        self.out[rows, own] = self.out[rows, own] * spread(jnp.concatenate(self.shrink), stop - start) + added
