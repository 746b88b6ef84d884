"""Turns scalar instructions of a schedule into Python: what decides loops, branches, addresses and sizes of copies.

Registers become local variables (`s5`, `p3`), scalar memory a dictionary, and copies, waits and semaphores calls of a
`Machine`. Vector instructions become nothing.
"""

from __future__ import annotations

import dataclasses
import re

from benchmarks.schedule.bundles import GUARD

_REGISTER = re.compile(r"%(?:[sp]\d+_)([sp]\d+)")
_ALLOCATION = re.compile(r"#(allocation\w*)")
_INSTRUCTION = re.compile(r"(?:%(\S+) = )?([a-z][\w.]*)\s*(.*)", re.S)
_NOTE = re.compile(r"\[(thread|resolvable):[^\]]*\]")
_STORE = re.compile(r"\[smem:(\[.*?\])\]\s*(.*)", re.S)
_LOAD = re.compile(r"\[smem:(\[.*\])\]", re.S)
_FLOAT = re.compile(r"-?\d+(\.\d*(e[+-]?\d+)?|e[+-]?\d+)")
_READS = re.compile(r"\b[sp]\d+\b")


FROM_VECTORS = "spop"
"""The instruction that takes a value from a vector, which is not known here."""


@dataclasses.dataclass(frozen=True)
class Step:
    """What one instruction does.

    Attributes:
        writes: the register that it sets, or an empty text.
        text: an expression for that register, or a statement.
        effect: whether it does more than to set the register, so that it must be executed in any case.
        timed: whether it needs to know the time, `t`.
        unknown: the instruction where the value is a guess.
        stores: the address in scalar memory that it writes, as an expression.
    """

    writes: str
    text: str
    effect: bool = False
    timed: bool = False
    unknown: str = ""
    stores: str = ""

    @property
    def reads(self) -> frozenset[str]:
        return frozenset(_READS.findall(self.text))


def unsigned(value: int) -> int:
    return value & 0xFFFFFFFF if isinstance(value, int) and -(1 << 31) <= value < 0 else value


