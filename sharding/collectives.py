"""Collectives for code that runs on the shards of a mesh (inside of `shard_map`) and on one device alike.

Axes of size one are left out, so that the same function also runs outside of a mesh. Every array is a device's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from sharding.layout import Layout

Axes = str | Sequence[str]
Tree = TypeVar("Tree")


def nontrivial_axes(layout: Layout, axes: Axes) -> tuple[str, ...]:
    """The axes that have more than one device."""
    return tuple(axis for axis in ([axes] if isinstance(axes, str) else axes) if layout.size(axis) > 1)


def axis_index(layout: Layout, axes: Axes) -> jax.Array | int:
    """This device's number along the axes, the first of them outermost."""
    there = nontrivial_axes(layout, axes)
    return jax.lax.axis_index(there) if there else 0


def psum(layout: Layout, x: jax.Array, axes: Axes) -> jax.Array:
    """The sum over the devices along the axes."""
    there = nontrivial_axes(layout, axes)
    return jax.lax.psum(x, there) if there else x


def pmax(layout: Layout, x: jax.Array, axes: Axes) -> jax.Array:
    """The largest value over the devices along the axes."""
    there = nontrivial_axes(layout, axes)
    return jax.lax.pmax(x, there) if there else x


def all_gather(layout: Layout, x: jax.Array, axes: Axes, dimension: int = 0) -> jax.Array:
    """The arrays of all devices along the axes, joined along a dimension in the order of the devices."""
    there = nontrivial_axes(layout, axes)
    return jax.lax.all_gather(x, there, axis=dimension, tiled=True) if there else x


def psum_scatter(layout: Layout, x: jax.Array, axes: Axes, dimension: int = 0) -> jax.Array:
    """The sum over the devices, of which each keeps its own part of a dimension; inverse of `all_gather`."""
    there = nontrivial_axes(layout, axes)
    return jax.lax.psum_scatter(x, there, scatter_dimension=dimension, tiled=True) if there else x


def local_shard(layout: Layout, x: jax.Array, axes: Axes, dimension: int = 0) -> jax.Array:
    """This device's part of an array that all of them have."""
    there = nontrivial_axes(layout, axes)
    if not there:
        return x
    size = x.shape[dimension] // layout.size(there)
    return jax.lax.dynamic_slice_in_dim(x, axis_index(layout, there) * size, size, dimension)


def all_to_all(layout: Layout, x: jax.Array, axes: Axes) -> jax.Array:
    """Sends `x[i]` to device i along the axes; what came from device j is in `result[j]`.

    Args:
        x: `[devices, ...]`.
    """
    there = nontrivial_axes(layout, axes)
    return jax.lax.all_to_all(x, there, 0, 0, tiled=True) if there else jnp.asarray(x)


def order_after(layout: Layout, x: Tree, first: Any) -> Tree:
    """`x`, on CPUs not before `first` is there.

    XLA for CPUs knows collectives of one kind and group by one key, and keeps only those in order that are in one
    computation: one inside of a loop or a branch may run beside one outside of it that does not depend on it, be taken
    for it, or wait for a thread that it has (jaxlib 0.10). So what is outside is made to depend on what is inside, or
    the other way round. Elsewhere the compiler keeps the order, and may overlap them.

    Args:
        x: arrays that a collective is made of, or what a loop or a branch with collectives begins with.
        first: arrays, of which the first is waited for.
    """
    if layout.devices == 1:
        return x

    def tied(x: Tree, value: jax.Array) -> Tree:
        # True for every value, which the compiler does not see.
        true = (value.reshape(-1)[0].astype(jnp.int32) | 1) != 0
        return jax.tree.map(lambda array: jnp.where(true, array, jnp.zeros((), array.dtype)), x)

    return jax.lax.platform_dependent(x, jax.tree.leaves(first)[0], cpu=tied, default=lambda x, _: x)
