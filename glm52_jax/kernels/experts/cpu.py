"""Experts on the CPU: assignments sorted by expert, then expert by expert, each in tiles of its own tokens, the
last of them cut to what is left.

An expert that no token chose is never read; the weights of the others are read once. (On the CPU `lax.ragged_dot`
computes every expert: about 26 times slower with 8 of 64 in use.)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from glm52_jax.kernels.lib.prefix import over_prefix
from glm52_jax.kernels.lib.stacks import layer_of
from glm52_jax.kernels.linear import mlp
from glm52_jax.params.quantization import Weight

_LARGEST_TILE = 256


def routed_experts_sorted(
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
    tile = min(_LARGEST_TILE, tokens)  # an expert has at most every token
    order, starts, counts = sort_by_expert(experts.reshape(-1), count)
    # Tiles of expert e are numbers first[e] to first[e + 1] - 1.
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(-(-counts // tile), dtype=jnp.int32)])
    token_of = jnp.pad(order // k, (0, tile))  # room for a last tile that reaches past the end

    def run_tile(number: jax.Array, outputs: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(first, number, side="right") - 1
        done = (number - first[expert]) * tile
        row = starts[expert] + done
        weights = (
            layer_of(gate_up, layer, expert, 0),
            layer_of(gate_up, layer, expert, 1),
            layer_of(down, layer, expert),
        )
        inputs = jnp.take(x, jax.lax.dynamic_slice(token_of, (row,), (tile,)), axis=0)

        def run_rows(rows: int, inputs: jax.Array) -> jax.Array:
            return jnp.pad(mlp(inputs[:rows], *weights).astype(jnp.float32), ((0, tile - rows), (0, 0)))

        result = over_prefix(counts[expert] - done - 1, tile, -(-tile // 4) if tile <= 64 else 32, run_rows, inputs)
        # Rows past this expert's last are overwritten by the next expert's tile, which comes later.
        return jax.lax.dynamic_update_slice(outputs, result, (row, 0))

    outputs = jnp.zeros((tokens * k + tile, x.shape[-1]), jnp.float32)
    outputs = jax.lax.fori_loop(0, first[-1], run_tile, outputs)
    chosen = jnp.take(outputs, jnp.argsort(order), axis=0).reshape(tokens, k, -1)
    return jnp.sum(jnp.where(experts[..., None] >= 0, gates[..., None] * chosen, 0.0), axis=1)


def sort_by_expert(experts: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Stable order of assignments by expert, with padding (-1) last; the first row and the number of each expert's."""
    key = jnp.where(experts < 0, count, experts)
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    counts = jnp.sum(key[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)
    starts = jnp.cumsum(counts, dtype=jnp.int32) - counts
    return order, starts, counts
