"""Operations with more than one form: one folder each, with `api.py` (signature and checks), `reference.py` (plain
jnp) and a file for each platform that has a form of its own.

An operation takes whole stacks (of cache pages or of weights) and a layer number, because a slice handed to a kernel
would be copied. It knows shapes and page tables, not the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from glm52_jax.errors import InputError

BACKENDS = ("reference", "cpu")

Form = TypeVar("Form", bound=Callable)


def resolve_backend(name: str | None, platform: str) -> str:
    """The backend of a step, decided once when the step is built.

    Args:
        name: one of `BACKENDS`, or None for the best one of the platform.
        platform: platform of the devices that will run the step, for instance "cpu".
    """
    if name is None:
        return "cpu" if platform == "cpu" else "reference"
    if name not in BACKENDS:
        raise InputError(f"kernels: {name!r} is not one of {', '.join(BACKENDS)}")
    return name


def form(forms: Mapping[str, Form], backend: str) -> Form:
    """The form of an operation for a backend; one without a form of its own there runs its reference."""
    return forms.get(backend, forms["reference"])
