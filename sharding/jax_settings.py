"""JAX as this project needs it, whatever the environment or the surrounding program has set; its devices, or why not.

Types and shapes here are written out for JAX's own defaults. Under `JAX_ENABLE_X64` indices would be of two widths,
under `JAX_NUMPY_RANK_PROMOTION=raise` a norm's scale would not multiply, and another generator of random numbers would
draw other texts for the same seed. So what a caller enters from outside runs under settings of its own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import jax

from sharding.errors import InputError

Function = TypeVar("Function", bound=Callable[..., Any])

# The name in `jax.config`, what is needed, and what sets it for a while.
_SETTINGS: tuple[tuple[str, Any, Callable[[Any], Any]], ...] = (
    ("jax_enable_x64", False, jax.enable_x64),
    ("jax_numpy_rank_promotion", "allow", jax.numpy_rank_promotion),
    ("jax_numpy_dtype_promotion", "standard", jax.numpy_dtype_promotion),
    ("jax_disable_jit", False, jax.disable_jit),
    ("jax_default_matmul_precision", None, jax.default_matmul_precision),
    ("jax_default_prng_impl", "threefry2x32", jax.default_prng_impl),
    ("jax_threefry_partitionable", True, jax.threefry_partitionable),
)
_GUARDS = (
    ("jax_transfer_guard_host_to_device", jax.transfer_guard_host_to_device),
    ("jax_transfer_guard_device_to_host", jax.transfer_guard_device_to_host),
    ("jax_transfer_guard_device_to_device", jax.transfer_guard_device_to_device),
)


@contextlib.contextmanager
def project_settings() -> Generator[None]:
    """JAX's settings as this project needs them, in this thread; those that are right already are left alone."""
    with contextlib.ExitStack() as stack:
        for name, needed, setting in _SETTINGS:
            if getattr(jax.config, name) != needed:
                stack.enter_context(setting(needed))
        for name, guard in _GUARDS:
            if getattr(jax.config, name) not in (None, "allow", "log", "log_explicit"):
                stack.enter_context(guard("allow"))
        yield


def with_project_settings(function: Function) -> Function:
    """A function, or a generator function between its yields, that runs under `project_settings`."""
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def steps(*arguments: Any, **options: Any) -> Any:
            iterator = function(*arguments, **options)
            try:
                while True:
                    with project_settings():
                        try:
                            value = next(iterator)
                        except StopIteration as end:
                            return end.value
                    yield value
            finally:
                iterator.close()

        return steps  # type: ignore[return-value]

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        with project_settings():
            return function(*arguments, **options)

    return call  # type: ignore[return-value]


def start_devices() -> None:
    """Brings JAX's devices up, before anything that takes long.

    Raises:
        InputError: there are none, for instance since `JAX_PLATFORMS` names a platform that is not here.
    """
    try:
        jax.devices()
    except Exception as error:  # plugins of platforms raise what they like
        stated = {name: os.environ.get(name) for name in ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")}
        asked = " and ".join(f"{name} is {value!r}" for name, value in stated.items() if value)
        reason = next(iter(str(error).strip().splitlines()), "") or "there is no such platform here"
        raise InputError(f"{asked}{', but ' * bool(asked)}JAX found no device to run on: {reason}") from None