def wrapped(value: int) -> int:
    """A product as 32 bits keep it."""
    if isinstance(value, int) and abs(value) < (1 << 62):
        return ((value + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)
    return value


NAMES = {"unsigned": unsigned, "wrapped": wrapped}
"""What the texts of steps call beside `machine` (a `Machine`) and `memory` (its words)."""

_BINARY = {"sadd": "+", "ssub": "-", "smul": "*", "sand": "&", "sor": "|", "sxor": "^"}
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_TEXTS = {
    "por": "({0} or {1})",
    "pand": "({0} and {1})",
    "pxor": "(bool({0}) != bool({1}))",
    "pnor": "not ({0} or {1})",
    "pnand": "not ({0} and {1})",
    "pneg": "not {0}",
    "smov": "{0}",
    "pmov": "{0}",
    "vpop.sfrf": "0",  # a semaphore that is read back, to check that it was left at zero
    "sshll": "({0} << {1} if 0 <= {1} < 32 else 0)",
    "sshra": "{0} >> min(31, {1})",
    "sshrl": "(unsigned({0}) >> {1} if 0 <= {1} < 64 else 0)",
    "sclz": "32 - unsigned({0}).bit_length()",
    "spopcnt": "bin(unsigned({0})).count('1')",
}


class Translator:
    """Translates the instructions of one kernel. Every allocation gets a private range of addresses."""

    def __init__(self):
        self._bases: dict[str, int] = {}

    def address(self, allocation: str) -> int:
        # So large that no kernel means a size by the same number.
        return self._bases.setdefault(allocation, (1 << 50) + (len(self._bases) << 20))

    def step(self, instruction: str) -> Step | None:
        """The instruction in Python; None for those that the scalar half of the core does not see."""
        match = _INSTRUCTION.match(instruction)
        if match is None or "sbr.rel" in instruction or "shalt" in instruction:
            return None
        name, operation, rest = match.groups()
        guard, otherwise = "", ""
        if found := GUARD.search(rest):
            guard = f"{'not ' if found[1] else ''}{found[2]}"
            otherwise = register(found[3]) if found[3] else ""
            rest = rest[: found.start()] + rest[found.end() :]
        rest = _NOTE.sub("", rest).strip()
        target = re.search(r"_([sp]\d+)$", name or "")
        writes = target[1] if target else ""
        if act := self._act(operation, rest):
            return dataclasses.replace(act, text=f"if {guard}: {act.text}") if guard else act
        if not writes or operation == "sphi":
            return None
        step = self._value(writes, operation, rest)
        if step and guard:
            step = dataclasses.replace(step, text=f"({step.text}) if {guard} else {otherwise or writes}")
        return step

    def _act(self, operation: str, rest: str) -> Step | None:
        """Instructions that do something and set no register."""
        head = operation.split(".")[0]
        if operation.startswith("dma.") and operation != "dma.done.wait":
            return self._copy(operation, rest)
        if operation == "dma.done.wait" or head in ("vwait", "swait"):
            semaphore, *count = (self.value(part) for part in _parts(rest))
            return Step("", f"t = machine.wait({semaphore}, {count[0] if count else 0}, t)", effect=True, timed=True)
        if operation == "vsyncadd":
            semaphore, count = (self.value(part) for part in _parts(rest)[:2])
            return Step("", f"machine.signal({semaphore}, {count})", effect=True)
        if operation == "sst" and (match := _STORE.match(rest)):
            address = self.value(match[1])
            text = f"memory[{address}] = {self.value(match[2].lstrip(', '))}"
            return Step("", text, effect=True, stores=address)
        if head == "sdivrem":
            a, b = (self.value(part) for part in _parts(rest)[:2])
            sign = "%" if "kRem" in rest else "//"
            quotient = f"unsigned({a}) {sign} unsigned({b}) if {b} else 0"
            return Step("", f"machine.quotients.append({quotient})", effect=True)
        return None

    def _copy(self, operation: str, rest: str) -> Step:
        named = dict(part.strip().split("=", 1) for part in _parts(rest) if "=" in part)
        source, to = [*operation[4:].split("_to_"), "?"][:2]
        size, semaphore, source_at, to_at = (
            self.value(named[key]) if key in named else "0"
            for key in ("size_in_granules", "dst_syncflagno", source, to)
        )
        call = f"machine.copy({source!r}, {to!r}, {size}, {semaphore}, {source_at}, {to_at}, t)"
        return Step("", call, effect=True, timed=True)

    def _value(self, writes: str, operation: str, rest: str) -> Step | None:
        """Instructions that set a register."""
        head = operation.split(".")[0]
        if operation == FROM_VECTORS:
            return Step(writes, "machine.from_vector()", unknown=operation)
        if operation == "spop.drf":
            return Step(writes, "machine.quotients.popleft() if machine.quotients else 0", effect=True)
        if operation.startswith("inlined_call_operand"):
            number = re.search(r"index: (\d+)", rest)
            space = "value" if "no memory space" in rest else operation.rsplit(".", 1)[1]
            return Step(writes, f"machine.operand({number[1] if number else 0}, {space!r})", effect=True)
        if head == "int_to_ptr":
            # A note on the type, which may sit in the bundle that computes its operand.
            text = self.value(rest)
            return None if text == writes else Step(writes, text)
        text = self._expression(operation, head, rest)
        return Step(writes, text) if text is not None else Step(writes, "0", unknown=operation)

    def _expression(self, operation: str, head: str, rest: str) -> str | None:
        """The value of an instruction without effects; None where it is not known here."""
        if operation == "sld":
            match = _LOAD.match(rest)
            return f"memory.get({self.value(match[1])}, 0)" if match else None
        try:
            return _arithmetic(operation, head, [self.value(part) for part in _parts(rest)])
        except (ValueError, IndexError):
            return None  # operands of another kind

    def value(self, text: str) -> str:
        """An operand: a register, a number, or the address of an allocation."""
        text = text.strip()
        if text.startswith("!"):
            return f"(not {self.value(text[1:])})"
        if "=" in text and not text.startswith("["):
            text = text.split("=", 1)[1].strip()
        if text.startswith("%") and (found := register(text.split(" [")[0])):
            return found
        if not text.startswith("["):
            return repr(_number(text.split(" ")[0]))
        inner = text.strip("[]").replace("smem:", "").replace("sflag:", "").strip("[]")
        return "(" + " + ".join(self._term(part) for part in inner.split("+")) + ")"

    def _term(self, text: str) -> str:
        allocation = _ALLOCATION.search(text)
        return str(self.address(allocation[1])) if allocation else self.value(text)


def register(text: str) -> str:
    """The register's name as a variable, or an empty text."""
    match = _REGISTER.search(text)
    return match[1] if match else ""


def _arithmetic(operation: str, head: str, values: list[str]) -> str | None:
    """An instruction on values, or None for one that is not known."""
    if head == "scalar_lea":
        return " + ".join(values)
    if head == "scalar_select":
        predicate, if_true, if_false = values
        return f"{if_true} if {predicate} else {if_false}"
    if head == "scmp":
        _, relation, dtype = operation.split(".")[:3]
        a, b = (f"unsigned({value})" for value in values) if dtype == "u32" else values
        return f"{a} {_COMPARE[relation]} {b}"
    if head == "smulhi" or (head == "smul" and "hi" in operation):
        return f"(unsigned({values[0]}) * unsigned({values[1]})) >> 32"
    if head in _BINARY:
        text = f"{values[0]} {_BINARY[head]} {values[1]}"
        return f"wrapped({text})" if head == "smul" and ".f32" not in operation else text
    if head in ("smin", "smax"):
        a, b = (f"unsigned({value})" for value in values) if ".u32" in operation else values
        return f"{head[1:]}({a}, {b})"
    known = _TEXTS.get(operation if operation in _TEXTS else head)
    return known.format(*values) if known else None


def _parts(text: str) -> list[str]:
    return [part for part in re.split(r",\s*(?![^\[]*\])", text) if part.strip()]


def _number(text: str) -> int | float:
    text = text.replace("$", "")
    if _FLOAT.fullmatch(text):
        return float(text)
    value = int(text, 0)
    return value - (1 << 32) if (1 << 31) <= value < (1 << 32) else value
