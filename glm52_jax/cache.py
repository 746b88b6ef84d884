"""The cache: a pool of pages, a page table and the rule from a position to a slot.

Per token and layer it holds one row of `kv_lora_rank + qk_rope_head_dim` values (the normalised latent and the rotated
rope key), and on layers with an indexer one index key. Nothing here knows what the rows mean. Slots that were never
written may hold anything, NaN included; whoever reads masks them.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from glm52_jax.axis_rules import asking
from glm52_jax.config import ModelConfig
from glm52_jax.row_formats import PLAIN_CACHE, CacheFormat, RowStack, decode, parts_of, stack_of
from glm52_jax.spec import Stack, stack_layers
from sharding import collectives
from sharding.layout import SINGLE, Layout

PAGE_SIZE = 64


@flax.struct.dataclass
class Cache:
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
    ) -> Cache:
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
            latent=stack_of(form.latent_rows(config, layers, dtype), (layers, batch * pages, page_size)),
            index_keys=stack_of(form.key_rows(config, dtype), (indexers, batch * pages, page_size)),
            page_table=table,
        )

    @property
    def page_size(self) -> int:
        return jax.tree.leaves(self.latent)[0].shape[2]

    @property
    def capacity(self) -> int:
        """Positions that a sequence has room for, on this device."""
        return self.page_table.shape[1] * self.page_size


@dataclasses.dataclass(frozen=True)
class Deal:
    """Which positions of a sequence a device keeps: its pages are dealt in turn to the devices along `kv_pages`.

    Page j is on device `j % count`, where it is page `j // count`. What a device keeps is a sequence of its own, in the
    same order, so that whoever reads the cache needs positions in it and nothing else.

    Attributes:
        index: int32, this device's number.
        count: devices that the pages are dealt to.
        page_size: rows a page.
    """

    index: jax.Array | int
    count: int
    page_size: int

    @classmethod
    def of(cls, layout: Layout, cache: Cache) -> Deal:
        axes = layout.axes_of("kv_pages")
        return cls(collectives.index(layout, axes), layout.size(axes), cache.page_size)

    def kept(self, positions: jax.Array) -> jax.Array:
        """Where this device keeps each position, int32; -1 where it does not, and for -1."""
        page = positions // self.page_size
        mine = (positions >= 0) & (page % self.count == self.index)
        return jnp.where(mine, page // self.count * self.page_size + positions % self.page_size, -1)

    def seen(self, positions: jax.Array) -> jax.Array:
        """The last of this device's own places that is not after each position, int32; -1 where there is none."""
        page, offset = positions // self.page_size, positions % self.page_size
        before = (page - self.index + self.count - 1) // self.count
        rows = before * self.page_size + jnp.where(page % self.count == self.index, offset + 1, 0)
        return jnp.where(positions >= 0, rows - 1, -1)

    def positions(self, kept: jax.Array) -> jax.Array:
        """The positions of this device's own places, int32; -1 for -1."""
        page = kept // self.page_size * self.count + self.index
        return jnp.where(kept >= 0, page * self.page_size + kept % self.page_size, -1)


@flax.struct.dataclass
class Places:
    """Where the tokens of a chunk stand, and what this device has to do with them.

    Attributes:
        positions: int32 `[batch, tokens]` of the tokens that this device computes, -1 for padding.
        kept: int32 `[batch, all tokens]`, where this device keeps each token of the chunk, -1 where it does not.
        seen: int32 `[batch, asking tokens]`, the last of this device's places that each token may attend to, or -1; of
            the tokens whose queries come to this device, see `axis_rules.asking`.
    """

    positions: jax.Array
    kept: jax.Array
    seen: jax.Array

    @classmethod
    def of(cls, layout: Layout, cache: Cache, positions: jax.Array) -> Places:
        """The places of a chunk; `positions` are those of this device's tokens."""
        everyone = collectives.all_gather(layout, positions, layout.axes_of("tokens"), 1)
        deal = Deal.of(layout, cache)
        asked = collectives.all_gather(layout, positions, asking(layout), 1)
        return cls(positions, deal.kept(everyone), deal.seen(asked))


def slots(page_table: jax.Array, positions: jax.Array, page_size: int, pages: int) -> jax.Array:
    """Slot in the pool (page * page_size + offset) of each position; -1 where there is none.

    There is none for a negative position, for one at or past the capacity of the table, and for a page that is none of
    the pool's, such as -1.

    Args:
        page_table: int32 `[batch, pages_per_sequence]`.
        positions: int32 `[batch, ...]`.
        page_size: rows a page.
        pages: of the pool.
    """
    flat = positions.reshape(positions.shape[0], -1)
    column = flat // page_size
    page = jnp.take_along_axis(page_table, jnp.clip(column, 0, page_table.shape[1] - 1), axis=1)
    there = (flat >= 0) & (column < page_table.shape[1]) & (page >= 0) & (page < pages)
    return jnp.where(there, page * page_size + flat % page_size, -1).reshape(positions.shape)


def gather_rows(stack: RowStack, layer: jax.Array | int, page_table: jax.Array, positions: jax.Array) -> jax.Array:
    """Rows of one layer at `positions` `[batch, n]`: `[batch, n, width]`, zeros where a position has no slot."""
    parts = parts_of(stack)
    _, pages, page_size, _ = next(iter(parts.values())).shape
    where = slots(page_table, positions, page_size, pages)

    def gather(part: jax.Array) -> jax.Array:
        flat = part.reshape(-1, part.shape[-1])
        return jnp.take(flat, layer * pages * page_size + jnp.maximum(where, 0), axis=0, mode="clip")

    rows = decode(stack, {name: gather(part) for name, part in parts.items()}, layer)
    return jnp.where((where >= 0)[..., None], rows, jnp.zeros((), rows.dtype))


def context_rows(stack: RowStack, layer: jax.Array | int, page_table: jax.Array, lengths: jax.Array) -> jax.Array:
    """All rows of one layer in order of position: `[batch, capacity, width]`, zeros from `lengths[b]` on.

    They are zeros for pages that are none of the pool's, too.
    """
    batch, parts = page_table.shape[0], parts_of(stack)
    _, pages, page_size, _ = next(iter(parts.values())).shape

    def read(part: jax.Array) -> jax.Array:
        whole = part.reshape(-1, *part.shape[2:])
        found = jnp.take(whole, layer * pages + jnp.clip(page_table, 0, pages - 1), axis=0, mode="clip")
        return found.reshape(batch, -1, part.shape[-1])

    rows = decode(stack, {name: read(part) for name, part in parts.items()}, layer)
    there = jnp.repeat((page_table >= 0) & (page_table < pages), page_size, axis=1)
    written = there & (jnp.arange(rows.shape[1]) < lengths[:, None])
    return jnp.where(written[..., None], rows, jnp.zeros((), rows.dtype))
