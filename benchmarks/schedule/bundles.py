"""Reads a kernel's final schedule (`*-final_bundles.txt`) into bundles and straight lines. It judges nothing."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:\s*((?:> ?)*>?)\s*\{", re.M)
_NAMED = re.compile(r"/\*(\w+)=\*/")
_COMMENT = re.compile(r"/\*.*?\*/", re.S)
_START = re.compile(r"Start(?:/End empty)? region (\d+)")
_BRANCH = re.compile(r"sbr\.rel(.*?)target = \$region(\d+)", re.S)
GUARD = re.compile(r"\((!?)%p\d+_(p\d+)(?:,\s*(%[sp]\w+))?\)\s*,?")
"""`(predicate)`, or `(predicate, value if it does not hold)`."""

CORE_ID = "/* core id */"
"""In the text of kernels that ask which core of the device they are on."""


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Instructions that issue together.

    Attributes:
        label: LH, LB, LE, PB, PF, CT: the role of a branch's target.
        depth: of loops around it.
        starts: numbers of the regions that begin here, which branches name.
    """

    address: int
    label: str | None
    depth: int
    instructions: tuple[str, ...]
    starts: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Block:
    """Bundles without a branch into or out of their middle.

    Attributes:
        start, end: numbers of bundles.
        branch_at: bundle with the branch, whose delay slots end the block; None where there is none.
        condition: of the branch, over predicate registers: "p3", "not p3", "True".
        target: number of the block that it leads to; that behind the last block is the end.
    """

    start: int
    end: int
    branch_at: int | None = None
    condition: str = "False"
    target: int | None = None


def parse(text: str) -> list[Bundle]:
    """The bundles of a schedule.

    Raises:
        ValueError: there are none.
    """
    marks = list(_BUNDLE.finditer(text))
    if not marks:
        raise ValueError("no bundles, expected the text of final bundles")
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return [_bundle(mark, text[mark.end() : end]) for mark, end in zip(marks, ends, strict=True)]


def _bundle(mark: re.Match[str], body: str) -> Bundle:
    starts = tuple(int(number) for number in _START.findall(body))
    # The one comment that changes what an instruction means.
    body = body.replace("/* kRem */", " kRem").replace("/* kDiv */", " kDiv")
    body = _COMMENT.sub("", _NAMED.sub(r" \1=", body)).strip().rstrip("}").strip()
    instructions = tuple(part.strip() for part in body.split(";;") if part.strip())
    return Bundle(int(mark[1], 16), mark[2], mark[3].count(">"), instructions, starts)


def blocks(bundles: Sequence[Bundle], delay_slots: int) -> list[Block]:
    """The straight lines of a schedule, in its order.

    Args:
        bundles: all of the kernel.
        delay_slots: bundles that are executed behind a branch whether it is taken or not; 0 where that varies.
    """
    branches = _branches(bundles)
    marked = {number for number, bundle in enumerate(bundles) if bundle.starts or bundle.label}

    def behind(branch: int) -> int:
        if delay_slots:
            return branch + delay_slots + 1
        # A region's mark shows where the delay slots end.
        near = range(branch + 1, min(branch + 9, len(bundles)))
        return next((number for number in near if number in marked), branch + 2)

    leaders = {0} | {behind(branch) for branch in branches} | {target for _, target in branches.values()}
    starts = sorted(leader for leader in leaders if leader < len(bundles))
    order = {start: number for number, start in enumerate(starts)}
    found = []
    for start, end in zip(starts, [*starts[1:], len(bundles)], strict=True):
        at = max((branch for branch in branches if start <= branch < end), default=None)
        if at is None:
            found.append(Block(start, end))
        else:
            condition, target = branches[at]
            found.append(Block(start, end, at, condition, order.get(target, len(starts))))
    return found


def _branches(bundles: Sequence[Bundle]) -> dict[int, tuple[str, int]]:
    """Condition and target, a bundle, by the bundle of the branch."""
    region: dict[int, int] = {}
    for number, bundle in enumerate(bundles):
        for start in bundle.starts:
            region.setdefault(start, number)
    found = {}
    for number, bundle in enumerate(bundles):
        for instruction in bundle.instructions:
            if match := _BRANCH.search(instruction):
                guard = GUARD.search(match[1])
                condition = f"{'not ' if guard[1] else ''}{guard[2]}" if guard else "True"
                # A region that starts nowhere is the exit.
                found[number] = condition, region.get(int(match[2]), len(bundles))
    return found
