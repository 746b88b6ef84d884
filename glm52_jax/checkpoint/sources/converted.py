"""A converted folder read by the names of the published tensors, so that whatever reads the one reads the other.

Opening it compares the manifest with the files on disk: a leaf of another type or shape, a chunk that is missing or of
another size is refused before anything is read.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from glm52_jax.checkpoint.formats.manifest import Manifest
from glm52_jax.checkpoint.formats.orbax_layout import CHUNK_BYTES, PARAMS, StoredLeaf, leaf_of, leaves, params_folder
from glm52_jax.checkpoint.formats.safetensors_file import DTYPES, TensorEntry, mapped
from glm52_jax.checkpoint.sources.file_reader import FileReader
from glm52_jax.checkpoint.sources.published import PublishedCheckpoint
from glm52_jax.config import ModelConfig
from glm52_jax.io.files import dead_link, is_there
from glm52_jax.io.json_fields import read_json
from glm52_jax.io.unfinished import MANIFEST, not_finished
from glm52_jax.params.spec import Tensor
from sharding.errors import InputError


def is_converted(folder: Path) -> bool:
    """Whether a folder is, or was to become, a converted checkpoint."""
    return is_there(folder / MANIFEST) or (folder / PARAMS).is_dir()


class ConvertedCheckpoint(PublishedCheckpoint):
    """The tensors of a finished conversion, by published name.

    Attributes:
        manifest: what the conversion wrote of them.
        leaves: the arrays of the Orbax tree, by name.
        where: the leaf of each tensor.
        partial: whether `check` takes a conversion of some layers for whole.

    Raises:
        InputError: the conversion is not finished, or a file of it is missing or damaged.
    """

    read_ahead = 0

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.name = str(folder)
        if not is_there(self.folder / MANIFEST):
            raise not_finished(self.folder)
        self.manifest = Manifest.read(self.folder)
        self.leaves = leaves(
            {name: (record.dtype, record.shape) for name, record in self.manifest.tensors.items()},
            self.manifest.settings.get("chunk_bytes", CHUNK_BYTES),
        )
        self._listed: list[str] = []
        self.unused: list[str] = []
        self.partial = False
        self.where = {name: f"{PARAMS}/{leaf_of(name)[0]}" for name in self.manifest.tensors}
        self._last = FileReader()
        self._refuse_other_metadata()
        self._refuse_other_chunks()

    def _refuse_missing(self, missing: list[Tensor], config: ModelConfig) -> None:
        layers = self.manifest.settings.get("layers")
        if layers is None:
            super()._refuse_missing(missing, config)
        elif not self.partial:
            raise InputError(
                f"{self.folder}: holds layers {', '.join(map(str, layers))} only, as --layers asked, which is no model"
            )

    def entry(self, name: str) -> TensorEntry:
        record = self.manifest.tensors[name]
        return TensorEntry(record.dtype, record.shape, 0, record.bytes)

    def read(self, name: str) -> np.ndarray:
        entry = self.entry(name)
        dtype = DTYPES[entry.dtype]
        files = self.files(name)
        if len(files) == 1 and entry.stop:
            return mapped(files[0], dtype).reshape(entry.shape)
        whole = np.empty(entry.shape, dtype)
        self.pread(name, 0, whole.reshape(-1).view(np.uint8).data)
        return whole

    def pread(self, name: str, offset: int, out: memoryview) -> None:
        """Fills `out` with the bytes of a tensor from `offset` on."""
        files, size = self.files(name), self._leaf(name)[0].chunk_bytes
        done = 0
        while done < len(out):
            number, at = divmod(offset + done, size)
            part = out[done : done + size - at]
            self._last.read(files[number], at, part)
            done += len(part)

    def files(self, name: str) -> list[Path]:
        """The chunks of a tensor, in the order of its values."""
        leaf, expert = self._leaf(name)
        return [params_folder(self.folder) / file for file in leaf.files(expert)]

    def _leaf(self, name: str) -> tuple[StoredLeaf, int | None]:
        leaf, expert = leaf_of(name)
        return self.leaves[leaf], expert

    def _refuse_other_metadata(self) -> None:
        root = params_folder(self.folder)
        for name in ("_METADATA", "_CHECKPOINT_METADATA"):
            if not (root / name).is_file():
                raise InputError(f"{root / name}: no such file; the checkpoint is not as its conversion left it")
        for leaf in self.leaves.values():
            path = root / leaf.name / "zarr.json"
            found, expected = read_json(path), json.loads(json.dumps(leaf.metadata()))
            for field, value in expected.items():
                if found.get(field) != value:
                    raise InputError(f"{path}: {field} is {found.get(field)}, but {MANIFEST} has {value}")

    def _refuse_other_chunks(self) -> None:
        for name in self.manifest.tensors:
            leaf, _ = self._leaf(name)
            for file in self.files(name):
                try:
                    size = os.stat(file).st_size
                except OSError as error:
                    problem = dead_link(file) or f"cannot be read ({error.strerror})"
                    raise InputError(f"{file}: {problem}; it holds values of {name}") from None
                if size != leaf.chunk_bytes:
                    raise InputError(f"{file}: {size} bytes, expected {leaf.chunk_bytes} of {name}")
