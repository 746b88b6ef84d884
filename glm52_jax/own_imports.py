"""Imports modules of this project by name, and refuses where a user's file of that name hides them."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

from sharding.errors import InputError

_HOME = Path(__file__).resolve().parent.parent


def import_ours(name: str) -> ModuleType:
    """The module `name` of this project.

    Raises:
        InputError: another file hides it, for instance an `infer.py` in the working directory.
    """
    package = name.split(".")[0]
    found = importlib.util.find_spec(package)
    origin = Path(found.origin).resolve() if found and found.origin else None
    if origin is None or origin.parent != _HOME / package:
        where = origin or "an empty folder of that name"
        raise InputError(f"the package {package} of glm52-jax is hidden by {where}; rename that, or run elsewhere")
    return importlib.import_module(name)
