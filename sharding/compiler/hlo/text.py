"""Reads the text of a compiled (scheduled) HLO module: computations, instructions, shapes. It judges nothing."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator
from typing import Any

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_WIDTH = re.compile(r"(?:bf|[a-z]+?)(\d+)")
_OPERAND = re.compile(r"%([\w.\-]+)")
_NAMED = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')

HBM, VMEM, HOST = 0, 1, 5
"""Memory spaces as the layouts of TPU programs number them (`S(1)`); 2, 4, 6 and others are small on-chip ones."""


@dataclasses.dataclass(frozen=True)
class Array:
    """Shape of one array as the compiler lays it out.

    Attributes:
        dtype: as HLO names it: `bf16`, `f8e4m3fn`, `s32`.
        order: dimensions from the one that varies fastest.
        tile: sizes to which the last of the dimensions, in memory order, are padded.
        space: memory space, 0 for HBM.
    """

    dtype: str
    dims: tuple[int, ...]
    order: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()
    space: int = HBM

    @functools.cached_property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bits(self) -> int:
        if self.dtype in _BITS:
            return _BITS[self.dtype]
        match = _WIDTH.match(self.dtype)
        return int(match[1]) if match else 0

    @property
    def packed_bytes(self) -> int:
        """Bytes of its elements alone."""
        return (self.elements * self.bits + 7) // 8

    @functools.cached_property
    def bytes(self) -> int:
        """Bytes that it takes in memory, padding to whole tiles included."""
        sizes = [self.dims[dimension] for dimension in self.order]
        for position, tile in enumerate(reversed(self.tile)):
            if position < len(sizes):
                sizes[position] = -(-sizes[position] // tile) * tile
        return (math.prod(sizes if self.order else self.dims) * self.bits + 7) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


Type = Array | tuple["Type", ...]


def arrays(value: Type) -> Iterator[Array]:
    """The arrays of a type, depth first."""
    if isinstance(value, Array):
        yield value
    else:
        for item in value:
            yield from arrays(item)


def element(value: Type, number: int) -> Type:
    """An element of a tuple; an array, which some asynchronous operations give instead, is its own only one."""
    return value[number] if isinstance(value, tuple) else value


@dataclasses.dataclass
class Instruction:
    """One line of a computation.

    Attributes:
        operands: names of instructions of the same computation; for a constant or parameter see `literal`.
        literal: the text between the parentheses.
        attributes: the text behind them.
    """

    name: str
    type: Type
    opcode: str
    operands: tuple[str, ...]
    literal: str
    attributes: str
    root: bool

    @functools.cached_property
    def op_name(self) -> str:
        """Where in the user's program it is from (`jit(f)/while/body/dot_general`), or an empty text."""
        match = _NAMED.search(self.attributes)
        return match[1].replace('\\"', '"') if match else ""

    @functools.cached_property
    def backend_config(self) -> dict[str, Any]:
        start = self.attributes.find("backend_config=")
        if start < 0:
            return {}
        try:
            return json.JSONDecoder().raw_decode(self.attributes, start + len("backend_config="))[0]
        except ValueError:
            return {}

    def attribute(self, name: str) -> str:
        """The text of an attribute, or an empty one: `called("calls")` is easier for computations."""
        match = re.search(rf"(?:^|, ){name}=", self.attributes)
        return _balanced(self.attributes, match.end()) if match else ""

    def called(self, name: str) -> tuple[str, ...]:
        """Names of the computations in an attribute."""
        return tuple(_OPERAND.findall(self.attribute(name)))


