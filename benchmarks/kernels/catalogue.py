"""Which cases there are: every module of this package that defines `cases` has those of one operation.

A module may define `sweep` too: cases of one form with other blocks, under a word for the blocks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import pkgutil
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks import kernels
from benchmarks.kernels.case import OURS, Case

CASES, SWEEP = "cases", "sweep"
_ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A case and how another process finds it.

    Attributes:
        module: of this package.
        kind: `CASES` or `SWEEP`, the function that gives it; `number`: its place there.
        blocks: what a sweep calls it.
    """

    module: str
    kind: str
    number: int
    case: Case
    blocks: str = ""


def modules() -> list[str]:
    """Names of the modules that may have cases."""
    return [found.name for found in pkgutil.iter_modules(kernels.__path__) if found.name != "__main__"]


def entries(module: str, kind: str = CASES) -> list[Entry]:
    """What a module defines, in its order; nothing where it has no function of that kind."""
    found = getattr(importlib.import_module(f"{kernels.__name__}.{module}"), kind, None)
    if found is None:
        return []
    if kind == SWEEP:
        return [Entry(module, kind, number, case, blocks) for number, (blocks, case) in enumerate(found())]
    return [Entry(module, kind, number, case) for number, case in enumerate(found())]


def ours(form: str) -> bool:
    return form.startswith(OURS)


def selected(
    found: Sequence[Entry],
    shape: str = "",
    form: str = "",
    measured: bool = True,
    chips: Sequence[str] = (),
    *,
    short: bool = False,
) -> list[tuple[Entry, str]]:
    """Entries with their chips.

    Args:
        shape, form: texts that must be in theirs.
        measured: whether only those count that are measured.
        chips: all of the case where empty.
        short: whether only those of the short grid count.
    """
    return [
        (entry, chip)
        for entry in found
        if shape in entry.case.shape and form in entry.case.form and (entry.case.measured or not measured)
        for chip in (entry.case.short if short else entry.case.chips)
        if not chips or chip in chips
    ]


def digest(module: str) -> str:
    """Of all that decides what a module's cases cost: kernels, cases, the estimate, the compiler."""
    paths = [*(_ROOT / "glm52_jax/kernels").rglob("*.py"), *(_ROOT / "benchmarks/schedule").glob("*.py")]
    paths += [_ROOT / f"benchmarks/kernels/{name}.py" for name in (module, "case", "measure")]
    state = hashlib.sha256()
    for path in sorted(paths):
        state.update(path.read_bytes() + b"\0")
    for package in ("jax", "libtpu"):
        try:
            state.update(version(package).encode())
        except PackageNotFoundError:
            state.update(b"none")
    return state.hexdigest()[:16]
