"""Experts on the CPU: assignments sorted by expert, cut into tiles of one expert's tokens, one tile after another.

An expert that no token chose has no tile and is never read; its weights are read once a tile. (On the CPU
`lax.ragged_dot` computes every expert: about 26 times slower with 8 of 64 in use.)
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from glm52_jax.primitives import swiglu
from glm52_jax.quant import Weight

_LARGEST_TILE = 256


def routed_experts_tiled(
    x: jax.Array,
    experts: jax.Array,
    gates: jax.Array,
    gate_up: Weight,
    down: Weight,
    layer: jax.Array | int,
) -> jax.Array:
    """See `api.routed_experts`."""
    tokens, k = experts.shape
    count = jax.tree.leaves(down)[0].shape[1]
    tile = tile_rows(tokens * k, count)
    order, starts, counts = sort_by_expert(experts.reshape(-1), count)
    # Tiles of expert e are numbers first[e] .. first[e + 1] - 1.
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(-(-counts // tile), dtype=jnp.int32)])
    # Room for a last tile that reaches past the end.
    token_of = jnp.pad(order // k, (0, tile))

    def run(number: jax.Array, outputs: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(first, number, side="right") - 1
        row = starts[expert] + (number - first[expert]) * tile
        inputs = jnp.take(x, jax.lax.dynamic_slice(token_of, (row,), (tile,)), axis=0)
        result = swiglu(inputs, gate_up, down, layer, expert)
        # Rows past this expert's last are overwritten by the next expert's tile, which comes later.
        return jax.lax.dynamic_update_slice(outputs, result.astype(jnp.float32), (row, 0))

    outputs = jnp.zeros((tokens * k + tile, x.shape[-1]), jnp.float32)
    outputs = jax.lax.fori_loop(0, first[-1], run, outputs)
    place = jnp.argsort(order)
    chosen = jnp.take(outputs, place, axis=0).reshape(tokens, k, -1)
    return jnp.sum(jnp.where(experts[..., None] >= 0, gates[..., None] * chosen, 0.0), axis=1)


def tile_rows(assignments: int, experts: int) -> int:
    """Rows of a tile: about the mean number of tokens an expert gets, a power of two."""
    mean = max(1, assignments // experts)
    return min(
        _LARGEST_TILE, 1 << (mean - 1).bit_length() if mean > 1 else 1, 1 << math.ceil(math.log2(assignments + 1))
    )


def sort_by_expert(experts: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Stable order of assignments by expert, with padding (-1) last; the first row and the number of each expert's."""
    key = jnp.where(experts < 0, count, experts)
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    counts = jnp.sum(key[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)
    starts = jnp.cumsum(counts, dtype=jnp.int32) - counts
    return order, starts, counts
