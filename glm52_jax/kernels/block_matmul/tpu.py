"""Rows by a matrix on a TPU: the matrix goes through vector memory once, in blocks of rows as wide as it is.

A plain product of codes has XLA write the dequantised matrix to HBM first, several times the bytes of the codes.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from glm52_jax.kernels import Target
from glm52_jax.kernels.block_matmul import tile_sizes
from glm52_jax.kernels.block_matmul.product import Scales, Stack, WeightEncoding, scales_of, values_of
from glm52_jax.kernels.lib.pallas import call


def block_matmul_tiled(x: jax.Array, weight: Stack, layer: jax.Array | int, *, dtype: Any, target: Target) -> jax.Array:
    """See `api.block_matmul`."""
    rows, inner = x.shape
    values, scales = values_of(weight), scales_of(weight)
    between, out = values.shape[1:-2], values.shape[-2]
    pieces = math.prod(between)
    sizes = tile_sizes.choose(target, rows, weight, x.dtype)
    form = WeightEncoding.of(weight, x, sizes.out, target)
    padded = jnp.pad(x, ((0, -rows % sizes.rows), (0, 0)))

    steps = -(-out // sizes.out)

    def block_of(step: Any, row: Any, layer: Any) -> tuple[Any, ...]:
        return layer[0], step // steps, step % steps, 0

    operands, specs = (
        [form.prepare(padded), values.reshape(-1, pieces, *values.shape[-2:])],
        [
            pl.BlockSpec((sizes.rows, inner), lambda step, row, layer: (row, 0)),
            pl.BlockSpec((None, None, sizes.out, inner), block_of),
        ],
    )
    if scales is not None:
        scales = scales.reshaped(pieces)
        operands.append(scales.array)
        specs.append(scales.spec(lambda step, row, layer: (layer[0], step // steps)))
    result = call(
        functools.partial(_kernel, form, scales, sizes, steps),
        name="block_matmul",
        target=target,
        cost=tile_sizes.cost(padded.shape[0], weight, x.dtype, dtype),
        out_shape=jax.ShapeDtypeStruct((pieces, padded.shape[0], out), dtype),
        semantics=("parallel", "arbitrary"),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pieces * steps, padded.shape[0] // sizes.rows),
            in_specs=specs,
            out_specs=pl.BlockSpec(
                (None, sizes.rows, sizes.out), lambda step, row, _: (step // steps, row, step % steps)
            ),
        ),
    )(jnp.asarray(layer, jnp.int32).reshape(1), *operands)
    result = result[0] if pieces == 1 else jnp.moveaxis(result, 0, 1)
    return result.reshape(-1, *between, out)[:rows]


def _kernel(
    form: WeightEncoding,
    scales: Scales | None,
    sizes: tile_sizes.BlockMatmulTileSizes,
    steps: int,
    layer: Any,
    x: Any,
    weight: Any,
    *refs: Any,
) -> None:
    del layer
    *scale_refs, out = refs
    block = pl.program_id(0) % steps * sizes.out

    def some_rows(part: Any, carry: Any) -> Any:
        here = pl.ds(pl.multiple_of(part * sizes.part, sizes.part), sizes.part)

        def columns(first: Any, size: int) -> None:
            def scale(number: int, column: int) -> Any:
                assert form.block is not None
                assert scales is not None
                # The last block of rows may reach past the matrix, and what it gives there is not kept.
                row = jnp.minimum((block + first) // form.block[0] + number, scales.rows - 1)
                return scales.of(scale_refs[0], row, column)

            sums = form.sums(x.at[here], weight.at[pl.ds(first, size)], scale)
            out[here, pl.ds(first, size)] = form.in_order(sums.astype(out.dtype))

        form.each_group(sizes.out, columns, weight.shape[-1])
        return carry

    jax.lax.fori_loop(0, sizes.rows // sizes.part, some_rows, None)
