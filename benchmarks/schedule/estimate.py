"""Compiles a function for one TPU device and says how long its kernels take, from their schedules."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.schedule.bundles import CORE_ID, parse
from benchmarks.schedule.chips import CAL, IDEAL, TIMINGS, Core, Settings
from benchmarks.schedule.dump import clear, schedules
from benchmarks.schedule.execute import Run, Schedule
from benchmarks.schedule.machine import tiled_words
from sharding.compiler.chips import Chip
from sharding.compiler.compile import CompiledStep, compile_for
from sharding.compiler.hlo.executions import executions
from sharding.compiler.hlo.text import Instruction, Module
from sharding.compiler.hlo.traffic import hbm_bytes, is_note
from sharding.compiler.topology import one_device

Scalars = Mapping[tuple[str, int], Any]
"""Values of operands by (part of a kernel's name, operand's number); see `benchmarks.kernels.case.Built`."""

_LONG = frozenset({"sort", "custom-call"})
"""Instructions that take much longer than their bytes do, and for which the compiler has no figure."""


@dataclasses.dataclass(frozen=True)
class KernelEstimate:
    """A kernel, by the name of its instruction.

    Attributes:
        executed: times in one call of the function.
        bundles: in its schedule.
        cores: of the device that work.
        runs: by the settings' name, on the core that takes longest.
        seconds: by the settings' name, of one execution.
    """

    name: str
    executed: float
    bundles: int
    cores: int
    runs: Mapping[str, Run]
    seconds: Mapping[str, float]

    @property
    def run(self) -> Run:
        """What does not depend on the settings."""
        return next(iter(self.runs.values()))

    @property
    def hbm_bytes(self) -> float:
        """Of all cores and executions."""
        return self.run.hbm_bytes * self.cores * self.executed


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What one call of a function costs on one device.

    Attributes:
        step: the compiled program.
        vmem: the most that a kernel takes of the vector memory.
        kernels: the longest first.
        missing: kernels that could not be read, and why.
        xla_seconds: of everything else: for each instruction the longer of the compiler's own figure
            (`estimated_cycles` at the clock of `sharding.compiler.chips`) and the time in which its bytes pass HBM.
        xla_bytes: that it moves.
        bytes_alone: fusions for which the compiler has no figure (gathers, scatters).
        uncosted: opcodes, and loops without known trips, for which nothing is known: `xla_seconds` is no figure then.
    """

    step: CompiledStep
    vmem: int
    kernels: tuple[KernelEstimate, ...]
    missing: Mapping[str, str]
    xla_seconds: float
    xla_bytes: float
    bytes_alone: int
    uncosted: Mapping[str, int]

    def kernel_seconds(self, settings: str = IDEAL.name) -> float:
        """Of all kernels one after another, under the settings of that name."""
        return sum(one.seconds[settings] * one.executed for one in self.kernels)

    @property
    def kernel_bytes(self) -> float:
        """That all kernels move, on all cores."""
        return sum(one.hbm_bytes for one in self.kernels)


def compile_one(function: Callable[..., Any], arguments: Sequence[Any], chip: str, donate: Sequence[int] = ()) -> Any:
    """A function compiled for one device of a chip.

    Raises:
        jax.errors.JaxRuntimeError, ValueError, NotImplementedError: the compiler, or Pallas, refuses.
    """
    placed = one_device(chip)
    whole = NamedSharding(placed.mesh, PartitionSpec())
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), tuple(arguments))
    return compile_for(function, shapes, placed, donate=donate)


