"""Products with a weight of which each device has a part, for rows of tokens that may differ along the same axes.

Along axes where devices have the same tokens their results are summed or joined. Along those where they differ, every
device computes its part for the tokens of all, and each gets back what belongs to its own. On one device each function
is the product alone. Everything runs on the shards of a mesh; what is computed is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from glm52_jax.params.axis_rules import split_by_tokens
from sharding.collectives import all_gather, all_to_all, psum, psum_scatter
from sharding.layout import Layout


def row_parallel(layout: Layout, name: str, x: jax.Array, share: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The sum of all devices' shares, where `name` is a dimension that is summed over.

    Args:
        name: logical name of the dimension.
        x: `[rows, ...]`, of this device's tokens.
        share: from rows of any number to this device's share `[rows, ...]`.

    Returns:
        `[rows, ...]` of this device's tokens.
    """
    different, alike = split_by_tokens(layout, layout.axes_of(name))
    shares = share(all_gather(layout, x, different))
    return psum(layout, psum_scatter(layout, shares, different), alike)


def column_parallel(layout: Layout, name: str, x: jax.Array, part: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The parts of all devices, where `name` is the last dimension of the result.

    Args:
        name: logical name of the dimension.
        x: `[rows, ...]`, of this device's tokens.
        part: from rows of any number to this device's part `[rows, n]`.

    Returns:
        `[rows, n * devices]` of this device's tokens.
    """
    axes = layout.axes_of(name)
    different, _ = split_by_tokens(layout, axes)
    if not different:
        return all_gather(layout, part(x), axes, 1)
    # The axis that is gathered last has the outermost blocks of rows, which are given back first; it is also the one
    # whose parts are neighbours.
    for axis in different:
        x = all_gather(layout, x, axis)
    out = part(x)
    for axis in reversed(axes):
        if axis in different:
            blocks = all_to_all(layout, out.reshape(layout.size(axis), -1, out.shape[1]), axis)
            out = jnp.moveaxis(blocks, 0, 1).reshape(blocks.shape[1], -1)
        else:
            out = all_gather(layout, out, axis, 1)
    return out
