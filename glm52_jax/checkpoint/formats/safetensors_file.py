"""One safetensors file: read as views of the mapped file after its header is checked, and written whole or not at all.

The `safetensors` package gives numpy no float8, says of a damaged file only that it is damaged, and writes from tensors
that are all in memory.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from glm52_jax.io.files import dead_link, reading, whole_file
from glm52_jax.io.json_fields import shown, without_duplicates
from sharding.errors import InputError

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH = 8  # bytes that hold the length of the header, little endian
_LARGEST_HEADER = 100_000_000  # the format's own limit
_POINTER = b"version https://git-lfs"  # what a clone without Git LFS has in place of a large file
_CUT = "the download looks cut"


class TensorEntry(NamedTuple):
    """A tensor of a file: type by its safetensors name, shape, and byte range in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """The tensors of one file, by name.

    Raises:
        InputError: the file is missing, empty, shorter or longer than its header says, or its header makes no sense.
    """

    def __init__(self, path: Path):
        self.path = path
        self.entries, self._size = _read_header(path)
        self._data: np.ndarray | None = None

    def read(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of the mapped file."""
        if self._data is None:
            self._data = mapped(self.path, np.dtype(np.uint8))
            if self._data.size != self._size:
                raise InputError(f"{self.path}: {self._data.size} bytes, but {self._size} when it was opened")
        entry = self.entries[name]
        return self._data[entry.start : entry.stop].view(DTYPES[entry.dtype]).reshape(entry.shape)


def mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    """The values of a file, mapped; read where its file system maps none."""
    try:
        return np.memmap(path, dtype, "r")
    except (OSError, ValueError):
        with reading(path):
            return np.fromfile(path, dtype)


def write_safetensors(
    path: Path, tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]], arrays: Iterable[tuple[str, np.ndarray]]
) -> None:
    """Writes a file under a temporary name and renames it when it is whole and on disk.

    Args:
        path: of the finished file; replaced when it exists.
        tensors: dtype and shape of each.
        arrays: their values, each once, in any order; one at a time is in memory.
    """
    header, starts = file_layout(tensors)
    left = dict(tensors)
    with whole_file(path) as file:
        file.write(header)
        for name, values in arrays:
            dtype, shape = left.pop(name)
            assert values.dtype == dtype, name
            assert values.shape == shape, name
            file.seek(starts[name])
            file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        assert not left, next(iter(left))


def tensor_bytes(dtype: np.dtype, shape: Sequence[int]) -> int:
    """Bytes of a tensor's values."""
    return math.prod(shape) * dtype.itemsize


def file_layout(tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """The start of the file, and where in the file each tensor begins.

    Wide types come first, as other writers have it: every tensor is then aligned, which some readers rely on.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # `transformers` asks for a format, and knows this one
    offset = 0
    for name in sorted(tensors, key=lambda name: -tensors[name][0].itemsize):
        dtype, shape = tensors[name]
        size = tensor_bytes(dtype, shape)
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = _LENGTH + len(text)
    starts = {name: first + header[name]["data_offsets"][0] for name in tensors}
    return len(text).to_bytes(_LENGTH, "little") + text, starts


def _read_header(path: Path) -> tuple[dict[str, TensorEntry], int]:
    """Entries by name, and the size of the file."""
    text, size = _header_text(path)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: its safetensors header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise InputError(f"{path}: its safetensors header is a JSON {type(header).__name__}, expected an object")
    header.pop("__metadata__", None)
    first = _LENGTH + len(text)
    entries = {name: _entry(path, name, raw, first) for name, raw in header.items()}
    _refuse_gaps(path, entries, first, size)
    return entries, size


def _header_text(path: Path) -> tuple[bytes, int]:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
            raise InputError(f"{path}: is not a regular file, expected a safetensors file")
        with path.open("rb") as file:
            start = file.read(_LENGTH)
            if start == _POINTER[:_LENGTH]:
                raise InputError(f"{path}: is a Git LFS pointer, not the weights; fetch them with `git lfs pull`")
            size, length = status.st_size, int.from_bytes(start, "little")
            if len(start) < _LENGTH:
                raise InputError(f"{path}: {size} bytes, expected a safetensors file; {_CUT}")
            if length > _LARGEST_HEADER:
                raise InputError(f"{path}: does not begin with the length of a safetensors header (it says {length})")
            if length > size - _LENGTH:
                raise InputError(f"{path}: {size} bytes, too short for its header of {length} bytes; {_CUT}")
            return file.read(length), size
    except FileNotFoundError:
        raise InputError(f"{path}: {dead_link(path) or 'no such file'}; the download looks incomplete") from None
    except OSError as error:
        raise InputError(f"{path}: {dead_link(path) or f'cannot be read ({error.strerror})'}") from None


def _entry(path: Path, name: str, raw: Any, first: int) -> TensorEntry:
    if not name.isprintable() or not name:
        raise InputError(f"{path}: its safetensors header names a tensor {shown(name)}, expected printable text")
    if not isinstance(raw, dict):
        raise InputError(f"{path}: its safetensors header has {shown(raw)} for {name}, expected an object")
    dtype: Any = raw.get("dtype")
    shape: Any = raw.get("shape")
    offsets: Any = raw.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise InputError(f"{path}: {name} has dtype {shown(dtype)}, expected one of {', '.join(DTYPES)}")
    if not _is_sizes(shape):
        raise InputError(f"{path}: {name} has shape {shown(shape)}, expected a list of sizes")
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise InputError(f"{path}: {name} has data_offsets {shown(offsets)}, expected a start and an end")
    start, stop = offsets
    needed = tensor_bytes(DTYPES[dtype], shape)
    if stop - start != needed:
        raise InputError(
            f"{path}: {name} has data_offsets {offsets}, {stop - start} bytes, but shape {shown(shape)} of {dtype} "
            f"needs {needed}"
        )
    return TensorEntry(dtype, tuple(shape), first + start, first + stop)


def _is_sizes(value: Any) -> bool:
    """Whether it is a list of sizes that arrays can have."""
    return isinstance(value, list) and len(value) <= 32 and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _refuse_gaps(path: Path, entries: dict[str, TensorEntry], first: int, size: int) -> None:
    """The tensors cover the file from the header to its end, each byte once."""
    at, before = first, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != at:
            problem = "overlaps" if entry.start < at else "leaves a gap after"
            raise InputError(f"{path}: {name} begins at byte {entry.start} and {problem} {before}, expected byte {at}")
        at, before = entry.stop, name
    if at != size:
        hint = f"; {_CUT}" if at > size else ""
        raise InputError(f"{path}: {size} bytes, but its header describes {at}{hint}")
