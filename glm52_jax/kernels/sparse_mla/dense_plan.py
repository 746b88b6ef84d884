"""The blocks and the stored rows of one call of the dense kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

from glm52_jax.cache.row_formats import GroupScaledFormat, LanePaddedFormat, PackedStack, RowStack, parts_of
from glm52_jax.kernels.lib.pallas import LANES, SUBLANES

WORD = 32
"""Blocks whose bits are in one integer."""


@dataclasses.dataclass(frozen=True)
class DenseRowLayout:
    """How rows lie in the kernel's memory when they meet the queries.

    Attributes:
        sections: (first value, values, width) of a query's parts: each is padded to the width of the rows' part.
        values: leading width that is averaged, whole lanes where rows have them.
        groups: (codes a scale, place of the first scale in its part), where codes have scales of their own.
        names: of the parts, as the kernel takes them: what holds the codes or values first.
    """

    sections: tuple[tuple[int, int, int], ...]
    values: int
    groups: tuple[int, int] | None
    names: tuple[str, ...]

    @property
    def width(self) -> int:
        return sum(width for _, _, width in self.sections)

    @classmethod
    def of(cls, latent: RowStack, width: int, rank: int) -> DenseRowLayout:
        parts = parts_of(latent)
        form = latent.format if isinstance(latent, PackedStack) else None
        if isinstance(form, GroupScaledFormat):
            codes, rest = parts["codes"].shape[-1], width - form.coded
            coded = (0, form.coded, codes)
            if isinstance(form, LanePaddedFormat):
                tail = (form.coded, rest, parts["tail"].shape[-1])
                return cls((coded, tail), codes, (form.group, rest), ("codes", "tail"))
            return cls((coded, (form.coded, rest, rest)), codes, (form.group, 0), ("codes", "scales", "plain"))
        (name,) = parts
        held = parts[name].shape[-1]
        return cls(((0, width, held),), min(held, -(-rank // LANES) * LANES), None, (name,))


@dataclasses.dataclass(frozen=True)
class DenseCall:
    """Everything static of a call.

    Attributes:
        items: tiles of queries, of all sequences.
        tiles: of a sequence.
        tile: queries of one.
        table: pages that a sequence has room for.
        page: rows of a page.
        pages: of a block; of the last one, or of a short sequence's only one, some may not be there.
        blocks: that the longest sequence may have.
        product: queries that are multiplied together.
        chunk: keys that are multiplied together.
        columns: of a product that are computed at a time.
        dtype: of the queries, and of all operands of products.
        stored: what the cache's values or codes are.
        cores: that the work is shared by.
        splits: parts of each tile's blocks, that different cores take.
    """

    rows: DenseRowLayout
    items: int
    tiles: int
    tile: int
    heads: int
    table: int
    page: int
    pages: int
    blocks: int
    cores: int
    splits: int
    product: int
    chunk: int
    columns: int
    dtype: Any
    stored: Any

    @property
    def plain(self) -> bool:
        """Whether rows meet the queries as the cache has them."""
        return self.rows.groups is None and self.stored == self.dtype

    @property
    def keys(self) -> int:
        return self.pages * self.page

    @property
    def steps(self) -> int:
        """Tiles that a core takes."""
        return self.items * self.splits // self.cores

    @property
    def words(self) -> int:
        return -(-self.blocks // WORD)

    @property
    def mask_rows(self) -> int:
        return -(-self.tile // SUBLANES) * SUBLANES

    def item(self, core: Any, step: Any) -> Any:
        return step if self.splits > 1 else core * self.steps + step

    def place(self, core: Any, step: Any) -> Any:
        """Where the results of a step go."""
        return core * self.steps + step
