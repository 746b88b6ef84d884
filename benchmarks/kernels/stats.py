"""What is known of one case on one chip, as it is stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

BYTES, FLOPS, COPIES = "bytes", "FLOPs", "copies"
"""The floors: bytes over bandwidth, operations over the peak rate of their type, copies times the cost of issuing one
on one of the cores."""


@dataclasses.dataclass(frozen=True)
class CaseStats:
    """Of a case on a chip; times in seconds.

    Attributes:
        measured: whether it was measured, and not only compiled.
        digest: of what they depend on.
        blocks: what a sweep calls it.
        refusal: one sentence where it does not compile; nothing else is known then.
        compile_s: of lowering and compiling, on this machine.
        temporaries: bytes of HBM in which the function works.
        copied: bytes of the largest copy in the program; `copies`: all of 1 MiB and more, in words.
        copied_layer: bytes of the largest copy of half a layer and more of a stack, of a cache or of weights.
        fits: whether the arguments and temporaries have room on one device.
        vmem: bytes of vector memory.
        floors: by `BYTES`, `FLOPS`, `COPIES`.
        estimates: of the kernels, by the name of the settings; of everything, by the compiler's own figures, where
            there is no kernel; nothing where those are missing.
        around_s: of what surrounds the kernels, by the compiler's figures; None where they are missing.
        bundles: executed on a core; `loop`: bundles of the innermost loop that takes most of that, and its `trips`.
        mxu: share of the time without waits for copies for which the busiest matrix unit works.
        stall_s: waiting for copies.
        hbm_bytes: moved by the kernels, on all cores; by everything where there is no kernel.
        cores: that work.
        notes: what to know before believing the figures.
    """

    op: str
    shape: str
    form: str
    chip: str
    measured: bool = False
    digest: str = ""
    blocks: str = ""
    refusal: str = ""
    compile_s: float = 0.0
    temporaries: int = 0
    copied: int = 0
    copies: tuple[str, ...] = ()
    copied_layer: int = 0
    fits: bool = True
    vmem: int = 0
    floors: Mapping[str, float] = dataclasses.field(default_factory=dict)
    estimates: Mapping[str, float] = dataclasses.field(default_factory=dict)
    around_s: float | None = 0.0
    bundles: int = 0
    loop: int = 0
    trips: int = 0
    mxu: float = 0.0
    stall_s: float = 0.0
    hbm_bytes: float = 0.0
    cores: int = 1
    notes: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        alone = "" if self.measured else "compiled"
        return " | ".join(filter(None, (self.op, self.shape, self.form, self.blocks, self.chip, alone)))

    @property
    def binds(self) -> str:
        """The longest floor."""
        return max(self.floors, key=lambda name: self.floors[name]) if self.floors else ""

    @property
    def floor(self) -> float:
        return max(self.floors.values(), default=0.0)

    def ratio(self, settings: str) -> float | None:
        """Estimate over the binding floor."""
        return self.estimates[settings] / self.floor if settings in self.estimates and self.floor else None

    @property
    def whole(self) -> float | None:
        """Seconds under ideal settings with all that surrounds the kernels."""
        ideal = self.estimates.get("ideal")
        return ideal + self.around_s if ideal is not None and self.around_s is not None else None

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> CaseStats:
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()
        }
        return cls(**values)
