"""A named TPU slice, or several, as devices that the compiler knows without any hardware.

Names are checked from a table, within milliseconds; libtpu is loaded when a mesh is made.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.util
import math
import os
import re
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from sharding.compiler import chips
from sharding.compiler.links import Torus
from sharding.errors import InputError
from sharding.layout import SINGLE, Layout

_MOST_DEVICES = 2**16  # holds three of the largest slices, the most that the vendor joins
_NAME = re.compile(r"(?:(\d+)x)?([a-z]\w*):(\d+(?:x\d+)*)")


class NoCompilerError(InputError):
    """The compiler is not installed, or does not know the slice: what needs no compiler can be said of it still."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice of TPUs, or several equal ones that talk over the data centre's network.

    Attributes:
        chip: what its devices are.
        shape: chips along each dimension of the torus of one slice.
        slices: how many.
    """

    chip: chips.Chip
    shape: tuple[int, ...]
    slices: int = 1

    @classmethod
    def parse(cls, text: str) -> Topology:
        """A topology from its name: `v5p:4x4x4`, or `2xv6e:16x16` for two slices.

        Raises:
            InputError: no name of a topology, with the nearest that is one.
        """
        match = _NAME.fullmatch(text.strip().lower())
        if match is None:
            raise InputError(f"topology {text!r}, expected CHIP:SHAPE as in {_nearest_name(text)}, or 2xCHIP:SHAPE")
        slices, shape = int(match[1] or 1), tuple(int(size) for size in match[3].split("x"))
        chip = chips.chip(match[2])
        if slices < 1:
            raise InputError(f"topology {text!r} has {slices} slices, expected at least 1")
        if shape not in chips.slice_shapes(chip.name):
            near = _name(chip.name, _nearest_shape(chip.name, shape), slices)
            raise InputError(f"topology {text!r}: no slice of {chip.name} is {_cross(shape)}, the nearest is {near}")
        found = cls(chip, shape, slices)
        if found.device_count > _MOST_DEVICES:
            raise InputError(
                f"topology {text!r} has {found.device_count:,} devices, expected at most {_MOST_DEVICES:,}"
            )
        return found

    @property
    def name(self) -> str:
        return _name(self.chip.name, self.shape, self.slices)

    @property
    def chips_per_slice(self) -> int:
        return math.prod(self.shape)

    @property
    def devices_per_slice(self) -> int:
        """Devices as JAX counts them."""
        return self.chips_per_slice * self.chip.devices_per_chip

    @property
    def device_count(self) -> int:
        return self.devices_per_slice * self.slices

    @property
    def hosts(self) -> int:
        return max(1, self.chips_per_slice // self.chip.chips_per_host) * self.slices

    def check(self, layout: Layout) -> None:
        """Raises InputError when the layout is for another number of devices or slices."""
        if layout.devices != self.device_count:
            sizes = f"data {layout.data} x expert {layout.expert} x tensor {layout.tensor}"
            raise InputError(
                f"layout {layout.name} has {layout.devices} devices ({sizes}), {self.name} has {self.device_count}"
                f"{_resized(layout, self)}"
            )
        if layout.slices != self.slices:
            raise InputError(
                f"layout {layout.name} is for {layout.slices} slices, {self.name} has {self.slices}: set slices to that"
            )

    def torus(self, mesh: Mesh) -> Torus:
        """Where the devices of a mesh over these slices are; of the first slice, which the outermost axis begins with.

        Args:
            mesh: its devices say where they are (`coords`), as those of TPUs do.
        """
        own = list(mesh.devices.flat)[: self.devices_per_slice]
        places = tuple(tuple(int(at) for at in device.coords[: len(self.shape)]) for device in own)
        return Torus(self.shape, self.chip.rings(self.shape), places)

    def mesh(self, layout: Layout) -> PlacedMesh:
        """The layout's mesh over the compiler's abstract devices.

        Neighbours along an axis are put next to each other on the torus where the sizes allow; `data` is outermost
        across slices.

        Raises:
            InputError: the layout has other sizes.
            NoCompilerError: libtpu is not installed, or does not know the slice.
        """
        self.check(layout)
        ordered, placement = _place(_devices(self), layout)
        return PlacedMesh(layout.mesh(ordered), placement, self)


@dataclasses.dataclass(frozen=True)
class PlacedMesh:
    """A mesh and how its devices were chosen.

    Attributes:
        placement: `torus` where each mesh axis is made of whole dimensions of the torus, `split torus` where a
            dimension is shared by two axes, so that rings do not close, `plain` where devices are in their own order.
    """

    mesh: Mesh
    placement: str
    topology: Topology

    @functools.cached_property
    def torus(self) -> Torus:
        """Where the devices of a slice are on its torus; all slices are alike."""
        return self.topology.torus(self.mesh)


def one_device(chip: str) -> PlacedMesh:
    """A mesh of one device of a chip's smallest slice, to compile what one device does by itself."""
    topology = Topology.parse(f"{chip}:{_cross(chips.slice_shapes(chip)[0])}")
    return PlacedMesh(SINGLE.mesh(list(_devices(topology)[:1])), "plain", topology)


