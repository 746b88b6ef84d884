"""The files that belong to a checkpoint beside its weights and config: tokenizer, chat template, generation config."""

from __future__ import annotations

from pathlib import Path

from glm52_jax.checkpoint.manifest import MANIFEST
from glm52_jax.checkpoint.published import INDEX_FILE

_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".md")
_LARGEST = 256 * 2**20
_OTHERS = ("config.json", INDEX_FILE, MANIFEST)


def companions(folder: Path) -> list[Path]:
    """Every file of a checkpoint folder that is copied as it is, sorted by name."""
    return sorted(path for path in folder.iterdir() if path.is_file() and is_companion(path.name, path.stat().st_size))


def is_companion(name: str, size: int) -> bool:
    """Whether a file of that name and size is copied; a large one is no tokenizer."""
    named = name.endswith(_SUFFIXES) or name.upper().startswith("LICENSE")
    return named and size <= _LARGEST and name not in _OTHERS and not name.startswith(".")
