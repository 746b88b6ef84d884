"""The files that belong to a checkpoint beside its weights and config: tokenizer, chat template, generation config."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from glm52_jax.checkpoint.sources.published import INDEX_FILE
from glm52_jax.io import files
from glm52_jax.io.unfinished import MANIFEST

_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".md")
_LARGEST = 256 * 2**20
_OTHERS = ("config.json", INDEX_FILE, MANIFEST)


def copy_sidecar_files(folder: Path) -> list[Path]:
    """Every file of a checkpoint folder that is copied as it is, sorted by name.

    Raises:
        InputError: one of them is a link that leads nowhere, or cannot be read.
    """
    files.refuse_dead_links(folder, _SUFFIXES)
    found = []
    with files.reading(folder):
        for path in sorted(folder.iterdir()):
            if path.is_file() and is_sidecar_file(path.name, path.stat().st_size):
                with files.reading(path), path.open("rb") as file:
                    file.read(1)
                found.append(path)
    return found


def sidecar_files(beside: Iterable[Path], config: str) -> dict[str, bytes]:
    """What is written beside the weights, by name: files that are copied, and the config."""
    copied = {}
    for path in beside:
        with files.reading(path):
            copied[path.name] = path.read_bytes()
    return copied | {"config.json": config.encode()}


def is_sidecar_file(name: str, size: int) -> bool:
    """Whether a file of that name and size is copied; a large one is no tokenizer."""
    named = name.endswith(_SUFFIXES) or name.upper().startswith("LICENSE")
    return named and size <= _LARGEST and name not in _OTHERS and not name.startswith(".")
