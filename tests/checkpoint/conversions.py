"""Conversions of small checkpoints, and what a folder holds."""

from pathlib import Path
from typing import Any

from glm52_jax.checkpoint.convert.conversion import ConversionResult, convert, plan
from glm52_jax.checkpoint.convert.options import ConversionOptions
from glm52_jax.checkpoint.export import export
from glm52_jax.checkpoint.sources.open_source import open_checkpoint


class NoOrbax:
    """Stands for `OrbaxView` where a test asks for something else: a process of its own takes seconds."""

    def __init__(self, *_: Any): ...

    def differences(self) -> list[str]:
        return []

    def end(self) -> None: ...


SMALL = {"chunk_bytes": 8192}
"""Cuts the larger matrices of the small checkpoints too."""


def run_convert(source: Path, destination: Path, **settings: Any) -> ConversionResult:
    return convert(plan(source, destination, ConversionOptions(**(SMALL | settings))), unit_bytes=50_000)


def run_export(
    source: Path, destination: Path, *, shard_bytes: int = 150_000, fused: bool = False, **settings: Any
) -> None:
    planned = export.plan(
        source, destination, ConversionOptions(**settings), shard_bytes=shard_bytes, fused_experts=fused
    )
    export.export(planned)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder by its path."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def tensors(folder: Path) -> dict[str, Any]:
    """Type, shape and bytes of every tensor of a checkpoint of either form, by its name in the files."""
    opened = open_checkpoint(folder)
    return {
        name: (opened.entry(name).dtype, opened.entry(name).shape, opened.read(name).tobytes()) for name in opened.where
    }
