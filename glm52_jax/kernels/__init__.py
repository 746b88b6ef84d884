"""Operations with more than one form: one folder each, with `api.py` (signature and checks), `reference.py` (plain
jnp) and a file for each platform that has a form of its own: `cpu.py`, `tpu.py` (Pallas).

An operation takes whole stacks (of cache pages or of weights) and a layer number, because a slice handed to a kernel
would be copied. It knows shapes and page tables, not the model.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from sharding.compiler import chips
from sharding.compiler.chips import Chip
from sharding.errors import InputError

BACKENDS = ("reference", "cpu", "tpu", "interpret")
"""What can be asked for. "interpret" runs the kernels for TPUs on any device, slowly, for tests."""

PORTABLE = ("reference", "cpu")
"""Those that XLA compiles for any device."""


@dataclasses.dataclass(frozen=True)
class Target:
    """What Pallas kernels are made for.

    Attributes:
        chip: whose sizes and rates decide their blocks.
        interpret: whether they are interpreted: in plain JAX, or on the chip's cores with copies and semaphores as a
            TPU has them: "races", where a copy is made as late as it may be, or "eager", as soon as it is started.
    """

    chip: Chip
    interpret: bool | str = False

    @classmethod
    def of(cls, backend: str) -> Target | None:
        """The target that a resolved backend names, `tpu:v5p` for instance; None for those without Pallas kernels."""
        name, _, chip = backend.partition(":")
        if name not in _PALLAS:
            return None
        return cls(chips.chip(chip or _DEFAULT_CHIP), _PALLAS[name])


_PALLAS: dict[str, bool | str] = {"tpu": False, "interpret": True, "races": "races", "eager": "eager"}
_DEFAULT_CHIP = "v5p"


def resolve_backend(name: str | None, platform: str, kind: str = "") -> str:
    """The backend of a step, decided once when the step is built: `reference`, `cpu`, or `tpu:` and the chip.

    Args:
        name: one of `BACKENDS`, or None for the best one of the platform.
        platform: of the devices that will run the step, for instance "cpu".
        kind: their `device_kind`.

    Raises:
        InputError: no such backend, or kernels for TPUs on something else.
    """
    chip = chips.of_kind(kind)
    if name is None:
        best = {"cpu": "cpu", "tpu": "tpu" if chip else "reference"}
        name = best.get(platform, "reference")
    base, _, asked = name.partition(":")
    if base not in (*BACKENDS, *_PALLAS):
        raise InputError(f"kernels: {name!r} is not one of {', '.join(BACKENDS)}")
    if base == "tpu" and chip is None:
        raise InputError(
            f"kernels: 'tpu' asks for a TPU of {', '.join(chips.CHIPS)}, the devices are {kind or platform}; "
            "'interpret' runs the same kernels anywhere, slowly"
        )
    if base in _PALLAS:
        return f"{base}:{asked or (chip.name if chip else _DEFAULT_CHIP)}"
    return name


def implementation(forms: Mapping[str, Callable[..., Any] | str], backend: str) -> Callable[..., Any]:
    """The form of an operation for a backend; one without a form of its own there runs its reference.

    Args:
        forms: by the backend's name. That of "tpu" is "module:function", imported when it is used, since only those who
            use Pallas should wait for its import; the function takes a `target` besides the operation's arguments.
    """
    target = Target.of(backend)
    if target is None:
        found = forms.get(backend, forms["reference"])
    elif "tpu" in forms:
        module, _, function = str(forms["tpu"]).partition(":")
        found = functools.partial(getattr(importlib.import_module(module), function), target=target)
    else:
        found = forms["reference"]
    assert callable(found)
    return found
