"""Making a `jax.Array` from its shards, each filled in place: nowhere is there a second copy of one.

On the CPU a shard is an aligned numpy buffer that JAX takes over as it is, and devices that hold equal shards share it.
On an accelerator a shard is filled stage by stage: values go through host buffers of a stated size into the device's
buffer, which is donated and so updated where it is. Nothing here knows files or parameters.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from glm52_jax.checkpoint.load.leaf_slices import Box, box_of, box_shape

STAGE_BYTES = 32 * 2**20
"""Bytes of a stage, of all shards of a process together; two stages are in memory, here and on the devices."""
_ALIGNMENT = 64  # of numpy buffers that JAX's CPU devices take over without a copy

Fill = Callable[[Sequence[tuple[Box, np.ndarray]]], None]
"""Writes the values of some boxes of an array into buffers of the boxes' shapes."""
Shards = dict[Box, list[jax.Device | None]]
"""The devices that hold each box; None is the default device, to which an array is then not committed."""


def make_array(shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding | None, fill: Fill) -> jax.Array:
    """An array of values that `fill` gives, without a second copy of them.

    Args:
        sharding: over any devices, of which this process fills its own; None for the default device.
        fill: called one or several times, with boxes that this process needs; each box once in all, but for few
            values at the end of a stage.
    """
    shards: Shards = {}
    if sharding is None:
        shards[tuple((0, size) for size in shape)] = [None]
        platforms = {device.platform for device in jnp.zeros(()).devices()}
    else:
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            shards.setdefault(box_of(index or (), shape), []).append(device)
        platforms = {device.platform for device in sharding.device_set}
    way = _in_host_memory if platforms == {"cpu"} else _in_device_memory
    arrays = way(dtype, shards, fill) if shards else []
    return (
        arrays[0]
        if sharding is None
        else jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=dtype)
    )


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array of any values, placed so that JAX takes it over without a copy."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _in_host_memory(dtype: np.dtype, shards: Shards, fill: Fill) -> list[jax.Array]:
    buffers = [aligned_empty(box_shape(box), dtype) for box in shards]
    fill(list(zip(shards, buffers, strict=True)))
    return [
        jax.device_put(buffer, device, may_alias=True)
        for buffer, devices in zip(buffers, shards.values(), strict=True)
        for device in devices
    ]


def _in_device_memory(dtype: np.dtype, shards: Shards, fill: Fill) -> list[jax.Array]:
    shape = box_shape(next(iter(shards)))
    stages = list(_stages(shape, STAGE_BYTES // len(shards) // dtype.itemsize))
    places = [(number, device) for number, devices in enumerate(shards.values()) for device in devices]
    arrays: list[jax.Array] = []
    for stage in stages:
        # A new buffer for each stage, since the last one may still be on its way to the device.
        buffers = [aligned_empty(box_shape(stage), dtype) for _ in shards]
        fill([(_inside(box, stage), buffer) for box, buffer in zip(shards, buffers, strict=True)])
        parts = (jax.device_put(buffers[number], device) for number, device in places)
        if len(stages) == 1:
            return list(parts)
        arrays = arrays or [jnp.zeros(shape, dtype, device=device) for _, device in places]
        jax.block_until_ready(arrays)  # the stage before this one: so two are held, not all that are queued
        starts = np.array([start for start, _ in stage], np.int32)
        arrays = [_update(array, part, starts) for array, part in zip(arrays, parts, strict=True)]
    return arrays


@functools.partial(jax.jit, donate_argnums=0)
def _update(whole: jax.Array, part: jax.Array, starts: jax.Array) -> jax.Array:
    # In place on every TPU, by its compiler's memory account. With the operands as integers, which would spare a CPU
    # the conversion of all of a float8 array there and back, a TPU would copy the array.
    return jax.lax.dynamic_update_slice(whole, part, tuple(starts))


def _stages(shape: tuple[int, ...], most: int) -> Iterator[Box]:
    """Boxes of one shape and at most `most` values (one, if that is less) that cover an array, in its order.

    Being of one shape they need one compiled update; the last along a dimension overlaps the one before it.
    """
    sizes = list(shape)
    for dimension, size in enumerate(shape):
        inner = math.prod(shape[dimension + 1 :])
        if size * inner <= most:
            break
        fitting = max(1, most // max(inner, 1))
        count = -(-size // fitting)
        sizes[dimension] = -(-size // count)
    starts = [
        [min(start, size - part) for start in range(0, size, max(part, 1))]
        for size, part in zip(shape, sizes, strict=True)
    ]
    for corner in itertools.product(*starts):
        yield tuple((start, start + part) for start, part in zip(corner, sizes, strict=True))


def _inside(box: Box, part: Box) -> Box:
    """A part of a box, counted from the array's start."""
    return tuple((origin + start, origin + stop) for (origin, _), (start, stop) in zip(box, part, strict=True))
