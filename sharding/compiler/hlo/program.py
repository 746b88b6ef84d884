"""What a compiled program does in one call on one device: operations, bytes, collectives, copies, kernels.

Everything is counted from the text of the scheduled module, bodies of loops times their iterations. Operations and
bytes give lower bounds of a time, not a prediction of one.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from sharding.compiler.hlo.collectives import Collective, MeshAxes, collectives
from sharding.compiler.hlo.executions import Conditional, Loop, executions
from sharding.compiler.hlo.flops import cost_estimate, flops_of
from sharding.compiler.hlo.text import HBM, Computation, Instruction, Module, arrays, element
from sharding.compiler.hlo.traffic import hbm_bytes, is_note
from sharding.compiler.links import Torus


@dataclasses.dataclass(frozen=True)
class Copy:
    """An instruction that only moves data, from HBM or VMEM into a new place in HBM.

    Attributes:
        kind: `copy`, `transpose`, `dynamic-slice`, ...: a fusion goes by its last step.
        op_name: where it is from; empty for copies that the compiler added of its own.
        bytes: of the result, for one execution.
    """

    kind: str
    op_name: str
    shape: str
    bytes: int
    executed: float
    name: str


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Calls of one kernel (`tpu_custom_call`: Pallas) or of another custom call.

    Attributes:
        calls: places in the text; `executed`: times in one call of the program.
        flops, hbm_bytes: stated by its author, all executions together; None where a call states nothing, so that
            its operations are not counted and whole operands are charged as moved.
    """

    name: str
    target: str
    calls: int
    executed: float
    flops: float | None
    hbm_bytes: float | None


@dataclasses.dataclass(frozen=True)
class Program:
    """Counts for one call on one device.

    Attributes:
        flops: of multiplications by type; see `sharding.compiler.hlo.flops`.
        hbm_read, hbm_written: bytes.
        copies: of at least the size asked for, the most bytes first.
    """

    flops: Mapping[str, float]
    hbm_read: float
    hbm_written: float
    collectives: tuple[Collective, ...]
    copies: tuple[Copy, ...]
    kernels: tuple[Kernel, ...]
    loops: tuple[Loop, ...]
    conditionals: tuple[Conditional, ...]

    @property
    def hbm_bytes(self) -> float:
        return self.hbm_read + self.hbm_written

    @property
    def endless(self) -> tuple[Loop, ...]:
        """Loops whose iterations the text does not say; their bodies count once."""
        return tuple(loop for loop in self.loops if loop.trips is None)

    def sent_bytes(self) -> dict[tuple[str, tuple[str, ...], str], float]:
        """Bytes that a device sends, by kind, mesh axes and network, all executions together."""
        found: dict[tuple[str, tuple[str, ...], str], float] = collections.defaultdict(float)
        for one in self.collectives:
            found[one.kind, one.axes, one.network] += one.sent_bytes * one.executed
        return dict(found)


def analyse(
    module: Module | str,
    mesh: MeshAxes,
    *,
    torus: Torus | None = None,
    shares: Mapping[str, Sequence[float]] | None = None,
    copies_from: int = 2**20,
) -> Program:
    """Counts what a module does.

    Args:
        module: or its text, from `compiled.as_text()`.
        mesh: that it was compiled for.
        torus: that the mesh's devices are on; without one collectives have no links.
        shares: how often each branch of a conditional is taken; see `sharding.compiler.hlo.executions.executions`.
        copies_from: bytes from which on a copy is listed.
    """
    module = Module.parse(module) if isinstance(module, str) else module
    runs = executions(module, shares)
    flops: dict[str, float] = collections.defaultdict(float)
    read = written = 0.0
    copies: list[Copy] = []
    for name, times in runs.times.items():
        computation = module.computations[name]
        for instruction in computation.instructions.values():
            for dtype, count in flops_of(module, computation, instruction).items():
                flops[dtype] += count * times
            moved = hbm_bytes(module, computation, instruction)
            read, written = read + moved[0] * times, written + moved[1] * times
            copies += _copies(module, instruction, times, copies_from)
    return Program(
        flops=dict(flops),
        hbm_read=read,
        hbm_written=written,
        collectives=collectives(module, runs.times, mesh, torus),
        copies=tuple(sorted(copies, key=lambda copy: -copy.bytes * copy.executed)),
        kernels=tuple(_kernels(module, runs.times)),
        loops=runs.loops,
        conditionals=runs.conditionals,
    )


_MOVES = frozenset({"copy", "transpose", "reshape", "slice", "dynamic-slice", "concatenate", "pad", "reverse"})


def _copies(module: Module, instruction: Instruction, executed: float, smallest: int) -> Iterator[Copy]:
    if not executed:
        return
    if instruction.opcode in ("copy-start", "slice-start", "dynamic-slice-start"):
        result = element(instruction.type, 0 if instruction.opcode == "copy-start" else 1)
        kind = instruction.opcode.removesuffix("-start")
    else:
        result, kind = instruction.type, _last_step(module, instruction)
    if kind not in _MOVES:
        return
    for array in arrays(result):
        if array.space == HBM and array.bytes >= smallest:
            yield Copy(kind, instruction.op_name, str(array), array.bytes, executed, instruction.name)


def _last_step(module: Module, instruction: Instruction) -> str:
    """The opcode that an instruction ends in, through fusions, bitcasts and conversions."""
    if instruction.opcode != "fusion":
        return instruction.opcode
    inner = module.computations[instruction.called("calls")[0]]
    at = inner.root
    # Inside of a fusion a reshape, or a transpose to the same order, is only another way to number the elements.
    while at.opcode in ("bitcast", "convert", "reshape") or _keeps_order(at):
        at = inner.instructions[at.operands[0]]
    return _last_step(module, at)


def _keeps_order(instruction: Instruction) -> bool:
    order = re.findall(r"\d+", instruction.attribute("dimensions"))
    return instruction.opcode == "transpose" and order == [str(number) for number in range(len(order))]


def _kernels(module: Module, times: Mapping[str, float]) -> Iterator[Kernel]:
    found: dict[tuple[str, str], list[tuple[Instruction, float]]] = collections.defaultdict(list)
    for name, executed in times.items():
        if executed:
            for instruction in _custom_calls(module, module.computations[name]):
                target = instruction.attribute("custom_call_target").strip('"')
                found[re.sub(r"(\.\d+|\.clone)+$", "", instruction.name), target].append((instruction, executed))
    for (name, target), calls in sorted(found.items()):
        stated = [(cost_estimate(call), executed) for call, executed in calls]
        known = all(estimate for estimate, _ in stated)
        yield Kernel(
            name,
            target,
            len(calls),
            sum(executed for _, executed in calls),
            sum(one.get("flops", 0) * executed for one, executed in stated) if known else None,
            sum(one.get("bytes_accessed", 0) * executed for one, executed in stated) if known else None,
        )


def _custom_calls(module: Module, computation: Computation) -> Iterator[Instruction]:
    for instruction in computation.instructions.values():
        if instruction.opcode == "custom-call":
            # Notes of the compiler to itself are no work.
            if not is_note(instruction):
                yield instruction
        elif instruction.opcode == "fusion":
            for name in instruction.called("calls"):
                yield from _custom_calls(module, module.computations[name])
