"""What every Pallas kernel here is called with. Imported by kernels for TPUs only."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from glm52_jax.kernels import Target

LANES = 128
"""Width of a vector register: the last dimension of an array in tiles."""

SUBLANES = 8
"""Its height for values of four bytes; a tile has twice as many rows of two bytes, four times as many of one."""

_VMEM_SHARE = 0.9
"""Of a core's vector memory; the compiler keeps the rest for itself."""


def vmem_limit(target: Target) -> int:
    """Bytes of vector memory that a kernel may use."""
    return int(target.chip.vmem_bytes * _VMEM_SHARE)


def simulated(target: Target) -> bool:
    """Whether copies, semaphores and cores are simulated, and races between them looked for."""
    return target.interpret in ("races", "eager")


def call(
    kernel: Callable[..., None],
    *,
    name: str,
    target: Target,
    cost: pl.CostEstimate,
    out_shape: Any,
    semantics: Sequence[Literal["parallel", "arbitrary"]],
    aliases: Mapping[int, int] | None = None,
    **grid: Any,
) -> Callable[..., Any]:
    """`pl.pallas_call` as all kernels of the package want it.

    Bounds checks are off: they cost more than twice a row copy itself, and whoever calls has made its indices safe.

    Args:
        name: what profiles and plans call it.
        cost: operations and bytes; without it nobody who reads the compiled program would count them.
        semantics: of the grid's dimensions; the cores of a chip share the parallel ones.
        aliases: operands (counted with those of scalar prefetch) whose buffers are results.
        grid: `grid_spec`, or `grid`, `in_specs`, `out_specs`, `scratch_shapes`.
    """
    interpret: Any = bool(target.interpret)
    if simulated(target):
        interpret = pltpu.InterpretParams(
            detect_races=True,
            # A core waits for another one in a thread of its own.
            num_cores_or_threads=min(target.chip.cores_per_device, os.cpu_count() or 1),
            dma_execution_mode="eager" if target.interpret == "eager" else "on_wait",
        )
    return jax.named_call(
        pl.pallas_call(
            kernel,
            out_shape=out_shape,
            name=name,
            interpret=interpret,
            cost_estimate=cost,
            input_output_aliases=dict(aliases or {}),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=tuple(semantics),
                vmem_limit_bytes=vmem_limit(target),
                disable_bounds_checks=True,
            ),
            **grid,
        ),
        name=name,
    )
