"""The memory plan of a compiled program: arguments, outputs and named temporaries of one device, as the compiler laid
them out. Read from the buffer assignment that it writes when asked to dump (also when the program does not fit).
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from sharding.compiler.hlo.text import HBM, HOST, Instruction, Module


@dataclasses.dataclass(frozen=True)
class MemoryBuffer:
    """An array in HBM.

    Attributes:
        label: the argument's name, or for a temporary where in the user's program it is from; the name of the
            instruction where the compiler says nothing.
        shape: as in HLO: `bf16[8,128]`.
        bytes: with padding to tiles.
        sharers: names of the values that take turns in this place.
    """

    label: str
    shape: str
    bytes: int
    sharers: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
        arguments: that stay on the device, donated ones among them.
        outputs: that are in no argument's memory.
        aliased: outputs in the memory of donated arguments.
        temporaries: working memory at its fullest, gaps included.
        constants: and other small things.
        total: sum of the five but `aliased`; what the compiler compares with the limit.
        limit: what the compiler offers.
        host: arguments and outputs in the host's pinned memory.
        code: the program itself, beside the total; 0 where it did not fit.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    constants: int
    total: int
    limit: int
    host: int = 0
    code: int = 0

    @property
    def free(self) -> int:
        """What is left of the limit; negative by what is missing."""
        return self.limit - self.total


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Memory by kind, arguments by number of the parameter, temporaries the largest first.

    Of places that overlap, because they are used at different times, the largest is listed.
    """

    memory: Memory
    arguments: Mapping[int, MemoryBuffer]
    temporaries: tuple[MemoryBuffer, ...]


@dataclasses.dataclass(frozen=True)
class _Value:
    name: str
    size: int
    offset: int
    shape: str


@dataclasses.dataclass(frozen=True)
class _Allocation:
    size: int
    color: int
    notes: str
    values: list[_Value]


_ALLOCATION = re.compile(r"allocation \d+: size (\d+)(.*):$")
_VALUE = re.compile(r" value: <\d+ (\S+?)(?:\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$")


def read_assignment(text: str, module: Module, limit: int) -> MemoryPlan:
    """The plan from the text of a buffer assignment (`*.after_optimizations-buffer-assignment.txt`).

    Args:
        module: the same program, for the names.
        limit: bytes of HBM that the compiler offers.
    """
    sums: collections.Counter[str] = collections.Counter()
    arguments: dict[int, MemoryBuffer] = {}
    temporaries: list[MemoryBuffer] = []
    origin = _Origin(module)
    for allocation in _allocations(text):
        if allocation.color == HOST:
            sums["host"] += allocation.size
        parameter = re.search(r"parameter (\d+), shape \|(.*?)\|", allocation.notes)
        if parameter:
            arguments[int(parameter[1])] = MemoryBuffer("", parameter[2], allocation.size)
        if allocation.color != HBM:
            continue
        live_out = "maybe-live-out" in allocation.notes
        if parameter:
            sums["arguments"] += allocation.size
            sums["aliased"] += allocation.size if live_out else 0
        elif live_out:
            sums["outputs"] += allocation.size
        elif "preallocated-temp" in allocation.notes:
            sums["temporaries"] += allocation.size
            temporaries += _places(allocation, origin)
        else:
            sums["constants"] += allocation.size
    total = sum(sums[kind] for kind in ("arguments", "outputs", "temporaries", "constants"))
    fields = ("arguments", "outputs", "aliased", "temporaries", "constants", "host")
    memory = Memory(**{field: sums[field] for field in fields}, total=total, limit=limit)
    return MemoryPlan(memory, arguments, tuple(sorted(temporaries, key=lambda buffer: -buffer.bytes)))


def _allocations(text: str) -> Iterator[_Allocation]:
    current = None
    for line in text.splitlines():
        if match := _ALLOCATION.match(line):
            if current is not None:
                yield current
            color = re.search(r", color (\d+)", match[2])
            current = _Allocation(int(match[1]), int(color[1]) if color else HBM, match[2], [])
        elif current is not None and (match := _VALUE.match(line)):
            current.values.append(_Value(match[1], int(match[2]), int(match[3]), match[4]))
    if current is not None:
        yield current


def _places(allocation: _Allocation, origin: _Origin) -> Iterator[MemoryBuffer]:
    """Places of an allocation that do not overlap, the largest before the smaller ones that they cover."""
    places: dict[tuple[int, int], list[_Value]] = collections.defaultdict(list)
    for value in allocation.values:
        places[value.size, value.offset].append(value)
    taken: list[tuple[int, int]] = []
    for (size, offset), values in sorted(places.items(), key=lambda item: (-item[0][0], item[0][1])):
        if any(offset < end and start < offset + size for start, end in taken):
            continue
        taken.append((offset, offset + size))
        maker = origin.of([value.name for value in values])
        value = next(value for value in values if value.name == maker)
        yield MemoryBuffer(
            origin.label(maker),
            value.shape.partition("{")[0] if not value.shape.startswith("(") else "tuple",
            size,
            tuple(dict.fromkeys(value.name for value in values)),
        )


_PASSING = frozenset(
    {"parameter", "tuple", "get-tuple-element", "while", "bitcast", "copy", "copy-start", "copy-done", "conditional"}
)


class _Origin:
    """Which of the values in one place says best where it is from."""

    def __init__(self, module: Module):
        self.instructions: dict[str, Instruction] = {}
        for computation in module.computations.values():
            self.instructions |= computation.instructions

    def of(self, names: Sequence[str]) -> str:
        def rank(name: str) -> int:
            instruction = self.instructions.get(name)
            if instruction is None or "AllocateBuffer" in instruction.attributes:
                return 4
            return 2 * (instruction.opcode in _PASSING) + (not instruction.op_name)

        return min(names, key=rank)

    def label(self, name: str) -> str:
        instruction = self.instructions.get(name)
        return (instruction.op_name if instruction else "") or name
