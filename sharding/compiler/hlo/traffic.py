"""Bytes that the instructions of a compiled HLO module move to and from HBM.

An instruction reads its operands and writes its results, as far as they are in HBM (the compiler moves much to VMEM).
What only looks at a part of an operand is charged the part: a loop that takes a layer out of a stack reads the layer.
An update in place is charged what it writes. Rereading of an operand inside of one instruction is not seen, so that
the sum is a lower bound.
"""

from __future__ import annotations

import dataclasses
import math

from sharding.compiler.hlo.flops import cost_estimate
from sharding.compiler.hlo.text import HBM, Array, Computation, Instruction, Module, Type, arrays, element


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FREE = _words(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all partition-id replica-id "
    "opt-barrier domain add-dependency get-dimension-size async-start async-update call-start"
)
_NOTES = _words(
    "AssumeGatherIndicesInBound ConcatBitcast AllocateBuffer Sharding GetInternalScratch PrepareAsyncCallStart "
    "PrepareAsyncCallDone GatherScatterIndicesBitpacked SliceId"
)
_SLICES = frozenset({"dynamic-slice", "slice", "gather"})
_SAME_SHAPE = _words(
    "abs add and atan2 bitcast bitcast-convert ceil clamp compare convert copy cosine divide exponential floor log "
    "maximum minimum multiply negate not or power remainder reshape rsqrt select shift-left shift-right-logical "
    "shift-right-arithmetic sign sine sqrt subtract tanh transpose xor"
)


def hbm_bytes(module: Module, computation: Computation, instruction: Instruction) -> tuple[int, int]:
    """Bytes read from and written to HBM by one execution; those of called loops and branches are their own.

    A kernel moves what its `pl.CostEstimate` states (counted as read), or else whole operands and results.
    """
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith("-done"):
        return 0, 0
    operands = computation.operand_types(instruction)
    if opcode == "fusion":
        return _fusion(module, instruction, operands)
    if opcode == "custom-call":
        return _custom_call(instruction, operands)
    if opcode in _SLICES:
        taken = min(_in_hbm(operands[0]), _taken(operands[0], instruction.type))
        return taken + sum(map(_in_hbm, operands[1:])), _in_hbm(instruction.type)
    if opcode == "dynamic-update-slice":
        written = _packed(operands[1]) if _in_hbm(instruction.type) else 0
        return sum(map(_in_hbm, operands[1:])), written
    if opcode == "scatter":
        # Rows are read, changed and written; the rest of the array stays in place.
        updates = _packed(operands[-1]) if _in_hbm(instruction.type) else 0
        return updates + sum(map(_in_hbm, operands[1:])), updates
    if opcode in ("copy-start", "slice-start", "dynamic-slice-start"):
        return _start(instruction, operands[0])
    if opcode.endswith("-start") and opcode != "all-reduce-start":
        # `(source, target, ...)`; an all-reduce has the target alone.
        return sum(map(_in_hbm, operands)), _in_hbm(element(instruction.type, 1))
    if opcode in ("send", "recv"):
        return (_in_hbm(operands[0]), 0) if opcode == "send" else (0, _in_hbm(element(instruction.type, 0)))
    return sum(map(_in_hbm, operands)), _in_hbm(instruction.type)


def is_note(instruction: Instruction) -> bool:
    """Whether a custom call does nothing by itself: the compiler marks memory and asynchronous calls with them."""
    return instruction.opcode == "custom-call" and instruction.attribute("custom_call_target").strip('"') in _NOTES


def updated_in_place(module: Module, computation: Computation, instruction: Instruction) -> dict[int, int]:
    """Operands whose memory a result takes over, by number of the result: of updates, and fusions that end in one."""
    if instruction.opcode in ("dynamic-update-slice", "scatter"):
        return {0: 0}
    if instruction.opcode != "fusion":
        return {}
    inner = module.computations[instruction.called("calls")[0]]
    roots = inner.root.operands if inner.root.opcode == "tuple" else (inner.root.name,)
    found = {}
    for result, root in enumerate(roots):
        at = _through_bitcasts(inner, inner.instructions[root])
        while 0 in (operands := updated_in_place(module, inner, at)):
            at = _through_bitcasts(inner, inner.instructions[at.operands[operands[0]]])
            if at.opcode == "parameter":
                found[result] = int(at.literal)
                break
    return found


