"""Executes the scalar half of a kernel's schedule on one core.

The schedule becomes one Python function, whose variables are the core's registers; what no branch, copy or wait
depends on is left out. So trips of loops and sizes of copies are those of the kernel, not of a model of it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.schedule.bundles import Block, Bundle, blocks
from benchmarks.schedule.chips import Core, Timing
from benchmarks.schedule.machine import VECTOR_TO_SCALAR, Machine
from benchmarks.schedule.scalar import FROM_VECTORS, NAMES, Step, Translator
from benchmarks.schedule.units import Issue, issue, results_per_matmul

_CORE_ID = "allocation0"
"""The word of scalar memory that the runtime writes, not the kernel."""

_REGISTERS = [f"s{number}" for number in range(64)], [f"p{number}" for number in range(32)]


_NUMBER = re.compile(r"\b\d{16,}\b")  # addresses of allocations: those of a `Translator` are as long as this
_FIXED = re.compile(r"\(\d+\)")


@dataclasses.dataclass(frozen=True)
class Loop:
    """A branch that was taken backwards.

    Attributes:
        address, depth: of its first bundle.
        bundles: that it has, in the schedule.
        trips, entries: all together.
        cycles: in it, loops inside included, without those spent waiting for copies.
        mxu_busy: part of these for which the busiest matrix unit worked.
    """

    address: int
    depth: int
    bundles: int
    trips: int
    entries: int
    cycles: float
    mxu_busy: float


@dataclasses.dataclass(frozen=True)
class Run:
    """One execution of a kernel on one core.

    Attributes:
        bundles: executed.
        cycles: until the last copy ended; `unit_cycles`: without waiting for copies; `stall`: waiting for them;
            `mxu_busy`: of the busiest matrix unit.
        moved, copies: bytes and copies by route, "hbm->vmem"; `hbm_bytes`: of all routes.
        loops: the longest first.
        unknown: instructions whose results decided something and were guessed.
        assumed: whether values from vectors decided something, and were those that the caller gave.
        unmatched: waits that nothing satisfied.
        cut: whether it was not executed to its end.
    """

    bundles: int
    cycles: float
    unit_cycles: float
    stall: float
    mxu_busy: float
    moved: Mapping[str, int]
    copies: Mapping[str, int]
    hbm_bytes: int
    loops: tuple[Loop, ...]
    unknown: tuple[str, ...]
    assumed: bool
    unmatched: int
    cut: bool


class Schedule:
    """A kernel's schedule, made executable once for all cores and settings."""

    def __init__(self, bundles: Sequence[Bundle], timing: Timing):
        self.bundles = bundles
        self.blocks = blocks(bundles, timing.delay_slots)
        results = results_per_matmul(bundles)
        self.issues = [issue(bundles[block.start : block.end], timing, results) for block in self.blocks]
        translator = Translator()
        steps = [
            [step for text in bundle.instructions if (step := translator.step(text)) is not None] for bundle in bundles
        ]
        steps = _without_the_unused(self.blocks, steps)
        self.unknown = tuple(sorted({step.unknown for bundle in steps for step in bundle if step.unknown}))
        self._core_id = translator.address(_CORE_ID)
        scope: dict[str, Any] = dict(NAMES)
        exec(_source(self.blocks, steps, self.issues), scope)
        self._run = scope["run"]

    def run(self, core: Core, scalars: Mapping[int, np.ndarray], seconds: float = 60.0) -> Run:
        """Executes it, for at most so many seconds of the processor.

        Args:
            scalars: words of its operands by their number, those that decide its control flow.
        """
        machine = Machine(core, scalars)
        machine.memory[self._core_id] = core.number
        count, taken = [0] * len(self.blocks), [0] * len(self.blocks)
        until = time.process_time() + seconds
        at, cut = self._run(machine, machine.memory, count, taken, lambda: time.process_time() > until)
        given = VECTOR_TO_SCALAR in scalars
        sizes = [block.end - block.start for block in self.blocks]
        return Run(
            bundles=_sum(count, sizes),
            cycles=machine.finish(at),
            unit_cycles=_sum(count, [one.end for one in self.issues]),
            stall=machine.stall,
            mxu_busy=_sum(count, [one.mxu_busy for one in self.issues]),
            moved=dict(machine.moved),
            copies=dict(machine.copies),
            hbm_bytes=machine.hbm_bytes,
            loops=tuple(sorted(self._loops(count, taken), key=lambda loop: -loop.cycles)),
            unknown=tuple(name for name in self.unknown if name != FROM_VECTORS or not given),
            assumed=given and FROM_VECTORS in self.unknown,
            unmatched=machine.unmatched,
            cut=cut,
        )

    def _loops(self, count: Sequence[int], taken: Sequence[int]) -> Iterator[Loop]:
        for number, block in enumerate(self.blocks):
            if block.target is None or block.target > number or not count[number]:
                continue
            inside = slice(block.target, number + 1)
            cycles = _sum(count[inside], [one.end for one in self.issues[inside]])
            first = self.blocks[block.target].start
            yield Loop(
                address=self.bundles[first].address,
                depth=self.bundles[first].depth,
                bundles=block.end - first,
                trips=count[number],
                entries=count[number] - taken[number],
                cycles=cycles,
                mxu_busy=_sum(count[inside], [one.mxu_busy for one in self.issues[inside]]) / max(cycles, 1),
            )


