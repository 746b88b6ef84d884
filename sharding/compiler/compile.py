"""Compiles a function for TPUs that are not there, and says what the compiler made of it.

The compiler's own memory plan and its program are read from what it dumps, so that a program that does not fit is
described as fully as one that does.
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from sharding.compiler.hlo.collectives import MeshAxes
from sharding.compiler.hlo.memory import Memory, MemoryBuffer, MemoryPlan, read_assignment
from sharding.compiler.hlo.program import Program, analyse
from sharding.compiler.hlo.text import Module
from sharding.compiler.topology import PlacedMesh


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A function compiled for a slice.

    Attributes:
        placed: mesh and topology that it is for.
        fits: whether the compiler could place it in HBM, and in what the chip's figures say there is.
        refusal: its message where it could not.
        lower_seconds, compile_seconds: on this machine.
        memory: bytes on one device.
        arguments: each array argument on one device, in order.
        temporaries: places in the working memory, the largest first, under the name of what makes them.
        program: what it does in one call on one device.
        text: the scheduled HLO module.
        executable: JAX's compiled object; None where the compiler could not place it.
    """

    placed: PlacedMesh
    fits: bool
    refusal: str | None
    lower_seconds: float
    compile_seconds: float
    memory: Memory
    arguments: tuple[MemoryBuffer, ...]
    temporaries: tuple[MemoryBuffer, ...]
    program: Program
    text: str = dataclasses.field(repr=False)
    executable: Any = dataclasses.field(repr=False, default=None)


def compile_for(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    placed: PlacedMesh,
    *,
    donate: Sequence[int] = (),
    names: Sequence[str] | None = None,
    shares: Mapping[str, Sequence[float]] | None = None,
    copies_from: int = 2**20,
    options: Mapping[str, Any] | None = None,
) -> CompiledStep:
    """Compiles a function for the slice of a mesh.

    Args:
        function: jitted or not; what its own `jax.jit` says of donation does not count here.
        arguments: trees of `jax.ShapeDtypeStruct` with shardings over `placed.mesh`. Unused ones are kept, since they
            are in memory all the same.
        donate: numbers of the arguments whose memory the outputs may take over.
        names: of the arguments, for `CompiledStep.arguments`; a path inside of a tree is added.
        shares: part of the executions that each branch of a conditional gets, by a text in its `op_name`; others are
            charged with their dearest branch.
        copies_from: bytes from which on `program.copies` lists a copy.
        options: of the compiler, `{"xla_tpu_...": value}`.

    Raises:
        jax.errors.JaxRuntimeError: the compiler refuses for another reason than HBM.
    """
    mesh, topology = placed.mesh, placed.topology
    plain = getattr(function, "__wrapped__", function) if isinstance(function, jax.stages.Wrapped) else function
    start = time.perf_counter()
    with jax.set_mesh(mesh):
        lowered = jax.jit(plain, donate_argnums=tuple(donate), keep_unused=True).lower(*arguments)
    lowered_at = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="compile_for_") as folder:
        executable: Any = None
        refusal = None
        try:
            with jax.set_mesh(mesh):
                executable = lowered.compile(compiler_options={**(options or {}), "xla_dump_to": folder})
        except jax.errors.JaxRuntimeError as error:
            refusal = str(error)
            if not out_of_hbm(refusal):
                raise
        compiled_at = time.perf_counter()
        text, assignment = _dumped(Path(folder), executable, refusal)
    module = Module.parse(text)
    plan = read_assignment(assignment, module, topology.chip.hbm_bytes)
    memory = plan.memory
    if executable is not None:
        memory = dataclasses.replace(memory, code=executable.memory_analysis().generated_code_size_in_bytes)
    elif (said := out_of_hbm(refusal or "")) is not None:
        memory = dataclasses.replace(memory, limit=min(said[1], memory.limit))
    # The chip's figure is what the compiler says, rounded to hundredths of a GiB.
    fits = executable is not None and memory.total <= memory.limit + 0.005 * 2**30
    axes = MeshAxes(tuple(mesh.shape.items()), topology.slices)
    return CompiledStep(
        placed=placed,
        fits=fits,
        refusal=refusal,
        lower_seconds=lowered_at - start,
        compile_seconds=compiled_at - lowered_at,
        memory=memory,
        arguments=tuple(_named(plan, module, list(_labels(arguments, names)))),
        temporaries=plan.temporaries,
        program=analyse(module, axes, torus=placed.torus, shares=shares, copies_from=copies_from),
        text=text,
        executable=executable,
    )


_REFUSALS = (
    re.compile(r"total memory required for HLO temporaries \(([\d.]+\w*)\) exceeds available HBM \(([\d.]+\w*)\)"),
    re.compile(r"memory space hbm\. Used ([\d.]+\w*) of ([\d.]+\w*) hbm"),
)


def out_of_hbm(message: str) -> tuple[int, int] | None:
    """Bytes needed and offered, from the compiler's refusal of a program that does not fit; None for other messages.

    It rounds to hundredths of a unit (G: GiB). What it calls temporaries are arguments and outputs too.
    """
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    for pattern in _REFUSALS:
        if match := pattern.search(message):
            return _size(match[1]), _size(match[2])
    return None


def _size(text: str) -> int:
    number, unit = re.fullmatch(r"([\d.]+)(\w*)", text).groups()  # type: ignore[union-attr]
    return round(float(number) * 2 ** (10 * ("KMGTPEZY".find(unit[:1]) + 1 if unit else 0)))


def _dumped(folder: Path, executable: Any, refusal: str | None) -> tuple[str, str]:
    """Text of the module and of its buffer assignment."""
    assignments = sorted(
        folder.glob("*.after_optimizations-buffer-assignment.txt"), key=lambda path: path.stat().st_size
    )
    if not assignments:
        # Only a program from a persistent cache is not dumped, and that one is not for here.
        raise RuntimeError(
            f"the TPU compiler wrote no buffer assignment{f' ({refusal})' if refusal else ''}: "
            "turn off jax_compilation_cache_dir"
        )
    prefix = assignments[-1].name.removesuffix("-buffer-assignment.txt")
    text = executable.as_text() if executable is not None else (folder / f"{prefix}.txt").read_text()
    return text, assignments[-1].read_text()


def _labels(arguments: Sequence[Any], names: Sequence[str] | None) -> Iterator[str]:
    for number, argument in enumerate(arguments):
        name = names[number] if names else f"argument {number}"
        for path, _ in jax.tree_util.tree_flatten_with_path(argument)[0]:
            yield name + jax.tree_util.keystr(path)


def _named(plan: MemoryPlan, module: Module, labels: list[str]) -> Iterator[MemoryBuffer]:
    """The arguments under the caller's names, or the compiler's where it added some of its own."""
    for number, buffer in sorted(plan.arguments.items()):
        own = module.entry.parameters[number].op_name or f"parameter {number}"
        same = len(labels) == len(plan.arguments)
        yield dataclasses.replace(buffer, label=labels[number] if same else own)