def _in_hbm(value: Type) -> int:
    return sum(array.bytes for array in arrays(value) if array.space == HBM)


def _packed(value: Type) -> int:
    return sum(array.packed_bytes for array in arrays(value))


def _taken(operand: Type, result: Type) -> int:
    """Bytes of the operand that a slice of the result's size touches."""
    whole, part = next(arrays(operand)), next(arrays(result))
    return math.ceil(whole.bytes * min(1.0, part.elements / max(1, whole.elements)))


def _start(instruction: Instruction, source: Type) -> tuple[int, int]:
    """An asynchronous copy: `(target, source, context)`, or for slices `((source), target, context)`."""
    target = element(instruction.type, 0 if instruction.opcode == "copy-start" else 1)
    read = min(_in_hbm(source), sum(array.bytes for array in arrays(target)))
    return read, _in_hbm(target)


def _custom_call(instruction: Instruction, operands: list[Type]) -> tuple[int, int]:
    if is_note(instruction):
        return 0, 0
    estimate = cost_estimate(instruction)
    if "bytes_accessed" in estimate:
        return estimate["bytes_accessed"], 0
    return sum(map(_in_hbm, operands)), _in_hbm(instruction.type)


def _fusion(module: Module, instruction: Instruction, operands: list[Type]) -> tuple[int, int]:
    inner = module.computations[instruction.called("calls")[0]]
    read = 0
    for number, operand in enumerate(operands):
        size = _in_hbm(operand)
        if size:
            read += math.ceil(size * _touched(_Within(module, inner), inner.parameters[number]))
    roots = inner.root.operands if inner.root.opcode == "tuple" else (inner.root.name,)
    results = instruction.type if isinstance(instruction.type, tuple) else (instruction.type,)
    written = sum(
        _written(module, inner, inner.instructions[root], result)
        for root, result in zip(roots, results, strict=False)
        if _in_hbm(result)
    )
    return read, written


def _written(module: Module, computation: Computation, root: Instruction, result: Type) -> int:
    root = _through_bitcasts(computation, root)
    if root.opcode == "dynamic-update-slice":
        return min(_in_hbm(result), _packed(computation.operand_types(root)[1]))
    if root.opcode == "scatter":
        return min(_in_hbm(result), _packed(computation.operand_types(root)[-1]))
    if root.opcode == "fusion":
        inner = module.computations[root.called("calls")[0]]
        return _written(module, inner, inner.root, result)
    return _in_hbm(result)


def _through_bitcasts(computation: Computation, instruction: Instruction) -> Instruction:
    while instruction.opcode == "bitcast":
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


@dataclasses.dataclass(frozen=True)
class _Within:
    """A fused computation, and the share of its result that whoever calls it looks at."""

    module: Module
    computation: Computation
    result_share: float = 1.0


def _touched(within: _Within, value: Instruction, updated: bool = False) -> float:
    """Share of a value's elements that a fusion looks at.

    Args:
        updated: the value is the result of an update in place, so that handing it out as the result reads nothing.
    """
    if not isinstance(value.type, Array):
        return 1.0
    share = within.result_share if value.root and not updated else 0.0
    for user in within.computation.users[value.name]:
        share += _touched_by(within, value, user, updated)
        if share >= 1:
            return 1.0
    return share


def _touched_by(within: _Within, value: Instruction, user: Instruction, updated: bool) -> float:
    first = user.operands[0] == value.name and user.operands.count(value.name) == 1
    if user.opcode in _SLICES and first:
        part = next(arrays(user.type)).elements / max(1, next(arrays(value.type)).elements)
        return _touched(within, user) * part
    if user.opcode in ("dynamic-update-slice", "scatter") and first:
        return _touched(within, user, updated=True)
    if user.opcode in _SAME_SHAPE:
        # A bitcast of an updated array is still that array; anything else is computed from it.
        return _touched(within, user, updated and user.opcode == "bitcast")
    if user.opcode == "fusion":
        inner = within.module.computations[user.called("calls")[0]]
        inside = _Within(within.module, inner, _touched(within, user))
        numbers = [number for number, operand in enumerate(user.operands) if operand == value.name]
        return min(1.0, sum(_touched(inside, inner.parameters[number]) for number in numbers))
    if user.opcode == "tuple" and user.root:
        return 0.0 if updated else within.result_share
    return 1.0
