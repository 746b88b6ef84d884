"""From a source's tensors to those of a target, a few megabytes at a time: copied, cast, dequantised or quantised.

Converting, exporting and verifying all read these streams, so what one writes is what the other expects. Nothing here
knows files or folders; values come through `pread`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Literal, Protocol

import numpy as np

from glm52_jax.checkpoint.formats.safetensors_file import DTYPES, TensorEntry, tensor_bytes
from glm52_jax.checkpoint.sources.published import CODES, CheckpointContents, StoredTensor
from glm52_jax.checkpoint.value_checks import BadValueCounts, cast, not_finite, refuse_scales
from glm52_jax.params.spec import Tensor
from sharding.errors import InputError

COPY_BYTES = 256 * 2**10
"""What a copy reads at a time: it stays in a processor's cache, which took half the time of 4 MiB."""
SLICE_BYTES = 256 * 2**10
"""What is read at a time where values change; a row of scale blocks where that is more."""
WORKER_BYTES = {"copy": 16 * 2**20, "change": 128 * 2**20}
"""What one worker holds: the slice, and where values change their float32 forms."""

Kind = Literal["copy", "cast", "dequantize", "quantize", "requantize"]


class TensorReader(Protocol):
    """Where published tensors come from: a published folder, a converted one, or a bucket."""

    where: dict[str, str]

    def entry(self, name: str) -> TensorEntry: ...
    def pread(self, name: str, offset: int, out: memoryview) -> None:
        """Fills `out` with the bytes of a tensor from `offset` on."""
        ...


@dataclasses.dataclass(frozen=True)
class Output:
    """A tensor of the target; `source_dtype` is None for scales that are made here."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    source_dtype: str | None

    @property
    def bytes(self) -> int:
        return tensor_bytes(DTYPES[self.dtype], self.shape)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A published weight, with its scale where it has one, on its way from source to target.

    Attributes:
        stored: how the source holds it.
        file: of the source, with `offset` the bytes into the tensor (experts can be parts of a fused one).
        kind: what happens to its values.
        outputs: the weight, and the scale of one in codes.
        read_block, made_block: of the scales that are read with the weight, and of those that are made.
    """

    stored: StoredTensor
    file: str
    offset: int
    kind: Kind
    outputs: tuple[Output, ...]
    read_block: tuple[int, int] | None = None
    made_block: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        return self.outputs[0].name

    @property
    def bytes(self) -> int:
        """Bytes of the target."""
        return sum(output.bytes for output in self.outputs)


def piece(
    source: TensorReader, contents: CheckpointContents, tensor: Tensor, dtype: str | None, block: tuple[int, int] | None
) -> Piece:
    """How one tensor of the table gets to its form in the target.

    Args:
        contents: of the source.
        tensor: from the source's table.
        dtype: of the target, by its safetensors name; None to keep the source's.
        block: of the scales, where the target has codes.
    """
    stored = contents.tensors[tensor.name]
    entry = source.entry(stored.name)
    found, wanted = entry.dtype, dtype or entry.dtype
    offset = _offset(stored, tensor, DTYPES[found].itemsize)
    weight = Output(tensor.name, wanted, tensor.shape, found)
    own = contents.config.quantization.block if contents.config.quantization else None
    file = source.where[stored.name]
    if found in CODES and wanted == found:
        assert stored.scale is not None
        scale = Output(stored.scale, "F32", source.entry(stored.scale).shape, "F32")
        return Piece(stored, file, offset, "copy", (weight, scale), own)
    if wanted in CODES:
        assert block is not None
        scale = Output(tensor.scale_name, "F32", tensor.scale_shape(block), None)
        if found in CODES:
            return Piece(stored, file, offset, "requantize", (weight, scale), own, block)
        return Piece(stored, file, offset, "quantize", (weight, scale), made_block=block)
    if found in CODES:
        return Piece(stored, file, offset, "dequantize", (weight,), own)
    return Piece(stored, file, offset, "copy" if found == wanted else "cast", (weight,))


class ValueCounts:
    """Counts of a piece's values by output, filled as they are streamed."""

    def __init__(self) -> None:
        self._counts: dict[int, BadValueCounts] = {}

    def add(self, output: int, counts: BadValueCounts) -> None:
        if counts != BadValueCounts():
            self._counts[output] = self._counts.get(output, BadValueCounts()) + counts

    def of(self, output: int) -> BadValueCounts:
        return self._counts.get(output, BadValueCounts())


