"""What JAX's devices say of themselves: slices, extent on the torus, memory."""

from __future__ import annotations

from typing import Any

import jax


def slices_of(devices: list[jax.Device]) -> int:
    """How many slices the devices are in."""
    return len({getattr(device, "slice_index", 0) for device in devices})


def shape_of(coordinates: list[Any]) -> tuple[int, ...]:
    """Extent of chips along each dimension of the torus."""
    return tuple(max(places) - min(places) + 1 for places in zip(*coordinates, strict=True))


def memory_limit(device: jax.Device) -> int | None:
    """Bytes that the device lets programs use; None where it does not say.

    A device of another process tells only that one: one of this process's stands for it, since they are alike.
    """
    own = device.process_index == jax.process_index()
    stats = (device if own else jax.local_devices()[0]).memory_stats()
    return stats.get("bytes_limit") if stats else None
