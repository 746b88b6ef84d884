"""What a generation keeps in memory beside what there is, by arithmetic, before any of it is made."""

from __future__ import annotations

import math
import os
from typing import Any

import jax

from glm52_jax.inputs.sizes import short_size
from glm52_jax.params.sharding import param_specs
from infer.planning.memory_breakdown import own_bytes
from infer.steps import StepProvider
from sharding.devices import memory_limit
from sharding.errors import InputError


def refuse_too_large(provider: StepProvider, params: dict[str, Any]) -> None:
    """Refuses what can never fit: parameters and caches that are more than all the memory there is.

    What is left for a step's temporaries is not judged; `glm52 plan` does that.

    Args:
        params: may be shapes.

    Raises:
        InputError: with both sizes and that of the memory.
    """
    layout = provider.layout
    held = own_bytes(layout, params, param_specs(params, provider.config, layout)) if provider.mesh else _bytes(params)
    caches = _bytes(jax.eval_shape(provider.own_state))
    limit, whose, devices = memory_limit(provider.device), "a device", 1
    if limit is None and provider.platform == "cpu":
        # Devices of CPUs share the memory of their host.
        limit, whose, devices = _host_memory(), "this host", max(1, layout.devices // jax.process_count())
    if limit is not None and (held + caches) * devices > limit:
        raise InputError(
            f"the weights take {short_size(held * devices)} and the caches {short_size(caches * devices)}, more than "
            f"the {short_size(limit)} of memory that {whose} has (glm52 plan says what holds them)"
        )


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _host_memory() -> int | None:
    """Bytes of memory and swap; None where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return 1024 * sum(int(lines[name].split()[0]) for name in ("MemTotal", "SwapTotal"))
    except (OSError, ValueError, KeyError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