def _cross(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _name(chip: str, shape: tuple[int, ...], slices: int = 1) -> str:
    return f"{f'{slices}x' if slices > 1 else ''}{chip}:{_cross(shape)}"


def _nearest_shape(chip: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The slice with the same dimensions in another order, or else the closest number of chips."""
    known = chips.slice_shapes(chip)
    wanted = math.prod(shape)
    same = [other for other in known if sorted(other) == sorted(shape)]
    # Ties go to the larger slice, which holds what the wanted one would.
    return same[0] if same else min(known, key=lambda other: (abs(math.log(math.prod(other) / max(wanted, 1))), other))


def _nearest_name(text: str) -> str:
    names = [
        _name(chip, shape) for chip in chips.CHIPS for shape in chips.slice_shapes(chip) if math.prod(shape) <= 512
    ]
    near = difflib.get_close_matches(text.lower(), names, n=1, cutoff=0.3)
    return near[0] if near else "v5p:4x4x4"


def _resized(layout: Layout, topology: Topology) -> str:
    rest, uneven = divmod(topology.device_count, layout.data * layout.tensor)
    if not uneven:
        return f": for example data={layout.data},expert={rest},tensor={layout.tensor}"
    rest, uneven = divmod(topology.device_count, layout.data * layout.expert)
    return "" if uneven else f": for example data={layout.data},expert={layout.expert},tensor={rest}"


@functools.cache
def _devices(topology: Topology) -> tuple[Any, ...]:
    """The compiler's devices; loads libtpu when called for the first time."""
    if importlib.util.find_spec("libtpu") is None:
        raise NoCompilerError("the TPU compiler (libtpu) is not installed, expected after `pip install libtpu`")
    # libtpu would otherwise look for a metadata server, take a lock that a second process then fails on, and warn that
    # it does not know its host. Whoever set these on a real TPU host keeps them.
    for name, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5p-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }.items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    options: dict[str, Any] = {"num_slices": topology.slices} if topology.slices > 1 else {}
    if topology.chips_per_slice == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    name = _name(topology.chip.name, topology.shape)
    try:
        return tuple(topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices)
    except jax.errors.JaxRuntimeError as error:
        raise NoCompilerError(
            f"the TPU compiler (libtpu) has no slice {name}, so nothing can be compiled for it "
            f"({str(error).splitlines()[0]})"
        ) from error


def _place(devices: tuple[Any, ...], layout: Layout) -> tuple[np.ndarray, str]:
    """The devices in the order of the layout's mesh, and the name of the placement."""
    from jax.experimental import mesh_utils

    inner = (layout.data // layout.slices, layout.expert, layout.tensor)
    for split, placement in ((False, "torus"), (True, "split torus")):
        try:
            if layout.slices == 1:
                ordered = mesh_utils.create_device_mesh(inner, devices, allow_split_physical_axes=split)
            else:
                ordered = mesh_utils.create_hybrid_device_mesh(
                    inner, (layout.slices, 1, 1), devices, allow_split_physical_axes=split
                )
        except (NotImplementedError, ValueError):
            continue
        return ordered, placement
    # libtpu numbers the devices of one slice after those of the slice before, so `data` is outermost here too.
    return np.array(devices, dtype=object), "plain"
