"""Packages of extras, which only some tests need: without one a test skips and says which command runs it."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from types import ModuleType

import pytest

COMMAND = "make test-skipped"
"""Installs the extras, then runs what skipped; CI too runs it, and there nothing may skip."""
REASON = f"needs {{}}: `{COMMAND}` installs it and runs this"

needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason=REASON.format("libtpu, the TPU compiler"))
"""For tests that compile for TPUs."""


def package(name: str) -> ModuleType:
    """The module of that name, for a test or, at its head, for a whole file of tests, which skip without it.

    What is there but cannot be imported is an error, no skip.
    """
    __tracebackhide__ = True  # the skip is the caller's; xdist counts skips of one place as one
    top = name.partition(".")[0]
    if find_spec(top) is None:
        pytest.skip(REASON.format(top), allow_module_level=True)
    return importlib.import_module(name)
