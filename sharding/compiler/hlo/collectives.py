"""The collectives of a compiled HLO module: kind, mesh axes, bytes, how often, and what runs beside them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from sharding.compiler.hlo.executions import own_calls
from sharding.compiler.hlo.flops import flops_of
from sharding.compiler.hlo.text import Array, Computation, Instruction, Module, arrays
from sharding.compiler.hlo.traffic import hbm_bytes, is_note
from sharding.compiler.links import Route, Torus, leaving_bytes

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective in the text of a program.

    Attributes:
        kind: one of `KINDS`.
        axes: mesh axes that its groups of devices span, outermost first; empty when they cannot be told.
        whole: the groups are all devices along those axes, not a part of them.
        group: devices in a group.
        network: `ici` inside a slice or `dcn` between slices.
        payload_bytes: what a device hands in, without padding to tiles.
        sent_bytes: what a device puts on links for one execution by the method that sends least: of the payload p with
            a group of n, 2p(n-1)/n for an all-reduce, p(n-1) for an all-gather, p(n-1)/n for a reduce-scatter or
            all-to-all, p for a permute. For the ragged form p is its whole input array, an upper bound.
        executed: times in one call of the program.
        overlapped: it is asynchronous and something is computed before its result is waited for.
        overlap_flops, overlap_hbm_bytes: what is computed and moved in that time, for one execution.
        op_name: where it is from.
        leaving_bytes: of the bytes sent, those that go over ICI, since they leave the chip; see `links.leaving_bytes`.
        route: how its groups lie on the torus; None between slices, and where no torus was given.
    """

    kind: str
    axes: tuple[str, ...]
    whole: bool
    group: int
    network: str
    payload_bytes: int
    sent_bytes: float
    executed: float
    overlapped: bool
    overlap_flops: float
    overlap_hbm_bytes: float
    op_name: str
    name: str
    leaving_bytes: float = 0.0
    route: Route | None = None


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """Names and sizes of a mesh's axes, outermost first, and the slices that the first of them crosses."""

    sizes: tuple[tuple[str, int], ...]
    slices: int = 1

    @property
    def devices(self) -> int:
        return math.prod(size for _, size in self.sizes)

    def in_one_slice(self) -> MeshAxes:
        (first, size), *rest = self.sizes
        return MeshAxes(((first, size // self.slices), *rest))


def collectives(
    module: Module, times: Mapping[str, float], mesh: MeshAxes, torus: Torus | None = None
) -> tuple[Collective, ...]:
    """All of them, those that never run left out; a start and its done are one.

    Args:
        times: executions of each computation.
        torus: that the devices of a slice are on, in the order of the mesh; it gives each collective its links.
    """
    found, routes = [], _Routes(torus)
    for name, executed in times.items():
        computation = module.computations[name]
        for instruction in computation.instructions.values():
            for inner, collective in _inside(module, computation, instruction):
                if executed:
                    found.append(_describe(module, computation, instruction, inner, collective, executed, mesh, routes))
    return tuple(found)


class _Routes:
    """Routes of groups; the same groups are asked for often."""

    def __init__(self, torus: Torus | None):
        self.torus = torus
        self.known: dict[tuple[Groups | None, bool], Route] = {}

    def of(self, groups: Groups | None, *, permute: bool) -> Route | None:
        if self.torus is None:
            return None
        if (groups, permute) not in self.known:
            self.known[groups, permute] = (
                self.torus.route(groups, permute=permute) if groups else self.torus.everywhere()
            )
        return self.known[groups, permute]


def _inside(
    module: Module, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Computation, Instruction]]:
    """The collective that an instruction is, or those in the fusion that it calls."""
    if _kind(instruction):
        yield computation, instruction
    elif instruction.opcode == "fusion":
        for name in instruction.called("calls"):
            inner = module.computations[name]
            for nested in inner.instructions.values():
                yield from _inside(module, inner, nested)


def _kind(instruction: Instruction) -> str | None:
    opcode = instruction.opcode.removesuffix("-start")
    if opcode in KINDS:
        return opcode
    if instruction.opcode == "send" and "_xla_megascale_transfer_type" in instruction.attributes:
        # Between slices the runtime of the hosts exchanges what the program sends and receives.
        match = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)
        kind = match[1].lower().replace("_", "-") if match else ""
        return kind if kind in KINDS else None
    return None


def _describe(
    module: Module,
    computation: Computation,
    outer: Instruction,
    inner: Computation,
    instruction: Instruction,
    executed: float,
    mesh: MeshAxes,
    routes: _Routes,
) -> Collective:
    kind = _kind(instruction) or ""
    operands = [array for value in inner.operand_types(instruction) for array in arrays(value)]
    if kind in ("ragged-all-to-all", "collective-permute") or instruction.opcode == "send":
        operands = operands[:1]
    if (
        outer is not instruction
        and kind == "all-reduce"
        and "reduce-scatter" in "".join(outer.called("calls")).replace("all-reduce-scatter", "reduce-scatter")
    ):
        # A TPU program holds a reduce-scatter as a fusion of an all-reduce, which pads, and a slice.
        kind = "reduce-scatter"
        operands = [array for value in computation.operand_types(outer) for array in arrays(value)]
    payload = sum(array.packed_bytes for array in operands if isinstance(array, Array))
    dcn = instruction.opcode == "send"
    groups = _groups(instruction, mesh, dcn)
    axes, whole, group = _axes(instruction, groups, mesh, dcn)
    route = None if dcn else routes.of(groups, permute=kind == "collective-permute")
    sent = _sent(kind, payload, group)
    beside = list(_beside(module, computation, outer))
    return Collective(
        kind=kind,
        axes=axes,
        whole=whole,
        group=group,
        network="dcn" if dcn else "ici",
        payload_bytes=payload,
        sent_bytes=sent,
        executed=executed,
        overlapped=bool(beside),
        overlap_flops=sum(sum(flops_of(module, where, other).values()) for where, other in beside),
        overlap_hbm_bytes=sum(sum(hbm_bytes(module, where, other)) for where, other in beside),
        op_name=outer.op_name or instruction.op_name,
        name=outer.name,
        leaving_bytes=sent if route is None else leaving_bytes(kind, payload, route),
        route=route,
    )


def _sent(kind: str, payload: int, group: int) -> float:
    if kind in ("collective-permute", "collective-broadcast"):
        return float(payload)
    if kind == "all-gather":
        return float(payload * (group - 1))
    part = payload * (group - 1) / max(1, group)
    return 2 * part if kind == "all-reduce" else part


_COMPUTES = frozenset({"fusion", "convolution", "dot", "custom-call", "while", "conditional", "call", "sort", "reduce"})


def _beside(module: Module, computation: Computation, start: Instruction) -> Iterator[tuple[Computation, Instruction]]:
    """What computes between the start of an asynchronous collective and the instruction that waits for it."""
    done = {"send": "recv-done"}.get(start.opcode, start.opcode.removesuffix("-start") + "-done")
    if start.opcode != "send" and not start.opcode.endswith("-start"):
        # The collective may be the body of an asynchronous call (TPU7x runs some on its SparseCores).
        calls = [
            (caller, other)
            for caller in module.computations.values()
            for other in caller.instructions.values()
            if other.opcode in ("call-start", "async-start") and computation.name in own_calls(other)
        ]
        for caller, other in calls:
            yield from _beside(module, caller, other)
        return
    started = False
    for instruction in computation.instructions.values():
        if instruction is start:
            started = True
        elif started and instruction.opcode == done and (start.name in instruction.operands or done == "recv-done"):
            return
        elif started and instruction.opcode in _COMPUTES and not is_note(instruction):
            yield computation, instruction


def _groups(instruction: Instruction, mesh: MeshAxes, dcn: bool) -> Groups | None:
    """Its groups of devices, by number in the mesh (of one slice, inside of slices); None where they cannot be told."""
    if dcn:
        match = re.search(r'_xla_megascale_target="?(\{\{.*?\}\}|\{[\d,]+\}x\{\d+:\d+\})', instruction.attributes)
        return _read_target(match[1], mesh) if match else None
    if instruction.opcode.startswith("collective-permute"):
        return _nested(instruction.attribute("source_target_pairs"))
    return read_groups(instruction.attribute("replica_groups"), _local(mesh, dcn).devices)


def _local(mesh: MeshAxes, dcn: bool) -> MeshAxes:
    return mesh if dcn or mesh.slices == 1 else mesh.in_one_slice()


def _axes(
    instruction: Instruction, groups: Groups | None, mesh: MeshAxes, dcn: bool
) -> tuple[tuple[str, ...], bool, int]:
    """Mesh axes of the groups, whether the groups are whole axes, and devices in a group."""
    local = _local(mesh, dcn)
    if groups is None:
        return (), False, 1
    if instruction.opcode.startswith("collective-permute"):
        return (*_permuted(groups, local), 2)
    axes, whole = axes_of_groups(groups, local)
    return axes, whole, len(groups[0])


Groups = tuple[tuple[int, ...], ...]


@functools.lru_cache(maxsize=512)
def read_groups(text: str, devices: int) -> Groups | None:
    """Groups of devices (numbers in the order of the mesh) from the text of `replica_groups`, in any of its forms.

    `{{0,1},{2,3}}`, `{}` for one group of all, `[2,4]<=[4,2]T(1,0)` for a reshaped, transposed count, and
    `mesh['a'=4,'b'=2] {'a'}` for axes, or parts `'a':(2)2` of axes, of a mesh. None where it is none of these.
    """
    if text in ("", "{}"):
        return (tuple(range(devices)),)
    if text.startswith("{"):
        return _nested(text)
    if text.startswith("mesh["):
        return _read_mesh_groups(text)
    match = re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if match is None:
        return None
    shape, sizes = _numbers(match[1]), _numbers(match[2])
    count = np.arange(math.prod(sizes)).reshape(sizes)
    if match[3]:
        count = count.transpose(_numbers(match[3]))
    return _tuples(count.reshape(shape[0], -1))


def _read_mesh_groups(text: str) -> Groups | None:
    head, _, chosen = text.partition("]")
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", head)}
    if "device_ids" in chosen or not sizes:
        return None
    # Split the axes of which only a part is named, so that each named part is a dimension of its own.
    parts: dict[str, list[tuple[int, int]]] = {name: [] for name in sizes}
    for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", chosen):
        parts[name].append((int(before), int(size)) if size else (1, sizes[name]))
    dims: list[int] = []
    grouped: list[int] = []
    for name, size in sizes.items():
        at = 1
        for before, width in sorted(parts[name]):
            dims.append(before // at)
            grouped.append(len(dims))
            dims.append(width)
            at = before * width
        dims.append(size // at)
    count = np.arange(math.prod(sizes.values())).reshape(dims)
    others = [dimension for dimension in range(len(dims)) if dimension not in grouped]
    width = math.prod(dims[dimension] for dimension in grouped)
    return _tuples(count.transpose(others + grouped).reshape(-1, width))


def _read_target(text: str, mesh: MeshAxes) -> Groups | None:
    """Groups across slices: numbers are 100000 times a slice, from 1, plus a device in it."""
    per_slice = mesh.devices // mesh.slices
    if text.startswith("{{"):
        return tuple(
            tuple((number // 100_000 - 1) * per_slice + number % 100_000 for number in group) for group in _nested(text)
        )
    match = re.fullmatch(r"\{([\d,]+)\}x\{(\d+):(\d+)\}", text)
    if match is None:
        return None
    slices = [number - 1 for number in _numbers(match[1])]
    # Each device of a slice with its equals in the others: the rest of the exchange was done inside of the slice.
    return tuple(
        tuple(number * per_slice + device for number in slices) for device in range(int(match[2]), int(match[3]) + 1)
    )


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _nested(text: str) -> Groups:
    return tuple(tuple(_numbers(group)) for group in re.findall(r"\{([\d, ]+)\}", text))


def _tuples(rows: np.ndarray) -> Groups:
    return tuple(tuple(int(number) for number in row) for row in rows)


@functools.lru_cache(maxsize=512)
def axes_of_groups(groups: Groups, mesh: MeshAxes) -> tuple[tuple[str, ...], bool]:
    """The fewest mesh axes that the groups span, and whether each group is all devices along them."""
    wanted = {frozenset(group) for group in groups}
    live = [(name, size) for name, size in mesh.sizes if size > 1]
    for count in range(len(live) + 1):
        for chosen in itertools.combinations([name for name, _ in live], count):
            along = _along(chosen, mesh)
            if {frozenset(group) for group in along} == wanted:
                return chosen, True
            home = {device: number for number, group in enumerate(along) for device in group}
            if all(len({home.get(device) for device in group}) == 1 for group in wanted):
                return chosen, False
    return (), False


def _along(axes: Sequence[str], mesh: MeshAxes) -> Groups:
    names = [name for name, _ in mesh.sizes]
    count = np.arange(mesh.devices).reshape([size for _, size in mesh.sizes])
    others = [number for number, name in enumerate(names) if name not in axes]
    inner = [number for number, name in enumerate(names) if name in axes]
    width = math.prod(mesh.sizes[number][1] for number in inner)
    return _tuples(count.transpose(others + inner).reshape(-1, width))


def _permuted(pairs: Groups, mesh: MeshAxes) -> tuple[tuple[str, ...], bool]:
    """Axes along which a permute's senders and receivers differ."""
    names = [name for name, _ in mesh.sizes]
    sizes = [size for _, size in mesh.sizes]
    changed = set()
    for source, target in pairs:
        here, there = np.unravel_index(source, sizes), np.unravel_index(target, sizes)
        changed |= {name for name, a, b in zip(names, here, there, strict=True) if a != b}
    return tuple(name for name in names if name in changed), True
