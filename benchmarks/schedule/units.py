"""When the bundles of a straight line issue: one a cycle, in order, later where a unit or a result is not ready."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Sequence

from benchmarks.schedule.bundles import Bundle
from benchmarks.schedule.chips import INTERVAL, LATENCY, Timing

_UNIT = re.compile(r"(mxu|xlu)\d")
_SLOT = re.compile(r"mrb\[(\d+)\]")
_TRANSCENDENTAL = re.compile(r"v(pow2|log2|rcp|rsqrt|tanh|erf|sinq|cosq|sigshft)")
_BYTE_OPERANDS = re.compile(r"vmatmul\S*\.(s8|u8|f8\w*|s4|u4)")
_FLOAT_OPERANDS = re.compile(r"vmatmul\S*\.f32")


@dataclasses.dataclass(frozen=True)
class Issue:
    """Cycles from the first bundle of a line.

    Attributes:
        times: of each bundle.
        end: of the line.
        mxu_busy: of the busiest matrix unit.
    """

    times: tuple[float, ...]
    end: float
    mxu_busy: float


@dataclasses.dataclass(frozen=True)
class Results:
    """Registers of results that a `vmatmul` gives, by the type of its operands: four, two bytes, or one."""

    words: int
    halves: int
    bytes: int

    def of(self, instruction: str) -> int:
        if _BYTE_OPERANDS.search(instruction):
            return self.bytes
        return self.words if _FLOAT_OPERANDS.search(instruction) else self.halves


_BY_ROWS = Results(1, 2, 4)
"""A register of operands has 8, 16 or 32 rows, one of float32 results 8."""
_ALIKE = 0.1  # of the results, by which pops may differ from what products give: a few stand in code twice


def results_per_matmul(bundles: Iterable[Bundle]) -> Results:
    """What the products of this kernel give: by their operands' rows where as many results are taken.

    A kernel may mix types. Where its products do not give so many, all are taken to give the same number.
    """
    instructions = [instruction for bundle in bundles for instruction in bundle.instructions]
    operations = [_operation(instruction) for instruction in instructions]
    if any(".mrb" in operation for operation in operations):
        return Results(4, 4, 4)  # a result buffer holds 16 rows of 256 columns in four registers
    products = [operation for operation in operations if operation.startswith("vmatmul")]
    popped = sum(operation.startswith("vpop.") and ".mr" in operation for operation in operations)
    given = sum(map(_BY_ROWS.of, products))
    if abs(popped - given) <= _ALIKE * given:
        return _BY_ROWS
    mean = max(1, round(popped / len(products)))
    return Results(mean, mean, mean)


def issue(bundles: Sequence[Bundle], timing: Timing, results: Results) -> Issue:
    """Issue times of a straight line."""
    line = _Line(timing, results)
    times = tuple(line.add(bundle) for bundle in bundles)
    return Issue(times, times[-1] + 1 if times else 0.0, max(line.busy.values(), default=0))


def _operation(instruction: str) -> str:
    return instruction.split("= ")[-1].split(" ")[0]


class _Line:
    def __init__(self, timing: Timing, results: Results):
        self.timing, self.results = timing, results
        self.next = 0.0
        self.busy: collections.Counter[str] = collections.Counter()
        self.free: dict[str, float] = {}
        self.queues: dict[str, collections.deque[float]] = collections.defaultdict(collections.deque)
        self.slots: dict[tuple[str, int], float] = {}

    def add(self, bundle: Bundle) -> float:
        at = self.next
        pushes = []
        for instruction in bundle.instructions:
            operation = _operation(instruction)
            if operation.startswith(("vpop", "spop")):
                at = max(at, self._pop(operation))
            elif unit := _unit(operation):
                pushes.append((unit, instruction, operation))
        at = max([at, *(self.free.get(unit, 0.0) for unit, _, _ in pushes)])
        for unit, instruction, operation in pushes:
            if unit.startswith("mxu"):
                self._multiply(unit, instruction, operation, at)
            else:
                kind = unit.rstrip("0123456789")
                self.free[unit] = at + INTERVAL[kind]
                self.queues[unit].append(at + LATENCY[kind])
        self.next = at + 1
        return at

    def _pop(self, operation: str) -> float:
        """When the result is there that the instruction takes."""
        unit = _UNIT.search(operation)
        if unit:
            name = unit[0]
        elif "sfrf" in operation or operation.startswith("spop"):
            name = "sfrf"
        else:
            name = "eup" if "eup" in operation else ""
        if slot := _SLOT.search(operation):
            return self.slots.get((name, int(slot[1])), 0.0)
        return self.queues[name].popleft() if name and self.queues[name] else 0.0

    def _multiply(self, unit: str, instruction: str, operation: str, at: float) -> None:
        step = _interval(instruction, self.timing)
        self.busy[unit] += step  # pyrefly: ignore
        self.free[unit] = at + step
        slot = _SLOT.search(operation)
        results = self.results.of(operation)
        for number in range(results):
            ready = at + self.timing.mxu_latency + step * (number + 1) / results
            if slot:
                self.slots[unit, int(slot[1]) + number] = ready
            else:
                self.queues[unit].append(ready)


def _unit(operation: str) -> str:
    """The unit that the instruction starts work on, or an empty text for those that never wait."""
    found = _UNIT.search(operation)
    if operation.startswith("vmatmul"):
        return found[0] if found else "mxu0"
    if found and found[1] == "xlu":
        return found[0]
    if _TRANSCENDENTAL.match(operation):
        return "eup"
    return "sfrf" if operation.startswith(("vpush", "vsyncmov")) else ""


def _interval(instruction: str, timing: Timing) -> float:
    """Cycles for which a `vmatmul` holds its unit."""
    if _BYTE_OPERANDS.search(instruction):
        return 32 / (2 * timing.rows_per_cycle)
    return (8 if _FLOAT_OPERANDS.search(instruction) else 16) / timing.rows_per_cycle
