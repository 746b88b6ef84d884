"""Which form of sparse attention is the fastest, the sizes of its blocks, and what it costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
from jax.experimental import pallas as pl

from sharding.compiler.chips import Chip

IMPLEMENTATIONS = ("dense", "blocks", "rows")
"""All of the context under a mask; aligned blocks of 8 rows, each copied once; the fewest rows that can be copied."""

BLOCK_ROWS = 8
HEADS = 16
"""The heads of the kernel that gathers are a multiple of it: the rows of a tile of bfloat16."""


@dataclasses.dataclass(frozen=True)
class GatherTileSizes:
    """Sizes of the kernel that gathers.

    Attributes:
        chunk: units of rows that are copied and attended to at a time.
        early: of those, units whose copies are started before those of the chunk before are waited for, which hides the
            latency of the last ones.
        piece: of those, units that are masked and multiplied together.
    """

    chunk: int
    early: int
    piece: int


_CHUNKS: dict[tuple[str, int, int], int] = {}
"""By chip, rows of a unit and parts of a row, where another size than the usual one is faster."""


def choose(chip: Chip, unit: int, parts: int, entries: int, lanes: int = 128) -> GatherTileSizes:
    """The sizes for lists of `entries` units of `unit` rows in so many parts.

    A chunk is long enough to hide the latency of a product behind its copies, and short enough that the last one of a
    list, which is copied in full, does not cost much; its copies are so many instructions, too.

    Args:
        lanes: what a chunk is a multiple of.
    """
    usual = 128 if unit == BLOCK_ROWS or parts > 1 else 256
    longest = _CHUNKS.get((chip.name, unit, parts), usual)
    chunk = min(-(-entries // (2 * lanes)) * lanes, longest)
    return GatherTileSizes(chunk, min(chunk * 3 // 8, 96 // parts), min(chunk, 32 if unit == BLOCK_ROWS else 128))


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


_COPY_CYCLES = {"rows": 7.5, "blocks": 6.0}
"""To issue a copy, from the schedules: the place of a row in a tile takes more arithmetic than that of a tile."""

_ROW_CYCLES = {1: 1.7, 2: 2.4, 3: 3.4}
"""Of a core, what masking, converting and multiplying a row adds to its copy, from the same schedules; by the parts of
a row, and one more where they are float8."""

_DENSE_SHARE = 0.8
"""Of the peak rate that products with all of the context reach."""

_DECODE_CYCLES = {1: 2.5, 2: 2.9}
"""Of a core, to read a row of float8 densely and widen it, by its parts; the queries of a sequence share it. From the
schedules of one query at 32K: 2.8 and 3.1 on a v5p, 2.3 and 2.8 on a v6e."""

_HEADS, _WIDTHS = 64, 640 + 512
"""Of the model, for which the forms are compared: multiply-adds of a head with a row."""


def times(
    chip: Chip, tokens: int, expected: int, capacity: int, row: RowShape, per_block: float | None = None
) -> dict[str, float]:
    """Seconds a query in each form; the arguments are those of `choose_implementation`."""
    share = expected / capacity
    touched = capacity / BLOCK_ROWS * (1 - (1 - share) ** BLOCK_ROWS) if per_block is None else expected / per_block
    cycle = 1 / (chip.clock_hz * chip.cores_per_device)
    work = _ROW_CYCLES[row.parts + (row.pack == 4)]

    def gather(form: str, units: float, rows: int) -> float:
        issued = units * (row.parts * _COPY_CYCLES[form] + rows * work) * cycle
        return max(issued, units * rows * row.row_bytes / chip.hbm_bytes_per_s)

    decoded = capacity * _DECODE_CYCLES[row.parts] * cycle if row.pack == 4 else 0.0
    products = 2 * _HEADS * _WIDTHS * capacity / (chip.peak("bf16") * _DENSE_SHARE)
    return {
        "dense": max(products, capacity * row.row_bytes / chip.hbm_bytes_per_s / tokens, decoded / tokens),
        "blocks": gather("blocks", touched, BLOCK_ROWS),
        "rows": gather("rows", expected, row.pack),
    }


def choose_implementation(
    chip: Chip, tokens: int, expected: int, capacity: int, row: RowShape, per_block: float | None = None
) -> str:
    """The form that takes the least time, of `IMPLEMENTATIONS`; for decoding and for the chunks of a prefill.

    Gathering takes a time that grows with the selected rows alone: that of issuing their copies and of the work on what
    they bring, or of the bytes. Reading densely takes one that grows with the context: that of its products for each
    query, or of its bytes and their decoding, which all queries of a sequence share. Blocks are worth it only where
    selected rows are neighbours.

    Args:
        tokens: queries of a sequence, which attend together.
        expected: rows that each selects.
        capacity: positions of the context.
        per_block: selected rows of a block that has any, where that is known; else rows are taken to be spread evenly.
    """
    found = times(chip, tokens, expected, capacity, row, per_block)
    # Blocks have to be found in a list first, by a sort that the times leave out.
    forms = IMPLEMENTATIONS if per_block is not None else ("dense", "rows")
    return min(forms, key=found.__getitem__)


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
