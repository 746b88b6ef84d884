"""How often each computation of an HLO module runs: loops by their trip counts, one branch of each conditional."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from sharding.compiler.hlo.flops import flops_of
from sharding.compiler.hlo.text import Computation, Instruction, Module
from sharding.compiler.hlo.traffic import hbm_bytes

_FLOPS_PER_BYTE = 250
"""Operations that weigh as much as a byte when the dearer branch is chosen: about peak FLOP/s over HBM bytes/s."""


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop.

    Attributes:
        op_name: where it is from.
        trips: iterations, None where the text does not say; the body then counts once.
        executed: how often it is entered.
    """

    name: str
    op_name: str
    trips: int | None
    executed: float


@dataclasses.dataclass(frozen=True)
class Conditional:
    """A choice between branches.

    Attributes:
        op_name: where it is from.
        executed: how often it is met.
        flops, hbm_bytes: of one execution of each branch; the smallest and largest are the bounds of the choice.
        shares: part of the executions that each branch is counted with: as the caller says, or the dearest all.
    """

    name: str
    op_name: str
    executed: float
    flops: tuple[float, ...]
    hbm_bytes: tuple[float, ...]
    shares: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Executions:
    """Times each computation runs in one call of the program, fusions not among them, and what decided that."""

    times: Mapping[str, float]
    loops: tuple[Loop, ...]
    conditionals: tuple[Conditional, ...]


def executions(module: Module, shares: Mapping[str, Sequence[float]] | None = None) -> Executions:
    """Counts from the entry down.

    Args:
        shares: for conditionals whose `op_name` contains a text, the part of the executions that each branch gets, in
            the order of `lax.cond`'s index (False first) or `lax.switch`; the longest text that fits counts. All
            others are charged with their dearest branch.
    """
    return _Counter(module, shares or {}).run()


def own_calls(instruction: Instruction) -> Iterator[str]:
    """Computations that an instruction runs as code of their own, once for each execution."""
    if instruction.opcode in ("call", "call-start", "async-start"):
        yield from instruction.called("to_apply") or instruction.called("calls")


def branches(instruction: Instruction) -> tuple[str, ...]:
    """Branches of a conditional by their index, False before True."""
    return instruction.called("branch_computations") or (
        *instruction.called("false_computation"),
        *instruction.called("true_computation"),
    )


_IN_BRANCH = re.compile(r"/branch_\d+_fun/")


