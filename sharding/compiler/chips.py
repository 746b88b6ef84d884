"""What one TPU device offers: memory, peak rates, links. Every number says where it is from.

A device is what `jax.devices()` counts. A TPU7x chip shows as two of them, so its vendor's figures per chip are halved
here; on the others a device is a chip. Rates are the vendor's peaks: a time made from them is a lower
bound, not a prediction.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Mapping

from sharding.errors import InputError

MIB, GIB = 2**20, 2**30
_DOCS = "docs.cloud.google.com/tpu/docs"
_COMPILER = "what libtpu 0.0.42 says is available when a program does not fit (RESOURCE_EXHAUSTED)"
_RINGS = (
    "3-D: every slice of 4x4x4 and larger is a torus in all dimensions (the page of each chip); 2-D: only axes of 16 "
    "close (jax-ml.github.io/scaling-book/tpus)"
)
_POD_WIDTH = 16  # chips along each dimension of a pod of v5e and v6e
_F32 = "bf16 peak over the 3 or 6 passes in which an MXU multiplies float32 at precision HIGH or HIGHEST"
_ROW = (
    "8 VLIW bundles a row at one bundle a cycle, counted in the compiled inner loop of a row gather unrolled 8 times "
    "with bounds checks off (20 bundles with them on), one core issuing; clock inferred from peak over MXU width"
)


@dataclasses.dataclass(frozen=True)
class Chip:
    """Figures of one device of a TPU generation.

    Attributes:
        name: as in topology names: `v5p`.
        devices_per_chip, cores_per_device: how many JAX devices one chip shows as, and TensorCores of one of them.
        chips_per_host: chips that one host of a slice of several hosts holds.
        hbm_bytes: memory that the compiler lets a program use.
        hbm_bytes_per_s: peak memory bandwidth.
        peak_flops: multiply-adds counted as two, per second, by operand type; see `peak`.
        torus_dimensions: 2 or 3; a chip has two links in each.
        ici_link_bytes_per_s: one link, one direction.
        dcn_bytes_per_s: to other slices, one direction.
        clock_hz: of a TensorCore.
        kinds: what its runtime calls such a device (`device_kind`).
        vmem_bytes: vector memory of one TensorCore, of which a kernel may use a part.
        mxus, mxu_width: matrix units of one TensorCore and the side of their squares.
        row_copy_ns: stated cost of issuing the copy of one row from HBM into a kernel.
        sources: where each number is from, by attribute name.
        largest_slice: chips of the largest slice.
    """

    name: str
    devices_per_chip: int
    cores_per_device: int
    chips_per_host: int
    hbm_bytes: int
    hbm_bytes_per_s: float
    peak_flops: Mapping[str, float] = dataclasses.field(hash=False)
    torus_dimensions: int
    ici_link_bytes_per_s: float
    dcn_bytes_per_s: float
    clock_hz: float
    kinds: tuple[str, ...]
    vmem_bytes: int
    mxus: int
    mxu_width: int
    sources: Mapping[str, str] = dataclasses.field(hash=False, repr=False)
    largest_slice: int = 256

    @property
    def ici_links(self) -> int:
        """Links of the chip that the device is on."""
        return 2 * self.torus_dimensions

    def rings(self, shape: tuple[int, ...]) -> tuple[bool, ...]:
        """Which dimensions of a slice of that shape close to a ring; in the others the ends are not connected."""
        if self.torus_dimensions == 2:
            # Only the whole width of a pod has links round the end.
            return tuple(size == _POD_WIDTH for size in shape)
        # Cubes of 4 x 4 x 4 are joined by switches, which close each dimension; parts of a cube have none.
        return (all(size % 4 == 0 for size in shape),) * len(shape)

    @property
    def link_bytes_per_s(self) -> float:
        """What a device has of one link of its chip, in one direction, when all devices of the chip use it."""
        return self.ici_link_bytes_per_s / self.devices_per_chip

    @property
    def ici_bytes_per_s(self) -> float:
        """What the device can send over all its links at once, in one direction each; half a chip owns half."""
        return self.ici_links * self.ici_link_bytes_per_s / self.devices_per_chip

    @property
    def row_copy_ns(self) -> float:
        return 8 / self.clock_hz * 1e9

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s of multiplications of that operand type: `bf16`, `fp8`, `int8`, `f32x3` or `f32x6`.

        A type that the chip has no units for runs as bf16, and float32 in the stated number of bf16 passes.

        Raises:
            InputError: no such type.
        """
        if dtype.startswith("f32x"):
            return self.peak_flops["bf16"] / int(dtype[4:])
        if dtype not in ("bf16", "fp8", "int8"):
            raise InputError(f"no peak for type {dtype!r}, expected one of bf16, fp8, int8, f32x3, f32x6")
        return self.peak_flops.get(dtype, self.peak_flops["bf16"])