@dataclasses.dataclass
class Computation:
    """Instructions by name, in the order of the schedule."""

    name: str
    instructions: dict[str, Instruction]

    @functools.cached_property
    def root(self) -> Instruction:
        for instruction in reversed(self.instructions.values()):
            if instruction.root:
                return instruction
        raise ValueError(f"computation {self.name} has no root")

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {int(i.literal): i for i in self.instructions.values() if i.opcode == "parameter"}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Instructions that have an instruction as operand, by its name."""
        found: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                found[operand].append(instruction)
        return found

    def operand_types(self, instruction: Instruction) -> list[Type]:
        return [self.instructions[operand].type for operand in instruction.operands]


@dataclasses.dataclass
class Module:
    """A compiled module."""

    computations: dict[str, Computation]
    entry: Computation

    @classmethod
    def parse(cls, text: str) -> Module:
        """A module from `compiled.as_text()`.

        Raises:
            ValueError: there is no entry computation.
        """
        computations: dict[str, Computation] = {}
        entry = current = None
        for line in text.splitlines():
            if line.startswith("  ") and current is not None:
                instruction = _instruction(line.strip())
                if instruction is not None:
                    current.instructions[instruction.name] = instruction
            elif line.startswith(("%", "ENTRY ")) and line.endswith("{"):
                match = _OPERAND.search(line)
                if match is None:
                    continue
                current = Computation(match[1], {})
                computations[current.name] = current
                if line.startswith("ENTRY "):
                    entry = current
            elif line.startswith("}"):
                current = None
        if entry is None:
            raise ValueError("no ENTRY computation, expected the text of a compiled HLO module")
        return cls(computations, entry)


def _instruction(line: str) -> Instruction | None:
    root = line.startswith("ROOT ")
    name, equals, rest = line.removeprefix("ROOT ").partition(" = ")
    if not equals or not name.startswith("%"):
        return None
    type_end = len(_balanced(rest, 0, " "))
    opening = rest.index("(", type_end)
    opcode = rest[type_end:opening].strip()
    inside = _balanced(rest, opening, "")
    return Instruction(
        name=name[1:],
        type=parse_type(rest[:type_end]),
        opcode=opcode,
        operands=() if opcode in ("constant", "parameter") else tuple(_OPERAND.findall(inside)),
        literal=inside[1:-1],
        attributes=rest[opening + len(inside) :],
        root=root,
    )


def _balanced(text: str, start: int, until: str = ",") -> str:
    """From `start` to the first of `until` outside of brackets and quotes, or one bracketed group if that is empty."""
    depth, position = 0, start
    while position < len(text):
        character = text[position]
        if character == '"':
            position += 1
            while text[position] != '"':
                position += 2 if text[position] == "\\" else 1
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth < 0 or (depth == 0 and not until):
                return text[start : position + (depth == 0)]
        elif depth == 0 and until and character in until:
            return text[start:position]
        position += 1
    return text[start:]


_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
_TILE = re.compile(r"T\(([\d,*]+)\)")
_SPACE = re.compile(r"S\((\d+)\)")


def parse_type(text: str) -> Type:
    """A type from its text: `bf16[8,128]{1,0:T(8,128)(2,1)S(1)}`, or a tuple of types."""
    text = re.sub(r"/\*.*?\*/", "", text).strip()
    if text.startswith("("):
        items, position, inside = [], 0, text[1:-1]
        while position < len(inside):
            item = _balanced(inside, position)
            items.append(parse_type(item))
            position += len(item) + 1
        return tuple(items)
    return _parse_array(text)


@functools.lru_cache(maxsize=4096)
def _parse_array(text: str) -> Array:
    match = _ARRAY.match(text)
    if match is None:
        return Array(text, ())
    dims = tuple(int(size.lstrip("<=")) for size in match[2].split(",") if size.strip())
    order, _, rest = (match[3] or "").partition(":")
    tile, space = _TILE.search(rest), _SPACE.search(rest)
    return Array(
        dtype=match[1],
        dims=dims,
        order=tuple(int(dimension) for dimension in order.split(",") if dimension.strip()),
        # `*` in a tile merges a dimension into the next; such tiles pad nothing that is counted here.
        tile=tuple(int(size) for size in tile[1].split(",")) if tile and "*" not in tile[1] else (),
        space=int(space[1]) if space else HBM,
    )
