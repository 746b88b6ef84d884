"""How the selection is cut into blocks on TPUs, and what it costs."""

from __future__ import annotations

import dataclasses

from jax.experimental import pallas as pl

from glm52_jax.kernels.lib.pallas import LANES, SUBLANES

REGISTER = SUBLANES * LANES
_KEPT = 4
_CHUNK_REGISTERS = 128
_PACKED = 4


def round_up(value: int, unit: int) -> int:
    """The smallest multiple of `unit` that is no less."""
    return -(-value // unit) * unit


@dataclasses.dataclass(frozen=True)
class TopkTileSizes:
    """Sizes of one selection.

    Scores of `rows` rows are kept as registers of 8 x 128: `8 / rows` runs of 128 neighbouring positions of each row,
    row by row within a run. So one row fills whole registers, and eight rows are what a tile of the array has.

    Attributes:
        rows: rows selected from together: 1, 2, 4 or 8.
        positions: padded to whole chunks.
        k: how many are chosen from each row.
        chunk: positions that arrive at a time.
        segment: registers of which the `kept` best of each place are candidates for the threshold; 0 if all scores are.
        bits: of the threshold that a pass over the candidates finds.
        group: runs of 128 positions whose places in the list are found by one product.
        unroll: how much of a loop is written out, to have work while results are waited for; little where kernels are
            interpreted, since there everything written out is compiled by itself.
    """

    rows: int
    positions: int
    k: int
    chunk: int
    segment: int
    bits: int
    group: int
    unroll: int

    @property
    def kept(self) -> int:
        return _KEPT

    @property
    def runs(self) -> int:
        """Runs of 128 positions of one row."""
        return self.positions // LANES

    @property
    def chunk_runs(self) -> int:
        return self.chunk // LANES

    @property
    def registers(self) -> int:
        """Of all rows."""
        return self.positions * self.rows // REGISTER

    @property
    def chunk_registers(self) -> int:
        return self.chunk * self.rows // REGISTER

    @property
    def chunk_candidates(self) -> int:
        """Registers of candidates of one chunk."""
        return self.chunk_registers // self.segment * self.kept if self.segment else 0

    @property
    def candidates(self) -> int:
        """Registers of candidates."""
        return self.chunk_candidates * (self.positions // self.chunk)

    @property
    def list_rows(self) -> int:
        """Rows of 128 entries that a list has."""
        return -(-self.k // LANES)


def choose(rows: int, positions: int, k: int, *, interpret: bool = False, chunk: int = 0) -> TopkTileSizes:
    """Sizes for rows of so many positions.

    The sizes follow from the shapes alone, for all chips: their vector units are alike, and vector memory holds any.

    Args:
        rows: rows selected from together.
        positions: of a row.
        k: how many are chosen.
        interpret: whether the kernel is interpreted.
        chunk: instead of what is chosen here, of whole `unit_of`.
    """
    unit = unit_of(positions, interpret=interpret)
    count = -(-positions // (_CHUNK_REGISTERS * REGISTER // rows))
    chunk = chunk or round_up(-(-positions // count), unit)
    padded = round_up(positions, chunk)
    segment = _segment(chunk * rows // REGISTER, positions, k)
    blocks = TopkTileSizes(rows, padded, k, chunk, segment, bits=1, group=unit // LANES, unroll=1 if interpret else 32)
    registers = blocks.candidates or blocks.registers
    if interpret or registers > 64:
        return blocks
    # With few candidates a pass takes as long as its sums over lanes: fewer passes with more thresholds in each.
    return dataclasses.replace(blocks, bits=2)


def unit_of(positions: int, *, interpret: bool = False) -> int:
    """Positions that a chunk is a multiple of."""
    small = interpret or positions <= _PACKED * _PACKED * REGISTER
    return _PACKED * REGISTER if small else LANES * LANES


def _segment(registers: int, positions: int, k: int) -> int:
    """Registers a segment: of so many values of one place a quarter is chosen on average, so five hardly ever are."""
    segment = 1
    while registers % (2 * segment) == 0 and 2 * segment * 4 * k <= positions:
        segment *= 2
    return segment if segment >= 2 * _KEPT else 0


def cost(rows: int, positions: int, k: int) -> pl.CostEstimate:
    """Of lists: scores are read once, lists of indices and scores are written; a comparison a score."""
    return pl.CostEstimate(
        flops=rows * positions, transcendentals=0, bytes_accessed=4 * rows * positions + 8 * rows * k
    )


def threshold_cost(rows: int, candidates: int, arrays: int) -> pl.CostEstimate:
    """Of the last one that is chosen: `arrays` arrays of candidates are read once."""
    return pl.CostEstimate(
        flops=rows * candidates, transcendentals=0, bytes_accessed=4 * rows * candidates * arrays + 8 * rows
    )
