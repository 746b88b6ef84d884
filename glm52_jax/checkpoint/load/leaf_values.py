"""Reading values of published tensors into parts of leaves: as they are, cast, or dequantised, a slice at a time.

A slice that stays as it is goes from the file into its place; others pass through a buffer of about `SLICE_BYTES`.
Files are read, not mapped: one that is cut while it is mapped ends the process. Nothing here knows devices or the
parameter table.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from glm52_jax.checkpoint.formats.safetensors_file import DTYPES, TensorEntry
from glm52_jax.checkpoint.load.leaf_slices import Box, LeafLayout, Range, TensorRead, reads
from glm52_jax.checkpoint.sources.published import StoredTensor
from glm52_jax.checkpoint.value_checks import BadValueCounts, cast, not_finite, refuse_scales
from glm52_jax.params.quantization import dequantize_blocks

SLICE_BYTES = 512 * 2**10
"""What is read at a time, or a head's rows where they are more: it stays in a processor's cache while it changes."""
THREADS = 4
"""Readers of a leaf, so that some read while others cast; each holds a slice, ten times that when it dequantises."""

Item = TypeVar("Item")


class TensorReader(Protocol):
    """Where published tensors come from: a published folder or a converted one."""

    folder: Path
    where: dict[str, str]

    def entry(self, name: str) -> TensorEntry: ...
    def pread(self, name: str, offset: int, out: memoryview) -> None:
        """Fills `out` with the bytes of a tensor from `offset` on."""
        ...


@dataclasses.dataclass(frozen=True)
class LeafPart:
    """A published weight, or the scales of one, as a source holds it.

    Attributes:
        name: of the tensor of the source that holds it.
        first: its first row there, the rows of all dimensions but the last counted as one; 0 unless experts are fused.
        scale: name of the scales to multiply codes with; None for values that are used as they are.
        is_scale: whether it is scales, which are then checked.
    """

    name: str
    first: int = 0
    scale: str | None = None
    is_scale: bool = False


def weight(stored: StoredTensor, dequantize: bool) -> LeafPart:
    """The weight of a tensor, in codes or in plain form."""
    first, rows = 0, stored.tensor.shape[0]
    if stored.fused is not None:
        expert, half = stored.fused
        first = expert * rows if half is None else (2 * expert + half) * rows
    return LeafPart(stored.name, first, stored.scale if dequantize else None)


def scales(stored: StoredTensor) -> LeafPart:
    """The scales of a tensor in codes."""
    assert stored.scale is not None
    return LeafPart(stored.scale, is_scale=True)


class ValueReader:
    """Fills parts of leaves from a source, with a few threads; to be used in a `with`, which ends them.

    Args:
        block: of the scales, rows and columns; None where the source has none.
        count: told of the name of a tensor and the bytes of it that were read, from any thread.
    """

    def __init__(self, source: TensorReader, block: Range | None, count: Callable[[str, int], None]):
        self.source, self.block, self.count = source, block, count
        self._threads = ThreadPoolExecutor(THREADS, "load")
        self.counts: dict[str, BadValueCounts] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> ValueReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def fill(self, form: LeafLayout, parts: Sequence[LeafPart], targets: Sequence[tuple[Box, np.ndarray]]) -> None:
        """Writes the values of boxes of a leaf into arrays of the boxes' shapes, in the arrays' dtype.

        Args:
            parts: the tensors of the leaf, in the order of `form.lead`.
        """
        outs = [out for _, out in targets]
        row = max(self._row_bytes(form, part) for part in parts)
        todo = reads(form, [box for box, _ in targets], max(1, SLICE_BYTES // max(1, row)))
        self._each(todo, lambda read: self._take(form, parts[read.number], read, outs))
        for name in {part.name for part in parts}:
            self.counts.get(name, BadValueCounts()).refuse_beyond(self._place(name), outs[0].dtype)

    def _each(self, items: Iterator[Item], work: Callable[[Item], None]) -> None:
        """Gives items to the threads as they get free: a list of all slices of a leaf could be long."""
        lock, stop = threading.Lock(), threading.Event()

        def run() -> None:
            try:
                while not stop.is_set():
                    with lock:
                        item = next(items, None)
                    if item is None:
                        return
                    work(item)
            except BaseException:
                stop.set()
                raise

        futures = [self._threads.submit(run) for _ in range(THREADS)]
        try:
            for future in futures:
                future.result()
        finally:
            stop.set()
            for future in futures:
                future.exception()

    def _take(self, form: LeafLayout, part: LeafPart, read: TensorRead, outs: Sequence[np.ndarray]) -> None:
        first = read.shares[0]
        place = outs[first.box][first.put]
        if len(read.shares) == 1 and first.whole and part.scale is None and place.dtype == self._dtype(part.name):
            self._pread(form, part, read.rows, place)
            self._note(part, not_finite(place))
            return
        values = self._values(form, part, read.rows).reshape(-1, *form.logical_shape[1:])
        values, counts = cast(values, place.dtype, finite=part.scale is not None)
        self._note(part, counts)
        for share in read.shares:
            outs[share.box][share.put] = values[share.take]

    def _note(self, part: LeafPart, counts: BadValueCounts) -> None:
        if counts != BadValueCounts():
            with self._lock:
                self.counts[part.name] = self.counts.get(part.name, BadValueCounts()) + counts

    def _place(self, name: str) -> str:
        return f"{self.source.folder / self.source.where[name]}: {name}"

    def _values(self, form: LeafLayout, part: LeafPart, rows: Range) -> np.ndarray:
        """Rows of a tensor `[rows, *tensor[1:]]`, codes times their scales."""
        values = np.empty((rows[1] - rows[0], *form.tensor[1:]), self._dtype(part.name))
        self._pread(form, part, rows, values)
        if part.scale is None:
            return values
        assert self.block is not None
        first, last = rows[0] // self.block[0], -(-rows[1] // self.block[0])
        grid = LeafLayout((), self.source.entry(part.scale).shape, self.source.entry(part.scale).shape)
        found = np.empty((last - first, *grid.tensor[1:]), np.float32)
        self._pread(grid, LeafPart(part.scale, is_scale=True), (first, last), found)
        # The rows may begin in the middle of a block, so each gets the scales of its own.
        spread = found.repeat(self.block[0], axis=0)[rows[0] - first * self.block[0] :][: len(values)]
        # Decoding by table is several times as fast as numpy's cast from float8.
        with np.errstate(over="ignore", invalid="ignore"):  # counted where it is cast
            return dequantize_blocks(_decoded(values.dtype)[values.view(np.uint8)], spread, (1, self.block[1]))

    def _pread(self, form: LeafLayout, part: LeafPart, rows: Range, out: np.ndarray) -> None:
        """Fills `out`, which is contiguous, with rows of a tensor."""
        assert out.flags.c_contiguous  # or a copy of it would be filled
        data = out.reshape(-1).view(np.uint8)
        self.source.pread(part.name, (part.first + rows[0]) * self._row_bytes(form, part), data.data)
        if part.is_scale:
            refuse_scales(out, self._place(part.name))
        self.count(part.name, data.size)

    def _row_bytes(self, form: LeafLayout, part: LeafPart) -> int:
        return math.prod(form.tensor[1:]) * self._dtype(part.name).itemsize

    def _dtype(self, name: str) -> np.dtype:
        return DTYPES[self.source.entry(name).dtype]


@functools.cache
def _decoded(codes: np.dtype) -> np.ndarray:
    """float32 of each of the 256 codes of a type."""
    return np.arange(256, dtype=np.uint8).view(codes).astype(np.float32)
