"""`manifest.json` of a converted checkpoint: what each tensor was made from, and how to tell that it is still that.

It is written last and at once: a folder that has it is whole.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from glm52_jax.checkpoint.formats.orbax_layout import STORED_TYPES
from glm52_jax.checkpoint.formats.safetensors_file import DTYPES, tensor_bytes
from glm52_jax.checkpoint.value_checks import BadValueCounts, sentences
from glm52_jax.io.json_fields import read_json, shown
from glm52_jax.io.unfinished import MANIFEST
from sharding.errors import InputError

_FORMAT, _VERSION = "glm52-orbax", 1
HEAD = json.dumps({"format": _FORMAT}, indent=1)[:-2].encode()
"""How the file begins."""


@dataclasses.dataclass(frozen=True)
class TensorRecord:
    """One published tensor.

    Attributes:
        file: of the source that its values came from.
        source_dtype: its type there, by its safetensors name; None for scales made by quantising.
        dtype: its type in the store.
        shape: of the published tensor.
        crc32: of its values in the store, little endian, in row order; eight hexadecimal digits.
        counts: of values that are not finite, or became zero; in the file only where there are any.
    """

    file: str
    source_dtype: str | None
    dtype: str
    shape: tuple[int, ...]
    crc32: str
    counts: BadValueCounts = dataclasses.field(default_factory=BadValueCounts)

    @property
    def bytes(self) -> int:
        return tensor_bytes(DTYPES[self.dtype], self.shape)

    def as_json(self) -> dict[str, Any]:
        raw = {name: getattr(self, name) for name in ("file", "source_dtype", "dtype", "shape", "crc32")}
        counts = self.counts.as_json()
        return raw | ({"counts": counts} if counts else {})


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`.

    Attributes:
        settings: of the conversion, as `Settings.as_json` has them.
        files: size of each safetensors file of the source.
        ignored: tensors of the source that are not in the store, with the reason.
        notes: sentences that the conversion printed.
        tensors: by published name.
    """

    settings: dict[str, Any]
    files: dict[str, int]
    ignored: dict[str, str]
    notes: tuple[str, ...]
    tensors: dict[str, TensorRecord]

    @property
    def total_bytes(self) -> int:
        return sum(record.bytes for record in self.tensors.values())

    def text(self) -> str:
        """The file's content; a line a tensor, so that two of them can be compared with `diff`."""
        head = {
            "format": _FORMAT,
            "version": _VERSION,
            "settings": self.settings,
            "source_files": self.files,
            "ignored": self.ignored,
            "notes": list(self.notes),
            "total_size": self.total_bytes,
        }
        lines = [
            f"  {json.dumps(name)}: {json.dumps(record.as_json())}" for name, record in sorted(self.tensors.items())
        ]
        return json.dumps(head, indent=1)[:-2] + ',\n "tensors": {\n' + ",\n".join(lines) + "\n }\n}\n"

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads it back.

        Raises:
            InputError: it is not there, of a later version, or not what `text` writes.
        """
        path = folder / MANIFEST
        raw = read_json(path)
        if raw.get("format") != _FORMAT:
            raise InputError(f"{path}: format is {shown(raw.get('format'))}, expected {_FORMAT!r}")
        if raw.get("version") != _VERSION:
            raise InputError(f"{path}: version is {shown(raw.get('version'))}, expected {_VERSION}")
        try:
            tensors = {name: _record(fields) for name, fields in raw["tensors"].items()}
            return cls(
                dict(raw["settings"]), dict(raw["source_files"]), dict(raw["ignored"]), tuple(raw["notes"]), tensors
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"{path}: is not as a conversion writes it ({error!r})") from None


def sentences_of(manifest: Manifest) -> tuple[str, ...]:
    """What a user should know of the values of a converted checkpoint."""
    return tuple(sentences({name: record.counts for name, record in manifest.tensors.items()}))


def _record(fields: dict[str, Any]) -> TensorRecord:
    shape = tuple(int(n) for n in fields["shape"])
    record = TensorRecord(
        fields["file"],
        fields["source_dtype"],
        fields["dtype"],
        shape,
        fields["crc32"],
        BadValueCounts(**fields.get("counts", {})),
    )
    if record.dtype not in STORED_TYPES:
        raise ValueError(f"dtype {record.dtype}")
    int(record.crc32, 16)
    return record
