"""Second section: every kernel in the form that generation takes here, against its reference.

Operations are found in their packages, so a new one joins by being there; what to feed it is in `kernel_cases`. The
form gets NaN wherever nothing may be read, the reference zeros, so that a difference shows either fault.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from glm52_jax import kernels as packages
from glm52_jax.kernels import Target
from infer.selftest.checks import Check, CheckFailed, CheckSkipped, Passed
from infer.selftest.kernel_cases import KernelCase
from infer.selftest.machine import Machine


@dataclasses.dataclass(frozen=True)
class KernelOperation:
    """A kernel's function and whether a backend has a form of its own for it."""

    function: Callable[..., Any]
    forms: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.function.__name__


def operations() -> list[KernelOperation]:
    """All public functions of `glm52_jax.kernels` that take a backend."""
    found = []
    for package in pkgutil.iter_modules(packages.__path__):
        module = f"{packages.__name__}.{package.name}.api"
        if not package.ispkg or importlib.util.find_spec(module) is None:  # `lib` has no operation
            continue
        api = importlib.import_module(module)
        for function in vars(api).values():
            own = inspect.isfunction(function) and function.__module__ == api.__name__
            if own and not function.__name__.startswith("_") and "backend" in inspect.signature(function).parameters:
                found.append(KernelOperation(function, _forms(api, function)))
    return found


def _forms(api: Any, function: Any) -> tuple[str, ...]:
    """The keys of the table of forms that the function names in its code."""
    for name in function.__code__.co_names:
        table = vars(api).get(name)
        if isinstance(table, dict) and "reference" in table:
            return tuple(table)
    return ("reference",)


def kernels(machine: Machine) -> Iterator[Check]:
    """The checks of this section."""
    from infer.selftest.kernel_cases import CASES

    for operation in operations():
        if operation.name not in CASES:
            yield Check(operation.name, lambda: _no_cases())
            continue
        for name, make in CASES[operation.name].items():
            yield Check(
                f"{operation.name}, {name}",
                functools.partial(check_kernel, operation, lambda n=name, m=make: m(n), machine),
            )


def _no_cases() -> Passed:
    raise CheckSkipped("there are no inputs for it in infer/selftest/kernel_cases.py")


def check_kernel(
    operation: KernelOperation,
    make: Callable[[], KernelCase],
    machine: Machine,
    *,
    function: Callable[..., Any] | None = None,
) -> Passed:
    """Compares an operation's form on the first device with its reference, on the host's CPU where there is one.

    Args:
        function: in place of the operation's own, to see that a wrong one is found.

    Raises:
        Wrong: they differ by more than the case's bound.
    """
    case = make()
    got = _run(function or operation.function, case.static, case.arrays, machine.backend, machine.first)
    expected = _run(operation.function, case.static, case.clean, "reference", _host() or machine.first)
    difference, bound = largest_difference(case.compared(got), case.compared(expected), case.bound)
    kind = machine.backend if Target.of(machine.backend) is None else "tpu"
    own = machine.backend if kind in operation.forms else "reference only"
    near = "equal" if difference == 0 and bound == 0 else f"largest difference {difference:.1e}, bound {bound:.1e}"
    values = {"form": own, "difference": difference, "bound": bound}
    if not difference <= bound:
        raise CheckFailed(f"{near} ({own})", **values)
    return Passed(f"{near} ({own})", values)


def _run(
    function: Callable[..., Any], static: dict[str, Any], arrays: tuple[Any, ...], backend: str, device: jax.Device
) -> Any:
    run = jax.jit(functools.partial(function, **static, backend=backend))
    return jax.tree.map(np.asarray, run(*jax.device_put(arrays, device)))


def _host() -> jax.Device | None:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves it out
        return None


def largest_difference(got: Any, expected: Any, part: float) -> tuple[float, float]:
    """The difference that is worst beside its bound, and that bound; infinite where one is finite and the other not."""
    worst = (0.0, 0.0)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    for one, other in (tuple(np.asarray(array).astype(np.float64) for array in pair) for pair in pairs):
        finite = np.isfinite(other)
        bound = part * float(np.abs(other[finite]).max(initial=0.0))
        same = one.shape == other.shape and np.array_equal(one[~finite], other[~finite], equal_nan=True)
        if not same or not np.isfinite(one[finite]).all():
            return float("inf"), bound
        difference = float(np.abs(one[finite] - other[finite]).max(initial=0.0))
        if difference * worst[1] >= worst[0] * bound or difference > bound:
            worst = (difference, bound)
        if difference > bound:
            break
    return worst
