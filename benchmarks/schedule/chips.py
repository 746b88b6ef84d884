"""What the estimate needs to know of a chip beside `sharding.compiler.chips`. Every number says where it is from."""

from __future__ import annotations

import dataclasses

from sharding.compiler.chips import Chip


@dataclasses.dataclass(frozen=True)
class Timing:
    """Cycles of one TensorCore.

    Attributes:
        rows_per_cycle: bfloat16 rows that a matrix unit takes in a cycle: distances of `vmatmul` in schedules of
            libtpu 0.0.42, in which one of 8 (v6e, TPU7x) or 16 rows follows another after that many cycles.
        delay_slots: bundles behind a branch that are still executed, from the same schedules; 0 where it varies.
        mxu_latency: from `vmatmul` to its first result. 90 was measured on a v4 by a public tutorial
            (ayaka14732/pallas-tpu-tutorial); that v5e and v5p have the same, and 160 for units of twice the side, are
            assumptions.
        granule: bytes in which schedules count the sizes of copies.
        hbm_shift: bits by which the kernel shifts an address in HBM before it issues a copy, from the same schedules.
    """

    rows_per_cycle: int
    delay_slots: int
    mxu_latency: int
    granule: int = 32
    hbm_shift: int = 0


TIMINGS: dict[str, Timing] = {
    "v5e": Timing(1, 4, 90, hbm_shift=4),
    "v5p": Timing(1, 4, 90),
    "v6e": Timing(2, 4, 160),
    "tpu7x": Timing(2, 0, 160),
}

LATENCY = {"xlu": 69, "eup": 7, "sfrf": 43}
"""Cycles until the result of the transpose unit, of the transcendental unit, or of a move of a vector's value to the
scalar core is there: measured on a v4 by that tutorial, assumed for later chips."""

INTERVAL = {"xlu": 8, "eup": 2, "sfrf": 1}
"""Cycles for which such an instruction holds its unit; from the same source."""

ON_CHIP_BYTES_PER_CYCLE = 512
"""Of copies between memories of one core; an assumption, and they rarely matter."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a copy from or to HBM costs.

    Attributes:
        latency_s: from issue until it starts to move.
        bandwidth: share of the documented peak that all copies reach together.
    """

    name: str
    latency_s: float
    bandwidth: float


IDEAL = Settings("ideal", 0.0, 1.0)
CAL = Settings("cal", 0.45e-6, 0.8)
"""As fitted on a v4 from the same tutorial; that later chips behave so is an assumption."""


@dataclasses.dataclass(frozen=True)
class Core:
    """One TensorCore and its share of the memory's bandwidth.

    Attributes:
        number: among the cores of the device.
        sharers: cores that use the memory at the same time.
    """

    chip: Chip
    settings: Settings
    number: int = 0
    sharers: int = 1

    @property
    def timing(self) -> Timing:
        return TIMINGS[self.chip.name]

    @property
    def bytes_per_cycle(self) -> float:
        return self.chip.hbm_bytes_per_s * self.settings.bandwidth / self.sharers / self.chip.clock_hz

    @property
    def latency(self) -> float:
        """Cycles until a copy starts."""
        return self.settings.latency_s * self.chip.clock_hz
