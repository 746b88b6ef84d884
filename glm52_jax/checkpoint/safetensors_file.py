"""Reading one safetensors file: header checked against the file's real size, tensors as views of the mapped file.

The `safetensors` package gives numpy no float8, and says of a damaged file only that it is damaged.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from glm52_jax.errors import InputError

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
_HEADER_LENGTH = 8  # bytes, little endian
_LARGEST_HEADER = 100_000_000  # the format's own limit


class Entry(NamedTuple):
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
        self.entries = _read_header(path)
        self._data: np.memmap | None = None

    def read(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of the mapped file."""
        if self._data is None:
            self._data = np.memmap(self.path, np.uint8, "r")
        entry = self.entries[name]
        return self._data[entry.start : entry.stop].view(DTYPES[entry.dtype]).reshape(entry.shape)


def _read_header(path: Path) -> dict[str, Entry]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_HEADER_LENGTH), "little")
            if size < _HEADER_LENGTH or length > min(size - _HEADER_LENGTH, _LARGEST_HEADER):
                raise InputError(
                    f"{path}: {size} bytes, too short for its header of {length} bytes; the download looks cut"
                )
            text = file.read(length)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; the download looks incomplete") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = {name: _entry(path, name, raw, _HEADER_LENGTH + length) for name, raw in header.items()}
    except (UnicodeDecodeError, json.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: its safetensors header cannot be understood ({error})") from None
    end = max((entry.stop for entry in entries.values()), default=_HEADER_LENGTH + length)
    if end != size:
        hint = "; the download looks cut" if end > size else ""
        raise InputError(f"{path}: {size} bytes, but its header describes {end}{hint}")
    return entries


def _entry(path: Path, name: str, raw: dict, offset: int) -> Entry:
    start, stop = raw["data_offsets"]
    dtype, shape = raw["dtype"], tuple(raw["shape"])
    if dtype not in DTYPES:
        raise InputError(f"{path}: {name} has dtype {dtype}, expected one of {', '.join(DTYPES)}")
    if stop - start != math.prod(shape) * DTYPES[dtype].itemsize or start < 0:
        raise InputError(
            f"{path}: {name} has {stop - start} bytes, but shape {list(shape)} of {dtype} needs "
            f"{math.prod(shape) * DTYPES[dtype].itemsize}"
        )
    return Entry(dtype, shape, offset + start, offset + stop)