def _sources(page: str, **other: str) -> dict[str, str]:
    named = dict.fromkeys(("hbm_bytes_per_s", "peak_flops", "ici_link_bytes_per_s", "dcn_bytes_per_s"), page)
    clock = "peak bf16 rate over 2 x MXUs x MXU width squared; the compiler's own tables hold lower clocks"
    named["largest_slice"] = f"{_DOCS}, the page of each chip"
    core = dict.fromkeys(("vmem_bytes", "mxus", "mxu_width"), "jax 0.10.2 pallas/mosaic/tpu_info.py")
    kinds = "device_kind of libtpu 0.0.42"
    return (
        named
        | core
        | {"kinds": kinds, "rings": _RINGS, "hbm_bytes": _COMPILER, "f32": _F32, "row_copy_ns": _ROW, "clock_hz": clock}
        | other
    )


V5E = Chip(
    name="v5e",
    devices_per_chip=1,
    cores_per_device=1,
    chips_per_host=4,
    hbm_bytes=int(15.75 * GIB),
    hbm_bytes_per_s=819e9,
    peak_flops={"bf16": 197e12, "int8": 393e12},
    torus_dimensions=2,
    ici_link_bytes_per_s=50e9,
    dcn_bytes_per_s=3.125e9,
    clock_hz=1.5e9,
    kinds=("TPU v5 lite", "TPU v5e"),
    vmem_bytes=128 * MIB,
    mxus=4,
    mxu_width=128,
    largest_slice=256,
    sources=_sources(
        f"{_DOCS}/v5e",
        peak_flops=f"bf16: {_DOCS}/v5e; int8: {_DOCS}/v6e; no FP8 units",
        ici_link_bytes_per_s=f"400 GB/s a chip, both directions of 4 links: {_DOCS}/v5e",
        dcn_bytes_per_s=f"6.4 Tbit/s a pod of 256 chips: {_DOCS}/v5e",
    ),
)

V5P = Chip(
    name="v5p",
    devices_per_chip=1,
    cores_per_device=2,
    chips_per_host=4,
    hbm_bytes=int(95.74 * GIB),
    hbm_bytes_per_s=2765e9,
    peak_flops={"bf16": 459e12, "int8": 918e12},
    torus_dimensions=3,
    ici_link_bytes_per_s=100e9,
    dcn_bytes_per_s=6.25e9,
    clock_hz=1.75e9,
    kinds=("TPU v5", "TPU v5p"),
    vmem_bytes=64 * MIB,
    mxus=4,
    mxu_width=128,
    largest_slice=6144,
    sources=_sources(
        f"{_DOCS}/v5p",
        hbm_bytes_per_s=f"{_DOCS}/tpu7x (jax tpu_info has 2460 GB/s)",
        peak_flops=f"bf16, and FP8 at the same rate: {_DOCS}/v5p; int8: jax 0.10.2 pallas/mosaic/tpu_info.py",
        ici_link_bytes_per_s=f"1200 GB/s a chip, both directions of 6 links: {_DOCS}/v5p",
        dcn_bytes_per_s=f"50 Gbit/s a chip: {_DOCS}/v5p",
    ),
)