def estimate(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    chip: str,
    folder: Path,
    *,
    donate: Sequence[int] = (),
    scalars: Scalars | None = None,
    settings: Sequence[Settings] = (IDEAL, CAL),
) -> Estimate:
    """Compiles a function and estimates its kernels.

    Args:
        folder: into which the compiler writes its schedules (`benchmarks.schedule.dump`); it is emptied before.
        scalars: what decides the control flow of kernels; what is not given reads as 0.

    Raises:
        jax.errors.JaxRuntimeError, ValueError, NotImplementedError: the compiler, or Pallas, refuses.
    """
    clear(folder)
    step = compile_one(function, arguments, chip, donate)
    module = Module.parse(step.text)
    found, texts = schedules(folder), {}
    kernels, missing = [], {}
    rest = _Rest(step.placed.topology.chip)
    for name, times in executions(module).times.items():
        if not times:
            continue
        computation = module.computations[name]
        for instruction in computation.instructions.values():
            if instruction.opcode == "custom-call" and instruction.name in found:
                texts[instruction.name] = found[instruction.name].read_text()
                words = _words(instruction.name, scalars or {})
                try:
                    one = estimate_kernel(texts[instruction.name], step.placed.topology.chip, words, settings)
                    kernels.append(dataclasses.replace(one, name=instruction.name, executed=times))
                except (ValueError, TypeError, KeyError, IndexError, SyntaxError) as error:
                    missing[instruction.name] = f"{type(error).__name__}: {error}"
            else:
                rest.add(instruction, hbm_bytes(module, computation, instruction), times)
    rest.uncosted.update("loop without known trips" for _ in step.program.endless)
    return Estimate(
        step=step,
        vmem=_vmem(step.text),
        kernels=tuple(sorted(kernels, key=lambda one: -max(one.seconds.values()) * one.executed)),
        missing=missing,
        xla_seconds=rest.seconds,
        xla_bytes=rest.bytes,
        bytes_alone=rest.bytes_alone,
        uncosted=dict(rest.uncosted),
    )


def estimate_kernel(
    text: str, chip: Chip, words: Mapping[int, np.ndarray], settings: Sequence[Settings]
) -> KernelEstimate:
    """One execution of a kernel on all cores behind the device: those that all work share the memory.

    Args:
        text: its final schedule.
        words: of its operands, as they lie in scalar memory.
    """
    schedule = Schedule(parse(text), TIMINGS[chip.name])
    cores = chip.cores_per_device if CORE_ID in text else 1
    runs = {}
    for one in settings:
        every = [schedule.run(Core(chip, one, number, sharers=cores), words) for number in range(cores)]
        if cores > 1 and min(run.hbm_bytes for run in every) <= 0.02 * every[0].hbm_bytes:
            # The other core has nothing to do, so the first has the memory for itself.
            cores = 1
            every = [schedule.run(Core(chip, one), words)]
        runs[one.name] = max(every, key=lambda run: run.cycles)
    seconds = {name: run.cycles / chip.clock_hz for name, run in runs.items()}
    return KernelEstimate("", 1, len(schedule.bundles), cores, runs, seconds)


@dataclasses.dataclass
class _Rest:
    """Sums over what is no kernel."""

    chip: Chip
    seconds: float = 0.0
    bytes: float = 0.0
    bytes_alone: int = 0
    uncosted: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def add(self, instruction: Instruction, moved: tuple[float, float], times: float) -> None:
        if instruction.opcode in ("while", "conditional", "call") or is_note(instruction):
            return  # what they run is counted by itself
        # About 2,100 of these cycles are charged to every instruction, however small.
        cycles = instruction.backend_config.get("window_config", {}).get("estimated_cycles")
        if cycles is None and instruction.opcode in _LONG:
            self.uncosted[instruction.opcode] += 1
        self.bytes_alone += cycles is None and instruction.opcode == "fusion"
        self.bytes += sum(moved) * times
        passing = sum(moved) / self.chip.hbm_bytes_per_s
        self.seconds += max(int(cycles or 0) / self.chip.clock_hz, passing) * times


def _words(name: str, scalars: Scalars) -> dict[int, np.ndarray]:
    return {number: tiled_words(values) for (part, number), values in scalars.items() if part in name}


_SCOPED = re.compile(
    r'custom-call\(.*?"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"'
)


def _vmem(text: str) -> int:
    return max((int(size) for size in _SCOPED.findall(text)), default=0)
