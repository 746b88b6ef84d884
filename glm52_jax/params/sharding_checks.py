"""Shardings of a parameter's arrays: refused where they do not fit; those of codes and scales follow the plain form's.

It must not know where shardings come from: whoever loads gives one for each parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding

from glm52_jax.params.spec import Param
from sharding.errors import InputError


def check_divides(param: Param, shape: tuple[int, ...], sharding: Sharding) -> None:
    """Refuses a sharding of a parameter that does not divide it evenly.

    Args:
        shape: of the stacked parameter.

    Raises:
        InputError: naming the parameter, the dimension, its size and what it is to be divided by.
    """
    if not isinstance(sharding, Sharding):
        raise InputError(f"sharding of {param.path} is a {type(sharding).__name__}, expected a jax.sharding.Sharding")
    if not isinstance(sharding, NamedSharding):
        try:
            sharding.shard_shape(shape)
        except ValueError as error:
            raise InputError(f"sharding of {param.path} does not fit its shape {shape} ({error})") from None
        return
    if isinstance(sharding.mesh, AbstractMesh):
        raise InputError(f"sharding of {param.path} is over a mesh without devices, expected a mesh of devices")
    if PartitionSpec.UNCONSTRAINED in sharding.spec:
        raise InputError(f"sharding of {param.path} is {sharding.spec}, expected mesh axes or None for each dimension")
    if len(sharding.spec) > len(shape):
        raise InputError(
            f"sharding of {param.path} is {sharding.spec}, expected at most {len(shape)} entries for {shape}"
        )
    for dimension, axes in enumerate(_axes(sharding, len(shape))):
        parts = _parts(sharding, axes)
        if shape[dimension] % parts:
            raise InputError(
                f"{param.path} {shape} cannot be sharded: dimension {dimension} ({_name(param, shape, dimension)}) has "
                f"size {shape[dimension]}, which {_mesh_axes(sharding, axes)} does not divide"
            )


def quantized_shardings(
    param: Param, shape: tuple[int, ...], sharding: Sharding | None, block: tuple[int, int]
) -> tuple[Sharding | None, Sharding | None]:
    """Shardings of a parameter's codes `[*lead, out, in]` and of their scales, from that of its plain form.

    Where the plain form splits rows or columns into heads, the codes have both dimensions in one, which is then
    sharded as the heads are.

    Args:
        shape: of the stacked parameter in plain form, which `sharding` fits.
        block: rows and columns of codes that a scale stands for.

    Raises:
        InputError: a shard would begin inside of a head or of a block of scales.
    """
    if sharding is None or (sharding.is_fully_replicated and not isinstance(sharding, NamedSharding)):
        return sharding, sharding
    if not isinstance(sharding, NamedSharding):
        raise InputError(f"sharding of {param.path}, which is in codes, is {sharding}, expected a NamedSharding")
    axes = list(_axes(sharding, len(shape)))
    logical_shape = param.logical_shape or param.tensor_shape
    lead = len(shape) - len(logical_shape)
    entries = axes[:lead]
    for side, group in enumerate(_groups(param.tensor_shape, logical_shape)):
        first, *others = (lead + i for i in group)
        for dimension in others:
            if _parts(sharding, axes[dimension]) > 1 and math.prod(shape[first:dimension]) > 1:
                raise InputError(
                    f"{param.path} {shape} is in codes of which dimensions {first} to {lead + group[-1]} are one, so "
                    f"dimension {dimension} cannot be sharded over {_mesh_axes(sharding, axes[dimension])}, only "
                    f"dimension {first} can"
                )
        chosen = next((axes[i] for i in (first, *others) if _parts(sharding, axes[i]) > 1), ())
        _check_blocks(param, sharding, chosen, side, block)
        entries.append(chosen)
    spec = PartitionSpec(*(entry or None for entry in entries))
    found = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    return found, found


def _check_blocks(
    param: Param, sharding: NamedSharding, axes: tuple[str, ...], side: int, block: tuple[int, int]
) -> None:
    size, parts = param.tensor_shape[side], _parts(sharding, axes)
    if parts > 1 and size // parts % block[side]:
        raise InputError(
            f"{param.path} is in codes with a scale for each {block[0]} x {block[1]} of them, and "
            f"{_mesh_axes(sharding, axes)} would cut its {size} {('rows', 'columns')[side]} into {size // parts} each, "
            f"expected a multiple of {block[side]}"
        )


def _groups(matrix: tuple[int, ...], logical_shape: tuple[int, ...]) -> Iterator[list[int]]:
    """For each dimension of a matrix the dimensions of its view that it is split into."""
    dimension = 0
    for size in matrix:
        group: list[int] = [dimension]
        while math.prod(logical_shape[i] for i in group) < size:
            group.append(group[-1] + 1)
        assert math.prod(logical_shape[i] for i in group) == size
        dimension = group[-1] + 1
        yield group


def _axes(sharding: NamedSharding, rank: int) -> Iterator[tuple[str, ...]]:
    """Names of the mesh axes of each dimension."""
    for entry in (*sharding.spec, *(None,) * (rank - len(sharding.spec))):
        yield () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _parts(sharding: NamedSharding, axes: tuple[str, ...]) -> int:
    return math.prod(sharding.mesh.shape[axis] for axis in axes)


def _mesh_axes(sharding: NamedSharding, axes: tuple[str, ...]) -> str:
    """For instance "mesh axis tensor of 8"."""
    if len(axes) == 1:
        return f"mesh axis {axes[0]} of {sharding.mesh.shape[axes[0]]}"
    sizes = " x ".join(str(sharding.mesh.shape[axis]) for axis in axes)
    return f"mesh axes {' and '.join(axes)} of {sizes}"


def _name(param: Param, shape: tuple[int, ...], dimension: int) -> str:
    names = ("layers",) * (len(shape) - len(param.axes)) + param.axes
    return names[dimension] or "without a name"
