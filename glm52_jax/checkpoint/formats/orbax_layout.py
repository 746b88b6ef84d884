"""The converted checkpoint on disk: an Orbax tree of uncompressed zarr3 arrays, whose chunks are published tensors.

    config.json, tokenizer, ...    as in the published folder
    manifest.json                  see `manifest`; written last, so that a folder without it is not finished
    params/_METADATA               the tree, for Orbax
    params/<leaf>/zarr.json        type, shape and chunks of a leaf
    params/<leaf>/c/...            its chunks, plain little-endian values

A leaf has the name of the published tensor, its parts being the keys of the tree. Experts share a leaf,
`model.layers.3.mlp.experts.down_proj.weight` `[experts, out, in]`, one expert a chunk; a matrix larger than the limit
is cut along its rows. So a chunk is written and read without a library, which was also the fastest way to write. This
module knows names, shapes and paths; it must not know the parameter table or how values change.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from glm52_jax.checkpoint.formats.safetensors_file import DTYPES, tensor_bytes

PARAMS = "params"
CHUNK_BYTES = 64 * 2**20
"""Largest chunk; also the reach of a host that needs only some rows."""

_ZARR_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "I8": "int8"}
STORED_TYPES = tuple(_ZARR_TYPES)
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(0|[1-9][0-9]*)\.(.+)")


def leaf_of(name: str) -> tuple[str, int | None]:
    """The leaf that holds a published tensor, and the expert within it."""
    match = _EXPERT.fullmatch(name)
    return (name, None) if match is None else (f"{match[1]}.{match[3]}", int(match[2]))


@dataclasses.dataclass(frozen=True)
class StoredLeaf:
    """One array of the tree.

    Attributes:
        name: of its folder; the keys in the tree joined by dots.
        dtype: by its safetensors name, one of `STORED_TYPES`.
        shape: experts first, where it holds them.
        rows: of a matrix (or values of a vector) in one chunk.
        stacked: whether the first dimension runs over experts.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    rows: int
    stacked: bool

    @property
    def matrix(self) -> tuple[int, ...]:
        """Shape of one published tensor in it."""
        return self.shape[1:] if self.stacked else self.shape

    @property
    def chunk(self) -> tuple[int, ...]:
        return (*(1,) * self.stacked, self.rows, *self.matrix[1:])

    @property
    def chunk_bytes(self) -> int:
        return tensor_bytes(DTYPES[self.dtype], self.chunk)

    def files(self, expert: int | None) -> list[str]:
        """Paths within `params` of the chunks of one published tensor, in the order of its values."""
        lead = () if expert is None else (expert,)
        tail = (0,) * (len(self.matrix) - 1)
        count = self.matrix[0] // self.rows
        return ["/".join(map(str, (self.name, "c", *lead, row, *tail))) for row in range(count)]

    def metadata(self) -> dict[str, Any]:
        """The content of `zarr.json`."""
        byte_order = {"configuration": {"endian": "little"}} if DTYPES[self.dtype].itemsize > 1 else {}
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": _ZARR_TYPES[self.dtype],
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.chunk)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": 0.0,
            "codecs": [{"name": "bytes", **byte_order}],
        }


def leaves(tensors: Mapping[str, tuple[str, tuple[int, ...]]], chunk_bytes: int = CHUNK_BYTES) -> dict[str, StoredLeaf]:
    """The leaves that hold tensors of these types and shapes, by name.

    Experts of a leaf are taken to be of one type and shape and all there, as the plan of a conversion has seen to.
    """
    experts: dict[str, int] = {}
    found: dict[str, tuple[str, tuple[int, ...], bool]] = {}
    for name, (dtype, shape) in tensors.items():
        leaf, expert = leaf_of(name)
        found.setdefault(leaf, (dtype, shape, expert is not None))
        if expert is not None:
            experts[leaf] = experts.get(leaf, 0) + 1
    return {
        name: StoredLeaf(
            name,
            dtype,
            (experts[name], *shape) if stacked else shape,
            _rows_of_a_chunk(shape, tensor_bytes(DTYPES[dtype], shape), chunk_bytes),
            stacked,
        )
        for name, (dtype, shape, stacked) in sorted(found.items())
    }


def tree_metadata(names: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, Any]:
    """The content of `_METADATA`, which Orbax reads the tree from."""
    tree: dict[str, Any] = {}
    for name, shape in names:
        keys = name.split(".")
        tree[str(tuple(keys))] = {
            "key_metadata": [{"key": key, "key_type": 2} for key in keys],  # 2: a key of a dictionary
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False, "write_shape": list(shape)},
        }
    return {
        "tree_metadata": tree,
        "use_ocdbt": False,
        "use_zarr3": True,
        # A chunk of zeros is written too: to Orbax a chunk that is not there is then an error, not zeros.
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


def store_files(all_leaves: Iterable[StoredLeaf]) -> Iterator[tuple[str, str]]:
    """Paths within `params` and texts of everything that is no chunk."""
    listed = list(all_leaves)
    for leaf in listed:
        yield f"{leaf.name}/zarr.json", json.dumps(leaf.metadata(), indent=1)
    checkpoint = {
        "item_handlers": None,
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": None,
        "commit_timestamp_nsecs": None,
        "custom_metadata": {},
    }
    yield "_CHECKPOINT_METADATA", json.dumps(checkpoint)
    yield "_METADATA", json.dumps(tree_metadata((leaf.name, leaf.shape) for leaf in listed))


def params_folder(folder: Path) -> Path:
    """What to give to Orbax."""
    return folder / PARAMS


def _rows_of_a_chunk(shape: tuple[int, ...], size: int, limit: int) -> int:
    """Rows of equal chunks, a power of two of them where that divides, so that they fit the shards of a mesh."""
    rows = shape[0]
    least = max(1, -(-size // limit))
    if least == 1 or rows == 0:
        return rows
    power = 1 << (least - 1).bit_length()
    if rows % power == 0:
        return rows // power
    return rows // next(n for n in range(min(least, rows), rows + 1) if rows % n == 0)
