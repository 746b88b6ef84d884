"""The cache: a pool of pages, a page table and the rule from a position to a slot.

Per token and layer it holds one row of `kv_lora_rank + qk_rope_head_dim` values (the normalised latent and the rotated
rope key), and on layers with an indexer one index key. Nothing here knows what the rows mean. Slots that were never
written may hold anything, NaN included; whoever reads masks them.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from glm52_jax.config import ModelConfig
from glm52_jax.spec import Stack, stack_layers

PAGE_SIZE = 64


@flax.struct.dataclass
class Cache:
    """Pages of latent rows and index keys, shared by the sequences of a batch through a page table.

    Attributes:
        latent: `[layers, pages, page_size, latent_width]`, the MTP layer last when the model has one.
        index_keys: `[indexers, pages, page_size, index_head_dim]`, full layers and the MTP layer only.
        page_table: int32 `[batch, pages_per_sequence]`, the page that holds positions `j * page_size` and on.
    """

    latent: jax.Array
    index_keys: jax.Array
    page_table: jax.Array

    @classmethod
    def create(
        cls, config: ModelConfig, batch: int, capacity: int, *, dtype: jnp.dtype, page_size: int = PAGE_SIZE
    ) -> Cache:
        """A cache for `batch` sequences of up to `capacity` tokens, contiguous: the page table is the identity."""
        pages = -(-capacity // page_size)
        table = jnp.arange(batch * pages, dtype=jnp.int32).reshape(batch, pages)
        layers, indexers = (len(stack_layers(config, s)) for s in (Stack.LAYER, Stack.INDEXER))
        return cls(
            latent=jnp.zeros((layers, batch * pages, page_size, config.latent_width), dtype),
            index_keys=jnp.zeros((indexers, batch * pages, page_size, config.index_head_dim), dtype),
            page_table=table,
        )

    @property
    def page_size(self) -> int:
        return self.latent.shape[2]

    @property
    def capacity(self) -> int:
        """Positions that a sequence has room for."""
        return self.page_table.shape[1] * self.page_size


def slots(page_table: jax.Array, positions: jax.Array, page_size: int) -> jax.Array:
    """Slot in the pool (page * page_size + offset) of each position; -1 for a negative position.

    Args:
        page_table: int32 `[batch, pages_per_sequence]`.
        positions: int32 `[batch, ...]`.
        page_size: rows a page.
    """
    flat = jnp.maximum(positions, 0).reshape(positions.shape[0], -1)
    pages = jnp.take_along_axis(page_table, flat // page_size, axis=1)
    found = (pages * page_size + flat % page_size).reshape(positions.shape)
    return jnp.where(positions < 0, -1, found)


def gather_rows(stack: jax.Array, layer: jax.Array | int, page_table: jax.Array, positions: jax.Array) -> jax.Array:
    """Rows of one layer at `positions` `[batch, n]`: `[batch, n, width]`, zeros where the position is -1."""
    layers, pages, page_size, width = stack.shape
    where = slots(page_table, positions, page_size)
    flat = stack.reshape(layers * pages * page_size, width)
    rows = jnp.take(flat, layer * pages * page_size + jnp.maximum(where, 0), axis=0, mode="clip")
    return jnp.where((where >= 0)[..., None], rows, jnp.zeros((), stack.dtype))


def context_rows(stack: jax.Array, layer: jax.Array | int, page_table: jax.Array, lengths: jax.Array) -> jax.Array:
    """All rows of one layer in order of position: `[batch, capacity, width]`, zeros from `lengths[b]` on."""
    layers, pages, page_size, width = stack.shape
    batch, per_row = page_table.shape
    whole = stack.reshape(layers * pages, page_size, width)
    rows = jnp.take(whole, layer * pages + page_table, axis=0, mode="clip").reshape(batch, per_row * page_size, width)
    written = jnp.arange(per_row * page_size) < lengths[:, None]
    return jnp.where(written[..., None], rows, jnp.zeros((), stack.dtype))
