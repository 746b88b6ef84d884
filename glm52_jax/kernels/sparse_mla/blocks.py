"""Which form of sparse attention is the fastest, the sizes of its blocks, and what it costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
from jax.experimental import pallas as pl

from sharding.chips import Chip

FORMS = ("dense", "blocks", "rows")
"""All of the context under a mask; aligned blocks of 8 rows, each copied once; the fewest rows that can be copied."""

BLOCK_ROWS = 8
HEADS = 16
"""The heads of the kernel that gathers are a multiple of it: the rows of a tile of bfloat16."""


@dataclasses.dataclass(frozen=True)
class GatherBlocks:
    """Sizes of the kernel that gathers.

    Attributes:
        chunk: units of rows that are copied and attended to at a time.
    """

    chunk: int


_CHUNKS: dict[tuple[str, int, int], int] = {}
"""By chip, rows of a unit and parts of a row, where another size than the usual one is faster."""


def choose(chip: Chip, unit: int, parts: int, entries: int, lanes: int = 128) -> GatherBlocks:
    """The sizes for lists of `entries` units of `unit` rows in so many parts.

    A chunk is long enough to hide the latency of a product behind its copies, and short enough that the last one of a
    list, which is copied in full, does not cost much; its copies are so many instructions, too.
    """
    usual = 128 if unit == BLOCK_ROWS or parts > 1 else 256
    longest = _CHUNKS.get((chip.name, unit, parts), usual)
    return GatherBlocks(min(-(-entries // (2 * lanes)) * lanes, longest))


@dataclasses.dataclass(frozen=True)
class RowShape:
    """What the times of the forms depend on in a stack of rows.

    Attributes:
        row_bytes: in memory, padding included.
        pack: rows of the smallest unit that can be copied.
        parts: arrays that a row is in.
    """

    row_bytes: int
    pack: int
    parts: int

    @classmethod
    def of(cls, stack: Sequence[jax.Array]) -> RowShape:
        return cls(
            sum(part.shape[-1] * part.dtype.itemsize for part in stack),
            max(4 // part.dtype.itemsize for part in stack),
            len(stack),
        )


_COPY_BUNDLES = {"rows": 8.3, "blocks": 6.2}
"""Instructions to issue a copy, from the schedules; the first takes more arithmetic to find its place in a tile."""

_DENSE_SHARE = 0.8
"""Of the peak rate that products with all of the context reach."""

_HEADS, _WIDTHS = 64, 640 + 512
"""Of the model, for which the forms are compared: multiply-adds of a head with a row."""


def times(chip: Chip, tokens: int, expected: int, capacity: int, row: RowShape) -> dict[str, float]:
    """Seconds a query in each form, for selections that are spread evenly over the context."""
    flops = 2 * _HEADS * _WIDTHS
    peak = chip.peak("bf16")
    bandwidth = chip.hbm_bytes_per_s
    issue = 1 / (chip.clock_hz * chip.cores_per_device)

    def gather(form: str, unit: int) -> float:
        units = capacity / unit * (1 - (1 - expected / capacity) ** unit) if form == "blocks" else expected
        # Products with 64 heads leave half of a matrix unit empty, or a longer time for what it holds.
        products = units * unit * flops / (peak / 2)
        return max(units * row.parts * _COPY_BUNDLES[form] * issue, units * unit * row.row_bytes / bandwidth, products)

    dense = max(capacity * flops / (peak * _DENSE_SHARE), capacity * row.row_bytes / bandwidth / tokens)
    return {"dense": dense, "blocks": gather("blocks", BLOCK_ROWS), "rows": gather("rows", row.pack)}


def choose_form(chip: Chip, tokens: int, expected: int, capacity: int, row: RowShape) -> str:
    """The form that takes the least time, of `FORMS`.

    Gathering takes a time that grows with the selected rows alone: that of issuing their copies, or of the bytes and
    products of whole blocks. Reading densely takes one that grows with the context: that of its products for each query,
    or of its bytes, which all queries of a sequence share.

    Args:
        tokens: queries of a sequence, which attend together.
        expected: rows that each selects.
        capacity: positions of the context.
    """
    found = times(chip, tokens, expected, capacity, row)
    return min(FORMS, key=found.__getitem__)


def cost(
    queries: int, heads: int, selected: int, width: int, rank: int, row_bytes: int, itemsize: int
) -> pl.CostEstimate:
    """Operations and bytes of attention of so many queries to `selected` rows each."""
    pairs = queries * heads * selected
    return pl.CostEstimate(
        flops=2 * pairs * (width + rank),
        transcendentals=pairs,
        bytes_accessed=queries * (selected * row_bytes + heads * ((width + rank) * itemsize + 4)),
    )
