"""The devices there are, the mesh over them, and what is known about their kind."""

from __future__ import annotations

import dataclasses

import jax
from jax.sharding import Mesh

from glm52_jax.config import BUILT_IN
from glm52_jax.kernels import resolve_backend
from glm52_jax.params.axis_rules import check_rules
from sharding.compiler import chips
from sharding.compiler.topology import Topology
from sharding.devices import shape_of, slices_of
from sharding.layout import Layout
from sharding.presets import read_layouts


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices under test.

    Attributes:
        layout: of all devices.
        mesh: the layout's over them, in the order of `jax.devices()`, as generation makes it.
        quick: whether to leave out what takes long.
    """

    layout: Layout
    mesh: Mesh
    quick: bool = False

    @classmethod
    def of(cls, layout: str, *, quick: bool = False) -> Machine:
        """The devices that JAX finds, under a preset's first layout or one in words; see `presets.read_layouts`.

        Raises:
            InputError: the layout is not one, is for another number of devices, or has rules that no step computes
                right.
        """
        devices = jax.devices()
        experts = BUILT_IN["glm-5.2"].n_routed_experts
        chosen = read_layouts(layout, len(devices), slices_of(devices), experts=experts)[0]
        check_rules(chosen)
        return cls(chosen, chosen.mesh(devices), quick)

    @property
    def devices(self) -> list[jax.Device]:
        return list(self.mesh.devices.flat)

    @property
    def first(self) -> jax.Device:
        """The first device of this process, on which what needs one device runs."""
        return next(device for device in self.devices if device.process_index == jax.process_index())

    @property
    def platform(self) -> str:
        return self.first.platform

    @property
    def backend(self) -> str:
        """The kernels' backend that generation takes here."""
        return resolve_backend(None, self.platform, self.first.device_kind)

    @property
    def chip(self) -> chips.Chip | None:
        """What the devices are, when they are of a kind that is known."""
        return chips.of_kind(self.first.device_kind)

    @property
    def topology(self) -> Topology | None:
        """The slices that the devices are, when they are whole ones of a known chip."""
        chip = self.chip
        if chip is None:
            return None
        shape = shape_of([device.coords for device in self.devices])[: chip.torus_dimensions]  # type: ignore[attr-defined]
        topology = Topology(chip, shape, slices_of(self.devices))
        whole = shape in chips.slice_shapes(chip.name) and topology.device_count == len(self.devices)
        return topology if whole else None

    def several_axes(self) -> tuple[str, ...]:
        """The mesh axes of more than one device."""
        return tuple(axis for axis, size in self.mesh.shape.items() if size > 1)