def _sum(count: Sequence[int], values: Sequence[Any]) -> Any:
    return sum(times * value for times, value in zip(count, values, strict=True))


def _without_the_unused(lines: Sequence[Block], steps: list[list[Step]]) -> list[list[Step]]:
    """Only the steps that a branch, a copy, a wait or the memory depends on: the usual analysis of live registers."""
    steps = _without_dead_stores(steps)
    needed: list[frozenset[str]] = [frozenset()] * (len(lines) + 1)
    changed = True
    while changed:
        changed = False
        for number in reversed(range(len(lines))):
            before = frozenset(_backwards(lines, number, steps, needed, None))
            changed |= before != needed[number]
            needed[number] = before
    kept: list[list[Step]] = [[] for _ in steps]
    for number in range(len(lines)):
        _backwards(lines, number, steps, needed, kept)
    return kept


def _without_dead_stores(steps: list[list[Step]]) -> list[list[Step]]:
    """No stores to a place that nothing else names: messages of checks for whoever looks at a core that stopped."""
    named = {number for bundle in steps for step in bundle if not step.stores for number in _NUMBER.findall(step.text)}
    return [
        [step for step in bundle if not _FIXED.fullmatch(step.stores) or named & set(_NUMBER.findall(step.stores))]
        for bundle in steps
    ]


def _backwards(
    lines: Sequence[Block],
    number: int,
    steps: list[list[Step]],
    needed: Sequence[frozenset[str]],
    kept: list[list[Step]] | None,
) -> set[str]:
    """The registers that must be known before a block; with `kept`, its steps that are used are put there."""
    block = lines[number]
    live = set(needed[number + 1])
    if block.target is not None:
        live |= needed[block.target]
    for at in reversed(range(block.start, block.end)):
        used = [step for step in steps[at] if step.effect or step.writes in live]
        # All of a bundle reads before any of it writes.
        live -= {step.writes for step in used}
        for step in used:
            live |= step.reads
        if at == block.branch_at:
            live |= set(block.condition.removeprefix("not ").split()) - {"True", "False"}
        if kept is not None:
            kept[at] = used
    return live


def _source(lines: Sequence[Block], steps: Sequence[Sequence[Step]], issues: Sequence[Issue]) -> str:
    """A function that goes from block to block until it is behind the last one."""
    code = ["def run(machine, memory, count, taken, late):"]
    code += [f" {' = '.join(_REGISTERS[0])} = 0", f" {' = '.join(_REGISTERS[1])} = False"]
    code += [" t, block, left = 0.0, 0, 1024", f" while block < {len(lines)}:"]
    code += ["  left -= 1", "  if not left:", "   left = 1024", "   if late(): return t, True"]
    code += _dispatch(0, len(lines), 2, functools.partial(_block, lines, steps, issues))
    code.append(" return t, False")
    return "\n".join(code)


def _dispatch(first: int, end: int, indent: int, block: Any) -> Iterator[str]:
    """Finds the block by halving."""
    if end - first == 1:
        yield from (" " * indent + line for line in block(first))
        return
    middle = (first + end) // 2
    yield " " * indent + f"if block < {middle}:"
    yield from _dispatch(first, middle, indent + 1, block)
    yield " " * indent + "else:"
    yield from _dispatch(middle, end, indent + 1, block)


def _block(
    lines: Sequence[Block], steps: Sequence[Sequence[Step]], issues: Sequence[Issue], number: int
) -> Iterator[str]:
    block, times = lines[number], issues[number].times
    yield f"count[{number}] += 1"
    # When it began; a wait for a copy moves that, since what follows is late by as much.
    yield "begin = t"
    for at in range(block.start, block.end):
        if at == block.branch_at:
            yield f"branch = {block.condition}"
        yield from _bundle(steps[at], times[at - block.start])
    yield f"t = begin + {issues[number].end}"
    if block.target is None:
        yield f"block = {number + 1}"
    else:
        yield f"if branch: taken[{number}] += 1; block = {block.target}"
        yield f"else: block = {number + 1}"


def _bundle(steps: Sequence[Step], issued: float) -> Iterator[str]:
    """The steps of one bundle: what they do comes first, with the registers as they were before it."""
    if any(step.timed for step in steps):
        yield f"t = max(t, begin + {issued})"
    sets = [step for step in steps if step.writes]
    acts = [step.text for step in steps if not step.writes]
    if acts and sets:
        yield "values = (" + ", ".join(step.text for step in sets) + ",)"
    yield from acts
    if any("machine.wait" in text for text in acts):
        yield f"begin = max(begin, t - {issued})"
    if acts and sets:
        yield ", ".join(step.writes for step in sets) + ", = values"
    elif sets:
        yield ", ".join(step.writes for step in sets) + " = " + ", ".join(f"({step.text})" for step in sets)
