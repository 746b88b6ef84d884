"""Compiles one case for one chip and gathers its figures."""

from __future__ import annotations

import dataclasses
import re
import time
from pathlib import Path

import jax

from benchmarks.kernels.case import Case
from benchmarks.kernels.stats import BYTES, COPIES, FLOPS, CaseStats
from benchmarks.schedule.chips import IDEAL
from benchmarks.schedule.estimate import Estimate, compile_one, estimate
from sharding.compiler import chips
from sharding.compiler.compile import CompiledStep

MIB = 2**20
_LAYER = 16 * MIB  # of a stack that is meant
_REFUSALS = (jax.errors.JaxRuntimeError, jax.errors.JAXTypeError, NotImplementedError, ValueError, TypeError)


def compiled(case: Case, chip: str) -> CaseStats:
    """What the compiler alone says: seconds, temporaries and copies, or why it refuses."""
    start = time.perf_counter()
    try:
        built = case.build(chip)
        step = compile_one(built.function, built.arguments, chip, built.donate)
    except Exception as error:  # whatever it is, the other cases must go on
        return _refused(case, chip, error)
    return _of_step(case, chip, step, time.perf_counter() - start)


def measured(case: Case, chip: str, folder: Path) -> CaseStats:
    """All figures.

    Args:
        folder: into which the compiler writes its schedules.
    """
    try:
        built = case.build(chip)
        made = estimate(built.function, built.arguments, chip, folder, donate=built.donate, scalars=dict(built.scalars))
    except Exception as error:
        return _refused(case, chip, error)
    step = made.step
    basis = _of_step(case, chip, step, step.lower_seconds + step.compile_seconds)
    if basis.refusal:
        return basis
    return _with_estimate(case, basis, made)


def floors(case: Case, chip: str) -> dict[str, float]:
    """The least time by each resource of one device, all its cores included; without those that are not needed."""
    device = chips.chip(chip)
    found = {
        BYTES: case.hbm_bytes / device.hbm_bytes_per_s,
        FLOPS: case.flops / device.peak(case.dtype),
        COPIES: case.copies * device.row_copy_ns * 1e-9 / device.cores_per_device,
    }
    return {name: seconds for name, seconds in found.items() if seconds}


def one_sentence(error: BaseException) -> str:
    """The part of a compiler's message that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = next((line for line in lines if not line.startswith(("At:", "--", "==", "The MLIR"))), "")
    text = re.sub(r"^(INTERNAL|INVALID_ARGUMENT|UNIMPLEMENTED|RESOURCE_EXHAUSTED): ", "", text)
    named = type(error).__name__ if not isinstance(error, _REFUSALS) else ""
    return ": ".join(filter(None, (named, text[:300]))) or type(error).__name__


def _refused(case: Case, chip: str, error: BaseException) -> CaseStats:
    return CaseStats(case.op, case.shape, case.form, chip, refusal=one_sentence(error))


def _of_step(case: Case, chip: str, step: CompiledStep, seconds: float) -> CaseStats:
    if not step.fits:
        needed, offered = step.memory.total / 2**30, step.memory.limit / 2**30
        why = f"needs {needed:.2f} GiB of HBM, there are {offered:.2f} GiB"
        return CaseStats(case.op, case.shape, case.form, chip, refusal=why, fits=False)
    copies = [copy for copy in step.program.copies if copy.executed]
    return CaseStats(
        case.op,
        case.shape,
        case.form,
        chip,
        compile_s=seconds,
        temporaries=step.memory.temporaries,
        copied=max((copy.bytes for copy in copies), default=0),
        copies=tuple(f"{copy.kind} {copy.shape} {copy.bytes / MIB:.0f} MiB {copy.op_name}".strip() for copy in copies),
        copied_layer=_copied_layer(step),
        floors=floors(case, chip),
    )


def _copied_layer(step: CompiledStep) -> int:
    """Bytes of the largest copy of half a layer and more of a stack: a large argument of four dimensions and more.

    It has the rows of that stack; values as large have others.
    """
    stacks = [
        (one.bytes // shape[0], shape[-2:])
        for one in step.arguments
        if len(shape := _shape(one.shape)) >= 4 and shape[0] > 1
    ]
    stacks = [(size, rows) for size, rows in stacks if size >= _LAYER]
    return max(
        (
            copy.bytes
            for copy in step.program.copies
            for size, rows in stacks
            if copy.executed and copy.bytes >= size // 2 and _shape(copy.shape)[-2:] == rows
        ),
        default=0,
    )


def _shape(text: str) -> list[int]:
    """Dimensions of an array as HLO has it: `bf16[8,128]`."""
    return [int(size) for size in re.findall(r"\d+", text.partition("[")[2].partition("]")[0])]


def _with_estimate(case: Case, basis: CaseStats, made: Estimate) -> CaseStats:
    device = chips.chip(basis.chip)
    around: float | None = None if made.uncosted else made.xla_seconds
    if made.missing:
        estimates = {}
    elif made.kernels:
        estimates = {name: made.kernel_seconds(name) for name in made.kernels[0].seconds}
    else:
        # The compiler's own figure knows no settings.
        estimates, around = ({IDEAL.name: around}, 0.0) if around is not None else ({}, None)
    runs = [one.run for one in made.kernels]
    hot = _hot_loop(made)
    working = sum(run.unit_cycles for run in runs)
    return dataclasses.replace(
        basis,
        vmem=made.vmem,
        estimates=estimates,
        around_s=around,
        bundles=round(sum(one.run.bundles * one.executed for one in made.kernels)),
        loop=hot[0],
        trips=hot[1],
        mxu=sum(run.mxu_busy for run in runs) / working if working else 0.0,
        stall_s=sum(one.run.stall * one.executed for one in made.kernels) / device.clock_hz,
        hbm_bytes=made.kernel_bytes or made.xla_bytes,
        cores=max((one.cores for one in made.kernels), default=1),
        notes=tuple(_notes(case, made, device.cores_per_device)),
    )


def _hot_loop(made: Estimate) -> tuple[int, int]:
    """Bundles and trips of the smallest loop in which at least half of the time of the longest one is spent."""
    loops = [(loop, one.executed) for one in made.kernels for loop in one.run.loops]
    longest = max((loop.cycles * executed for loop, executed in loops), default=0.0)
    hot = [
        (loop.bundles, round(loop.trips * executed))
        for loop, executed in loops
        if loop.cycles * executed >= longest / 2
    ]
    return min(hot, default=(0, 0))


def _notes(case: Case, made: Estimate, cores: int) -> list[str]:
    found = [f"{name} not read: {why}" for name, why in made.missing.items()]
    if made.uncosted:
        found.append("no figure for " + ", ".join(sorted(made.uncosted)))
    if made.bytes_alone and not made.kernels:
        found.append(f"{made.bytes_alone} fusions by their bytes alone")
    for one in made.kernels:
        runs = one.runs.values()
        if any(run.cut for run in runs):
            found.append("not run to its end")
        if unmatched := max(run.unmatched for run in runs):
            found.append(f"{unmatched} waits unmatched")
        if one.run.assumed:
            found.append("values from vectors as the case has them")
        found += [f"guessed {name}" for name in one.run.unknown]
    if made.kernels and (moved := made.kernel_bytes + made.xla_bytes) < 0.9 * case.hbm_bytes:
        found.append(f"moves {moved / case.hbm_bytes:.0%} of its bytes")
    if made.kernels and cores > 1 and all(one.cores == 1 for one in made.kernels):
        found.append("one core of two")
    return list(dict.fromkeys(found))