class _Counter:
    def __init__(self, module: Module, shares: Mapping[str, Sequence[float]]):
        self.module, self.shares = module, shares
        self.costs: dict[str, tuple[float, float]] = {}
        self.times: dict[str, float] = collections.defaultdict(float)
        self.loops: list[Loop] = []
        self.conditionals: list[Conditional] = []

    def run(self) -> Executions:
        self.visit(self.module.entry, 1.0)
        return Executions(dict(self.times), tuple(self.loops), tuple(self.conditionals))

    def visit(self, computation: Computation, times: float) -> None:
        self.times[computation.name] += times
        for instruction in computation.instructions.values():
            if instruction.opcode == "while":
                trips = trip_count(self.module, computation, instruction)
                self.loops.append(Loop(instruction.name, instruction.op_name, trips, times))
                for name in instruction.called("body"):
                    self.visit(self.module.computations[name], times * (1 if trips is None else trips))
            elif instruction.opcode == "conditional":
                self.visit_branches(instruction, times)
            else:
                for name in own_calls(instruction):
                    self.visit(self.module.computations[name], times)

    def visit_branches(self, instruction: Instruction, times: float) -> None:
        names = branches(instruction)
        costs = [self.cost(self.module.computations[name]) for name in names]
        shares = self.shares_of(instruction, names, costs)
        flops, moved = zip(*costs, strict=True)
        self.conditionals.append(Conditional(instruction.name, instruction.op_name, times, flops, moved, shares))
        for name, share in zip(names, shares, strict=True):
            if share:
                self.visit(self.module.computations[name], times * share)

    def shares_of(
        self, instruction: Instruction, names: Sequence[str], costs: Sequence[tuple[float, float]]
    ) -> tuple[float, ...]:
        # A conditional inside of a branch has the name of that branch before its own.
        fitting = [text for text in self.shares if text in re.split(_IN_BRANCH, instruction.op_name)[-1]]
        fitting = fitting or self.named_inside(names)
        if fitting:
            given = tuple(self.shares[max(fitting, key=len)])
            if len(given) != len(costs):
                raise ValueError(f"{len(given)} shares for {instruction.op_name}, expected {len(costs)} branches")
            return given
        weights = [flops / _FLOPS_PER_BYTE + moved for flops, moved in costs]
        dearest = weights.index(max(weights))
        return tuple(float(number == dearest) for number in range(len(costs)))

    def named_inside(self, names: Sequence[str]) -> list[str]:
        """Texts that what is in the branches is named after, where the compiler gave the conditional another name."""
        found = []
        for text in self.shares:
            for number, name in enumerate(names):
                inner = [i.op_name for i in self.module.computations[name].instructions.values() if i.op_name]
                own = [op_name for op_name in inner if f"{text}/branch_{number}_fun" in op_name]
                if own and len(own) >= len(inner) / 2:
                    found.append(text)
                    break
        return found

    def cost(self, computation: Computation) -> tuple[float, float]:
        """FLOPs and HBM bytes of one execution, with what it calls."""
        if computation.name not in self.costs:
            flops = moved = 0.0
            for instruction in computation.instructions.values():
                flops += sum(flops_of(self.module, computation, instruction).values())
                moved += sum(hbm_bytes(self.module, computation, instruction))
                for name, times in self.calls(computation, instruction):
                    more = self.cost(self.module.computations[name])
                    flops, moved = flops + times * more[0], moved + times * more[1]
            self.costs[computation.name] = flops, moved
        return self.costs[computation.name]

    def calls(self, computation: Computation, instruction: Instruction) -> Iterator[tuple[str, float]]:
        if instruction.opcode == "while":
            trips = trip_count(self.module, computation, instruction)
            yield from ((name, 1.0 if trips is None else trips) for name in instruction.called("body"))
        elif instruction.opcode == "conditional":
            names = branches(instruction)
            yield from zip(
                names,
                self.shares_of(instruction, names, [self.cost(self.module.computations[name]) for name in names]),
                strict=True,
            )
        else:
            yield from ((name, 1.0) for name in own_calls(instruction))


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Iterations of a `while` instruction, or None where they depend on data.

    Taken from the compiler's note, or else from a condition that compares a counter with a bound, both known before.
    """
    noted = loop.backend_config.get("known_trip_count", {}).get("n")
    if noted is not None:
        return int(noted)
    condition = module.computations[loop.called("condition")[0]]
    body = module.computations[loop.called("body")[0]]
    compare = condition.root
    if compare.opcode != "compare":
        return None
    left, right = (_linear(condition, name) for name in compare.operands)
    if left is None or right is None:
        return None
    counter, bound = _state(computation, body, loop, left), _state(computation, body, loop, right)
    if counter is None or bound is None:
        return None
    return _iterations(*counter, *bound, compare.attribute("direction"))


def _iterations(start: int, step: int, limit: int, drift: int, direction: str) -> int | None:
    gap, step = limit - start, step - drift
    if direction in ("GT", "GE"):
        gap, step, direction = -gap, -step, {"GT": "LT", "GE": "LE"}[direction]
    if direction == "LE":
        gap, direction = gap + 1, "LT"
    if direction == "NE" and step and gap % step == 0 and gap // step >= 0:
        return gap // step
    if direction != "LT":
        return None
    if gap <= 0:
        return 0
    return -(-gap // step) if step > 0 else None


_Linear = tuple[int | None, int]
"""A value as an element of the loop's state (None: none) plus a constant."""


def _linear(computation: Computation, name: str) -> _Linear | None:
    instruction = computation.instructions[name]
    if instruction.opcode == "constant":
        return (None, int(instruction.literal)) if instruction.literal.lstrip("-").isdecimal() else None
    if instruction.opcode == "get-tuple-element":
        source = computation.instructions[instruction.operands[0]]
        return (int(instruction.attribute("index")), 0) if source.opcode == "parameter" else None
    if instruction.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
        return _linear(computation, instruction.operands[0])
    if instruction.opcode in ("add", "subtract"):
        left, right = (_linear(computation, operand) for operand in instruction.operands)
        if left is None or right is None:
            return None
        if right[0] is None:
            return left[0], left[1] + (right[1] if instruction.opcode == "add" else -right[1])
        if left[0] is None and instruction.opcode == "add":
            return right[0], left[1] + right[1]
    return None


def _state(computation: Computation, body: Computation, loop: Instruction, value: _Linear) -> tuple[int, int] | None:
    """First value and change in each iteration of a linear function of the loop's state."""
    index, offset = value
    if index is None:
        return offset, 0
    initial = computation.instructions[loop.operands[0]]
    if body.root.opcode != "tuple" or initial.opcode != "tuple":
        return None
    step, start = _linear(body, body.root.operands[index]), _linear(computation, initial.operands[index])
    if step is None or step[0] != index or start is None or start[0] is not None:
        return None
    return start[1] + offset, step[1]
