"""Plans that were made before, on disk by what they are made of: the request, the code and the compiler."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from infer.planning.request import PlanRequest, describe, request_memory
from infer.planning.slice_plan import SlicePlan, analytic_plan, compile_plan
from sharding.compiler.topology import NoCompilerError

NO_COMPILER = "libtpu is not installed (pip install 'glm52-jax[plan]')"
TOO_LARGE = "not compiled: parameters and caches alone take more than a device has"

Compiling = Callable[[], AbstractContextManager[object]]


def stored_plan(
    request: PlanRequest, *, fresh: bool = False, compiling: Compiling = contextlib.nullcontext
) -> SlicePlan:
    """The plan of a request, compiled where it is not stored yet.

    What does not fit by the account alone is not compiled: no program needs less.

    Args:
        fresh: compile in any case.
        compiling: is entered while the compiler works, and only then.
    """
    if request_memory(request).total > request.topology.chip.hbm_bytes:
        return analytic_plan(request, TOO_LARGE)
    if _version("libtpu") is None:
        return analytic_plan(request, NO_COMPILER)
    path = _folder() / f"{_key(request)}.json"
    if not fresh:
        # Not there, or of another version: it is made again.
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            return _renamed(SlicePlan.from_json(json.loads(path.read_text(encoding="utf-8"))), request)
    try:
        with compiling():
            made = compile_plan(request)
    except NoCompilerError as error:
        return analytic_plan(request, str(error))
    # A plan that cannot be kept is still a plan.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(made.as_json()), encoding="utf-8")
        part.replace(path)
    return made


def _renamed(plan: SlicePlan, request: PlanRequest) -> SlicePlan:
    """A stored plan, for a request that is the same but for names."""
    words = plan.request | describe(request)
    return dataclasses.replace(plan, request=words, stored=True)


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "glm52-jax" / "plans"


def _key(request: PlanRequest) -> str:
    parts = [request.key(), _code(), *(str(_version(name)) for name in ("jax", "libtpu"))]
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:32]


@functools.cache
def _code() -> str:
    """A checksum of the code that steps and plans are made of."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for folder in ("glm52_jax", "infer", "sharding"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
