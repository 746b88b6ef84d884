"""Queries, keys and values as the kernels of masked attention take them: heads side by side, whole blocks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from glm52_jax.kernels.lib.pallas import LANES
from glm52_jax.kernels.masked_attention.tile_sizes import MaskedAttentionTileSizes


@dataclasses.dataclass(frozen=True)
class TileGrid:
    """Shapes: tiles of queries, blocks of keys, and the widths of a head, padded to whole lanes."""

    batch: int
    tiles: int
    blocks: int
    width: int
    value_width: int


@dataclasses.dataclass(frozen=True)
class AttentionTile:
    """The operands.

    Attributes:
        queries: `[batch, tokens, heads x width]`; keys and values alike.
        mask: int8 `[batch, tokens, positions]`, zeros in what was padded.
    """

    plan: TileGrid
    sizes: MaskedAttentionTileSizes
    queries: jax.Array
    keys: jax.Array
    values: jax.Array
    mask: jax.Array

    @classmethod
    def of(
        cls, queries: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array, sizes: MaskedAttentionTileSizes
    ) -> AttentionTile:
        q, k, v = flat(queries, sizes.queries), flat(keys, sizes.keys), flat(values, sizes.keys)
        seen = mask.astype(jnp.int8)
        seen = jnp.pad(seen, ((0, 0), (0, q.shape[1] - mask.shape[1]), (0, k.shape[1] - mask.shape[2])))
        heads = queries.shape[2]
        plan = TileGrid(
            batch=q.shape[0],
            tiles=q.shape[1] // sizes.queries,
            blocks=k.shape[1] // sizes.keys,
            width=q.shape[2] // heads,
            value_width=v.shape[2] // heads,
        )
        return cls(plan, sizes, q, k, v, seen)

    def live(self, *, by_key: bool = False) -> tuple[jax.Array, jax.Array]:
        """For each tile of queries the blocks of keys in which some query attends to something, or the other way.

        Returns:
            listed: int32 `[batch x tiles x blocks]`, in order; the last one is repeated behind, so that it stays.
            counts: int32 `[batch x tiles]`.
        """
        plan, sizes = self.plan, self.sizes
        cut = self.mask.reshape(plan.batch, plan.tiles, sizes.queries, plan.blocks, sizes.keys)
        some = jnp.any(cut != 0, axis=(2, 4))
        if by_key:
            some = jnp.swapaxes(some, 1, 2)
        counts = jnp.sum(some, axis=-1, dtype=jnp.int32)
        # By the number of live ones before each; a sort of so few would cost a TPU more.
        number = jnp.arange(some.shape[-1], dtype=jnp.int32)
        before = jnp.cumsum(some, axis=-1, dtype=jnp.int32) - 1
        places = jnp.minimum(number, jnp.maximum(counts - 1, 0)[..., None])
        here = some[..., None, :] & (before[..., None, :] == places[..., None])
        return jnp.sum(jnp.where(here, number, 0), axis=-1).reshape(-1), counts.reshape(-1)


def flat(values: jax.Array, rows: int) -> jax.Array:
    """`[batch, positions, heads x width]`: positions padded to a multiple of `rows`, a head's width to whole lanes."""
    batch, positions, heads, width = values.shape
    padded = jnp.pad(values, ((0, 0), (0, -positions % rows), (0, 0), (0, -width % LANES)))
    return padded.reshape(batch, padded.shape[1], heads * padded.shape[3])


def bias_of(mask: jax.Array) -> jax.Array:
    """What masks scores when it is added: zero, or minus infinity where nothing is attended to."""
    return jnp.where(mask.astype(jnp.int32) != 0, 0.0, -jnp.inf)


def product(x: jax.Array, y: jax.Array, x_axis: int, y_axis: int) -> jax.Array:
    """float32 product of two matrices over the given dimensions."""
    return jax.lax.dot_general(
        x,
        y,
        (((x_axis,), (y_axis,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