def values(source: TensorReader, piece: Piece, tally: ValueCounts | None = None) -> Iterator[tuple[int, memoryview]]:
    """The bytes of a piece's outputs: (which output, the next bytes of it), each good until the next is asked for.

    Args:
        tally: is told of values that are not finite, and of those that a cast turned into zero.

    Raises:
        InputError: a value has no form in the target: a scale that is no finite number of at least 0, a weight to
            quantise that is not finite, a value beyond the target's type (at the end of the tensor, with their number);
            or the source can no longer be read.
    """
    tally = tally or ValueCounts()
    scales = _scales(source, piece) if piece.stored.scale is not None else None
    if piece.kind == "copy":
        yield from _copied(source, piece, tally)
    elif piece.kind == "cast":
        dtype = DTYPES[piece.outputs[0].dtype]
        for rows in _rows(source, piece, 1):
            made, counts = cast(rows, dtype)
            tally.add(0, counts)
            yield 0, _bytes(made)
    elif piece.kind == "dequantize":
        assert piece.read_block is not None
        dtype = DTYPES[piece.outputs[0].dtype]
        for plain in _plain_rows(source, piece, piece.read_block[0], scales):
            made, counts = cast(plain, dtype, finite=True)
            tally.add(0, counts)
            yield 0, _bytes(made)
    else:
        yield from _quantized(source, piece, scales, tally)
    tally.of(0).refuse_beyond(f"{piece.file}: {piece.name}", DTYPES[piece.outputs[0].dtype])


def _copied(source: TensorReader, piece: Piece, tally: ValueCounts) -> Iterator[tuple[int, memoryview]]:
    buffer = memoryview(bytearray(min(COPY_BYTES, max(output.bytes for output in piece.outputs))))
    names = (piece.stored.name, piece.stored.scale)
    for number, output in enumerate(piece.outputs):
        name, start = names[number], piece.offset if number == 0 else 0
        assert name is not None
        for at in range(0, output.bytes, COPY_BYTES):
            part = buffer[: min(COPY_BYTES, output.bytes - at)]
            source.pread(name, start + at, part)
            tally.add(number, not_finite(np.frombuffer(part, DTYPES[output.dtype])))
            yield number, part


def _quantized(
    source: TensorReader, piece: Piece, read_scales: np.ndarray | None, tally: ValueCounts
) -> Iterator[tuple[int, memoryview]]:
    from glm52_jax.params.quantization import quantize_blocks  # imports JAX, which copies do without

    assert piece.made_block is not None
    multiple = math.lcm(piece.made_block[0], piece.read_block[0] if piece.read_block else 1)
    scales = []
    for plain in _plain_rows(source, piece, multiple, read_scales):
        counts = not_finite(plain)
        if counts != BadValueCounts():
            raise InputError(
                f"{piece.file}: {piece.stored.name} is not finite, so {piece.name} has no scale to be quantised with"
            )
        codes, scale = quantize_blocks(plain, piece.made_block, DTYPES[piece.outputs[0].dtype])
        if not codes.any():  # smaller than the least scale
            tally.add(0, BadValueCounts(zeroed=int(np.count_nonzero(plain))))
        scales.append(scale)
        yield 0, _bytes(codes)
    yield 1, _bytes(np.concatenate(scales))


def _plain_rows(source: TensorReader, piece: Piece, multiple: int, scales: np.ndarray | None) -> Iterator[np.ndarray]:
    """float32 slices of whole rows, codes times their scales where there are any."""
    if scales is None:
        yield from (rows.astype(np.float32) for rows in _rows(source, piece, multiple))
        return
    from glm52_jax.params.quantization import dequantize_blocks

    assert piece.read_block is not None
    done = 0
    for rows in _rows(source, piece, multiple):
        first, count = done // piece.read_block[0], -(-rows.shape[0] // piece.read_block[0])
        # Decoding by table is several times as fast as numpy's cast from float8.
        decoded = _decoded(rows.dtype)[rows.view(np.uint8)]
        with np.errstate(over="ignore", invalid="ignore"):
            plain = dequantize_blocks(decoded, scales[first : first + count], piece.read_block)
        yield plain
        done += rows.shape[0]


def _rows(source: TensorReader, piece: Piece, multiple: int) -> Iterator[np.ndarray]:
    """Slices of whole rows of the source's tensor, a multiple of a block's rows in each but the last."""
    shape, dtype = piece.outputs[0].shape, DTYPES[source.entry(piece.stored.name).dtype]
    row = tensor_bytes(dtype, shape[1:])
    step = max(1, SLICE_BYTES // max(1, row * multiple)) * multiple
    buffer = memoryview(bytearray(min(step, shape[0]) * row))
    for at in range(0, shape[0], step):
        count = min(step, shape[0] - at)
        part = buffer[: count * row]
        source.pread(piece.stored.name, piece.offset + at * row, part)
        yield np.frombuffer(part, dtype).reshape(count, *shape[1:])


def _scales(source: TensorReader, piece: Piece) -> np.ndarray:
    name = piece.stored.scale
    assert name is not None
    entry = source.entry(name)
    scales = np.empty(entry.shape, np.float32)
    source.pread(name, 0, _bytes(scales))
    refuse_scales(scales, f"{source.where[name]}: {name}")
    return scales


def _offset(stored: StoredTensor, tensor: Tensor, itemsize: int) -> int:
    """Where the values begin in the tensor that holds them."""
    if stored.fused is None:
        return 0
    expert, half = stored.fused
    matrix = tensor.elements * itemsize
    return expert * matrix if half is None else (2 * expert + half) * matrix


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


@functools.cache
def _decoded(codes: np.dtype) -> np.ndarray:
    """float32 of each of the 256 codes of a type."""
    return np.arange(256, dtype=np.uint8).view(codes).astype(np.float32)
