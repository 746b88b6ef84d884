"""From logical names of an array's dimensions to a `PartitionSpec`, or one sentence on why that cannot be."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import PartitionSpec

from sharding.errors import InputError
from sharding.layout import Layout


def partition(
    layout: Layout,
    axes: Sequence[str | None],
    shape: Sequence[int] | None = None,
    *,
    what: str = "array",
    blocks: Sequence[int] | None = None,
) -> PartitionSpec:
    """The spec of an array.

    Args:
        axes: logical name of each dimension, None for one that is on every device.
        shape: of the array; sizes are not looked at when None.
        what: name of the array, for errors.
        blocks: elements of each dimension that stay together (a head, or codes with one scale); one each when None.

    Raises:
        InputError: an unknown name, a mesh axis for two dimensions, a size that does not divide, by array, dimension,
            axis and sizes.
    """
    taken: dict[str, str | None] = {}
    entries: list[tuple[str, ...] | str | None] = []
    for dimension, name in enumerate(axes):
        mesh_axes = layout.axes_of(name) if name is not None else ()
        for axis in mesh_axes:
            if axis in taken:
                raise InputError(
                    f"{what}: dimensions {taken[axis]} and {name} are both over mesh axis {axis} in layout "
                    f"{layout.name}, expected each axis once"
                )
            taken[axis] = name
        if shape is not None and mesh_axes:
            _refuse_uneven(layout, what, name, shape[dimension], mesh_axes, blocks[dimension] if blocks else 1)
        entries.append(None if not mesh_axes else mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes)
    return PartitionSpec(*entries)


def _refuse_uneven(layout: Layout, what: str, name: str | None, size: int, axes: tuple[str, ...], block: int) -> None:
    parts = layout.size(axes)
    over = f"mesh axis {axes[0]} of {parts}" if len(axes) == 1 else f"mesh axes {' and '.join(axes)} of {parts}"
    if size % parts:
        raise InputError(f"{what}: {name} is {size}, which {over} does not divide in layout {layout.name}")
    if size // parts % block:
        raise InputError(
            f"{what}: {over} would cut its {size} of {name} into {size // parts} each in layout {layout.name}, "
            f"expected a multiple of {block}, the block that has one scale"
        )
