"""Floating-point operations of the multiplications in an HLO module, by operand type. Vector work is not counted."""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping

import numpy as np

from sharding.compiler.hlo.text import Array, Computation, Instruction, Module

_WIDER = ("int8", "fp8", "bf16", "f32x3", "f32x6")


def flops_of(module: Module, computation: Computation, instruction: Instruction) -> collections.Counter[str]:
    """Operations of one execution, a multiply-add as two, by type: `bf16`, `fp8`, `int8`, `f32x3`, `f32x6`, `kernel`.

    `kernel` is what the author of a Pallas kernel states in its `pl.CostEstimate`, whose operand type is not said;
    without an estimate a kernel counts nothing. float32 in default precision is `bf16`, as a TPU multiplies it; at
    precision HIGH and HIGHEST it is 3 and 6 passes of that (`f32x3`, `f32x6`), each counted once here.
    """
    found: collections.Counter[str] = collections.Counter()
    if instruction.opcode == "fusion":
        for name in instruction.called("calls"):
            inner = module.computations[name]
            for nested in inner.instructions.values():
                found.update(flops_of(module, inner, nested))
    elif instruction.opcode == "dot":
        left, right = _two_arrays(computation, instruction)
        dimensions = _numbers(instruction.attribute("lhs_contracting_dims"))
        contracted = int(np.prod([left.dims[dimension] for dimension in dimensions], dtype=np.int64))
        found[_type_of(instruction, left, right)] += 2 * _result(instruction).elements * contracted
    elif instruction.opcode == "convolution":
        left, right = _two_arrays(computation, instruction)
        found[_type_of(instruction, left, right)] += _convolution(instruction, left, right)
    elif instruction.opcode == "custom-call":
        stated = cost_estimate(instruction).get("flops", 0)
        if stated:
            found["kernel"] += stated
    return found


def cost_estimate(instruction: Instruction) -> Mapping[str, int]:
    """What a kernel's author states: `flops`, `bytes_accessed`, `transcendentals`, `remote_bytes_transferred`."""
    stated = instruction.backend_config.get("custom_call_config", {}).get("cost_estimate", {})
    return {name: int(value) for name, value in stated.items()}


def _two_arrays(computation: Computation, instruction: Instruction) -> tuple[Array, Array]:
    left, right = computation.operand_types(instruction)[:2]
    if not isinstance(left, Array) or not isinstance(right, Array):
        raise ValueError(f"{instruction.opcode} {instruction.name} of tuples, expected arrays")
    return left, right


def _result(instruction: Instruction) -> Array:
    if not isinstance(instruction.type, Array):
        raise ValueError(f"{instruction.opcode} {instruction.name} gives a tuple, expected an array")
    return instruction.type


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"-?\d+", text)]


def _type_of(instruction: Instruction, *operands: Array) -> str:
    precision = instruction.attribute("operand_precision")
    float32 = "f32x6" if "highest" in precision else "f32x3" if "high" in precision else "bf16"

    def one(array: Array) -> str:
        if array.dtype.startswith("f8"):
            return "fp8"
        if array.dtype in ("s8", "u8", "s4", "u4"):
            return "int8"
        return float32 if array.dtype == "f32" else "bf16"

    return max((one(array) for array in operands), key=_WIDER.index)


def _convolution(instruction: Instruction, left: Array, right: Array) -> int:
    """TPU programs hold matrix products as convolutions, batched ones with a strided or dilated window."""
    left_labels, right_labels, out_labels = re.split("_|->", instruction.attribute("dim_labels"))
    window = dict(re.findall(r"(\w+)=([\dx_\-]+)", instruction.attribute("window")))
    out = _result(instruction)
    count = 2
    for axis in sorted(label for label in out_labels if label.isdigit()):
        count *= _valid_positions(
            window,
            int(axis),
            left.dims[left_labels.index(axis)],
            right.dims[right_labels.index(axis)],
            out.dims[out_labels.index(axis)],
        )
    batch = left.dims[left_labels.index("b")] // int(instruction.attribute("batch_group_count") or 1)
    return count * batch * right.dims[right_labels.index("i")] * right.dims[right_labels.index("o")]


def _valid_positions(window: Mapping[str, str], axis: int, size: int, kernel: int, out: int) -> int:
    """Pairs of an output and a kernel position that meet an element of the input, not padding or a hole."""

    def of(name: str, default: int) -> int:
        return int(window[name].split("x")[axis]) if name in window else default

    low = int(window["pad"].split("x")[axis].split("_")[0]) if "pad" in window else 0
    at = np.arange(out)[:, None] * of("stride", 1) - low + np.arange(kernel)[None] * of("rhs_dilate", 1)
    hole = of("lhs_dilate", 1)
    return int(np.sum((at % hole == 0) & (at >= 0) & (at // hole < size)))
