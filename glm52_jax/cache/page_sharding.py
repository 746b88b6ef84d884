"""Pages of a cache over several devices: which positions each device holds, and the specs of a cache on a mesh."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from glm52_jax.cache.paged_cache import PagedCache
from glm52_jax.params.axis_rules import query_gather_axes
from sharding import collectives
from sharding.layout import Layout


@dataclasses.dataclass(frozen=True)
class PageSharding:
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
    def of(cls, layout: Layout, cache: PagedCache) -> PageSharding:
        axes = layout.axes_of("kv_pages")
        return cls(collectives.axis_index(layout, axes), layout.size(axes), cache.page_size)

    def local_slots(self, positions: jax.Array) -> jax.Array:
        """Where this device keeps each position, int32; -1 where it does not, and for -1."""
        page = positions // self.page_size
        mine = (positions >= 0) & (page % self.count == self.index)
        return jnp.where(mine, page // self.count * self.page_size + positions % self.page_size, -1)

    def last_visible(self, positions: jax.Array) -> jax.Array:
        """The last of this device's own places that is not after each position, int32; -1 where there is none."""
        page, offset = positions // self.page_size, positions % self.page_size
        before = (page - self.index + self.count - 1) // self.count
        rows = before * self.page_size + jnp.where(page % self.count == self.index, offset + 1, 0)
        return jnp.where(positions >= 0, rows - 1, -1)

    def positions(self, local_slots: jax.Array) -> jax.Array:
        """The positions of this device's own places, int32; -1 for -1."""
        page = local_slots // self.page_size * self.count + self.index
        return jnp.where(local_slots >= 0, page * self.page_size + local_slots % self.page_size, -1)


@flax.struct.dataclass
class TokenPositions:
    """Where the tokens of a chunk stand, and what this device has to do with them.

    Attributes:
        positions: int32 `[batch, tokens]` of the tokens that this device computes, -1 for padding.
        local_slots: Slot on this device of each token of the chunk, -1 for tokens of other devices; int32
            `[batch, all tokens]`.
        last_visible: Last slot of this device that each token may attend to, or -1; int32 `[batch, query tokens]`, for
            the tokens whose queries come to this device, see `axis_rules.query_gather_axes`.
    """

    positions: jax.Array
    local_slots: jax.Array
    last_visible: jax.Array

    @classmethod
    def of(cls, layout: Layout, cache: PagedCache, positions: jax.Array) -> TokenPositions:
        """The places of a chunk; `positions` are those of this device's tokens."""
        everyone = collectives.all_gather(layout, positions, layout.axes_of("tokens"), 1)
        deal = PageSharding.of(layout, cache)
        asked = collectives.all_gather(layout, positions, query_gather_axes(layout), 1)
        return cls(positions, deal.local_slots(everyone), deal.last_visible(asked))


def cache_specs(cache: PagedCache, layout: Layout) -> PagedCache:
    """Specs of a cache: a device has pools of its own, for its sequences and the pages that are dealt to it."""
    batch, pages = layout.axes_of("batch"), layout.axes_of("kv_pages")
    pool = PartitionSpec(None, (*batch, *pages) or None)
    rows = jax.tree.map(lambda _: pool, (cache.latent, cache.index_keys))
    table: Any = PartitionSpec(batch or None, pages or None)
    return PagedCache(rows[0], rows[1], table)