V6E = Chip(
    name="v6e",
    devices_per_chip=1,
    cores_per_device=1,
    chips_per_host=4,
    hbm_bytes=int(31.25 * GIB),
    hbm_bytes_per_s=1638e9,
    peak_flops={"bf16": 918e12, "int8": 1836e12},
    torus_dimensions=2,
    ici_link_bytes_per_s=100e9,
    dcn_bytes_per_s=12.5e9,
    clock_hz=1.75e9,
    kinds=("TPU v6 lite", "TPU v6e"),
    vmem_bytes=128 * MIB,
    mxus=2,
    mxu_width=256,
    largest_slice=256,
    sources=_sources(
        f"{_DOCS}/v6e",
        hbm_bytes_per_s=f"{_DOCS}/tpu7x ({_DOCS}/v6e has 1600 GB/s)",
        peak_flops=f"bf16 and int8: {_DOCS}/v6e; FP8 at the rate of bf16: {_DOCS}/tpu7x",
        ici_link_bytes_per_s=f"800 GB/s a chip, both directions of 4 links: {_DOCS}/v6e",
        dcn_bytes_per_s=f"100 Gbit/s a chip: {_DOCS}/tpu7x",
    ),
)

TPU7X = Chip(
    name="tpu7x",
    devices_per_chip=2,
    cores_per_device=1,
    chips_per_host=4,
    hbm_bytes=int(94.75 * GIB),
    hbm_bytes_per_s=7380e9 / 2,
    peak_flops={"bf16": 2307e12 / 2, "fp8": 4614e12 / 2},
    torus_dimensions=3,
    ici_link_bytes_per_s=100e9,
    dcn_bytes_per_s=12.5e9 / 2,
    clock_hz=2.2e9,
    kinds=("TPU7x",),
    vmem_bytes=64 * MIB,
    mxus=2,
    mxu_width=256,
    largest_slice=9216,
    sources=_sources(
        f"{_DOCS}/tpu7x, half of a chip",
        peak_flops=f"{_DOCS}/tpu7x, half of a chip; no int8 units (jax 0.10.2 pallas/mosaic/tpu_info.py)",
        ici_link_bytes_per_s=f"1200 GB/s a chip, both directions of 6 links: {_DOCS}/tpu7x",
        dcn_bytes_per_s=f"100 Gbit/s a chip: {_DOCS}/tpu7x, half of a chip",
    ),
)

CHIPS: Mapping[str, Chip] = {chip.name: chip for chip in (V5E, V5P, V6E, TPU7X)}
"""Chips by name. v4 is left out: ahead of time its chip shows as two devices, on hardware as one."""


def chip(name: str) -> Chip:
    """The chip of that name.

    Raises:
        InputError: there is none, with the most similar name.
    """
    if name in CHIPS:
        return CHIPS[name]
    near = difflib.get_close_matches(name.lower(), CHIPS, n=1, cutoff=0.4)
    hint = f", did you mean {near[0]}?" if near else ""
    raise InputError(f"unknown chip {name!r}, expected one of {', '.join(CHIPS)}{hint}")


def of_kind(kind: str) -> Chip | None:
    """The chip whose devices call themselves so (`device_kind`), or None."""
    return next((chip for chip in CHIPS.values() if kind in chip.kinds), None)


@functools.cache
def slice_shapes(name: str) -> tuple[tuple[int, ...], ...]:
    """Shapes in chips of the slices of that chip, smallest first.

    v5e and v6e: the vendor's list. v5p and TPU7x: the vendor's parts of a cube of 4 x 4 x 4, and whole cubes in
    ascending order, of which its pages list the most common.
    """
    found = chip(name)
    if found.torus_dimensions == 2:
        return ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
    parts = [(2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)]
    sizes = range(4, found.largest_slice // 16 + 1, 4)
    cubes = [
        (a, b, c)
        for a in sizes
        if a**3 <= found.largest_slice
        for b in sizes
        if a <= b and a * b * b <= found.largest_slice
        for c in sizes
        # Rings of an axis longer than this are not offered.
        if b <= c <= 32 and a * b * c <= found.largest_slice
    ]
    return tuple(parts + sorted(cubes, key=lambda shape: (math.prod(shape), shape)))
