"""First section: versions, devices, mesh. It has to be true in a report before anything else is worth reading."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import jax

from glm52_jax.params.axis_rules import rules_of
from infer.selftest.checks import Check, CheckFailed, CheckSkipped, Passed
from infer.selftest.machine import Machine
from sharding.devices import memory_limit, slices_of

PACKAGES = ("glm52-jax", "jax", "jaxlib", "libtpu", "numpy", "flax", "ml-dtypes")
GIB = 2**30


def environment(machine: Machine) -> Iterator[Check]:
    """The checks of this section."""
    yield Check("versions", _versions)
    yield Check("devices", lambda: _devices(machine))
    yield Check("memory", lambda: _memory(machine))
    yield Check("mesh", lambda: _mesh(machine))


def _versions() -> Passed:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return Passed(", ".join(f"{name} {number}" for name, number in found.items() if name != "ml-dtypes"), found)


def _devices(machine: Machine) -> Passed:
    devices, chip = machine.devices, machine.chip
    values = {
        "platform": machine.platform,
        "kind": machine.first.device_kind,
        "devices": len(devices),
        "of this process": len(jax.local_devices()),
        "processes": jax.process_count(),
        "slices": slices_of(devices),
        "chip": chip.name if chip else None,
        "topology": machine.topology.name if machine.topology else None,
        "runtime": machine.first.client.platform_version,
    }
    kinds = {device.device_kind for device in devices}
    if len(kinds) > 1:
        raise CheckFailed(f"devices are of {len(kinds)} kinds, expected one: {', '.join(sorted(kinds))}", **values)
    known = f"chip {chip.name}" if chip else "no chip whose figures are known"
    slices = f", {values['topology']}" if values["topology"] else ""
    count = f"{len(devices)} {machine.platform} devices ({machine.first.device_kind})"
    several = f" in {values['processes']} processes" if values["processes"] > 1 else ""
    return Passed(f"{count}{several}: {known}{slices}", values)


def _memory(machine: Machine) -> Passed:
    """A device that offers less than its chip is used by somebody else, or set up in another way."""
    limit, chip = memory_limit(machine.first), machine.chip
    if limit is None:
        raise CheckSkipped("these devices do not say how much memory they have")
    in_use = (machine.first.memory_stats() or {}).get("bytes_in_use", 0)
    values = {"limit": limit, "in_use": in_use, "stated": chip.hbm_bytes if chip else None}
    stated = f"; {chip.name} is planned with {chip.hbm_bytes / GIB:.2f}" if chip else ""
    figure = f"{limit / GIB:.2f} GiB a device, {in_use / GIB:.2f} in use{stated}"
    if chip and limit < 0.98 * chip.hbm_bytes:
        raise CheckFailed(figure, **values)
    return Passed(figure, values)


def _mesh(machine: Machine) -> Passed:
    layout = machine.layout
    sizes = " x ".join(f"{axis} {size}" for axis, size in machine.mesh.shape.items())
    values = {
        "layout": layout.name,
        **dict(machine.mesh.shape),
        "slices": layout.slices,
        "rules": {name: list(axes) for name, axes in rules_of(layout).items()},
        "placement": "plain",
        "device ids": [device.id for device in machine.devices],
    }
    return Passed(f"{layout.name}: {sizes}, placement plain (the order of jax.devices())", values)
