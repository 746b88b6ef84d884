"""The cache: a pool of pages, a page table and the rule from a position to a slot.

Per token and layer it holds one row of `kv_lora_rank + qk_rope_head_dim` values (the normalised latent and the rotated
rope key), and on layers with an indexer one index key. Nothing here knows what the rows mean. Slots that were never
written may hold anything, NaN included; whoever reads masks them.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from glm52_jax.cache.cache_format import PLAIN_CACHE, CacheFormat
from glm52_jax.cache.row_formats import RowStack, empty_stack
from glm52_jax.config import ModelConfig
from glm52_jax.params.spec import Stack, stack_layers
from sharding.layout import SINGLE, Layout

PAGE_SIZE = 64


@flax.struct.dataclass
class PagedCache:
    """Pages of latent rows and index keys, shared by the sequences of a batch through a page table.

    Attributes:
        latent: `[layers, pages, page_size, latent_width]`, the MTP layer last when the model has one; or the same rows
            in parts, where their format has several.
        index_keys: `[indexers, pages, page_size, index_head_dim]`, full layers and the MTP layer only.
        page_table: int32 `[batch, pages_per_sequence]`, the page that holds positions `j * page_size` and on.
    """

    latent: RowStack
    index_keys: RowStack
    page_table: jax.Array

    @classmethod
    def create(
        cls,
        config: ModelConfig,
        batch: int,
        capacity: int,
        *,
        dtype: jnp.dtype,
        page_size: int = PAGE_SIZE,
        form: CacheFormat | None = None,
        layout: Layout = SINGLE,
    ) -> PagedCache:
        """A cache for `batch` sequences of up to `capacity` tokens, contiguous: the page table is the identity.

        On a mesh it is one device's part, of its own sequences and the pages that are dealt to it; see `Deal`.

        Args:
            dtype: that the model computes in, and of rows that are stored plain.
            form: of the rows; plain when None.
        """
        form = form or PLAIN_CACHE
        pages = -(-capacity // (page_size * layout.parts("kv_pages")))
        table = jnp.arange(batch * pages, dtype=jnp.int32).reshape(batch, pages)
        layers, indexers = (len(stack_layers(config, s)) for s in (Stack.LAYER, Stack.INDEXER))
        return cls(
            latent=empty_stack(form.latent_rows(config, layers, dtype), (layers, batch * pages, page_size)),
            index_keys=empty_stack(form.key_rows(config, dtype), (indexers, batch * pages, page_size)),
            page_table=table,
        )

    @property
    def page_size(self) -> int:
        return jax.tree.leaves(self.latent)[0].shape[2]

    @property
    def capacity(self) -> int:
        """Positions that a sequence has room for, on this device."""
        return self.page_table.shape[1] * self.page_size
