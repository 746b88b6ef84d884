"""Plans that were made before, on disk by what they are made of: the request, the code and the compiler."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from infer.plan.plan import Plan, analytic_plan, compile_plan
from infer.plan.request import Request

NO_COMPILER = "libtpu is not installed (pip install 'glm52-jax[plan]')"


def planned(asked: Request, *, fresh: bool = False) -> Plan:
    """The plan of a request, compiled where it is not stored yet.

    Args:
        fresh: compile in any case.
    """
    if _version("libtpu") is None:
        return analytic_plan(asked, NO_COMPILER)
    path = _folder() / f"{_key(asked)}.json"
    if not fresh:
        try:
            return Plan.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError):
            pass  # not there, or of another version: it is made again
    made = compile_plan(asked)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(made.as_json()), encoding="utf-8")
        part.replace(path)
    except OSError:
        pass  # a plan that cannot be kept is still a plan
    return made


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "glm52-jax" / "plans"


def _key(asked: Request) -> str:
    parts = [asked.key(), _code(), *(str(_version(name)) for name in ("jax", "libtpu"))]
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
