"""Dense projections of GLM-5.2, whole and as the part that one of 16 devices has."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels.case import OURS, Built, Case
from glm52_jax.kernels.block_matmul.api import block_matmul
from glm52_jax.params.quantization import FLOAT8, BlockQuantized

LAYERS = 3
_BLOCK = 128

SHAPES: dict[str, tuple[int, ...]] = {
    "q_a": (2048, 6144),
    "q_b": (64 * 256, 2048),
    "q_b / 16": (4 * 256, 2048),
    "kv_a": (576, 6144),
    "o": (6144, 64 * 256),
    "o / 16": (6144, 4 * 256),
    "dense gate_up / 16": (2, 768, 6144),
    "shared gate_up": (2, 2048, 6144),
}


def _build(rows: int, shape: tuple[int, ...], kind: str, backend: str, chip: str) -> Built:
    weight: Any = jax.ShapeDtypeStruct((LAYERS, *shape), jnp.bfloat16 if kind == "bf16" else FLOAT8)
    if kind != "bf16":
        grid = (-(-shape[-2] // _BLOCK), -(-shape[-1] // _BLOCK))
        scales: Any = jax.ShapeDtypeStruct((LAYERS, *shape[:-2], *grid), jnp.float32)
        weight = BlockQuantized(weight, scales, logical_shape=shape[-2:])
    backend = f"tpu:{chip}" if backend == "tpu" else backend
    x = jax.ShapeDtypeStruct((rows, shape[-1]), jnp.bfloat16)
    return Built(
        functools.partial(block_matmul, backend=backend),
        (x, weight, jax.ShapeDtypeStruct((), jnp.int32)),
        scalars={("block_matmul", 0): [1]},
    )


def _cases(name: str, rows: int, kind: str) -> list[Case]:
    shape = SHAPES[name]
    size, inner = math.prod(shape), shape[-1]
    least = size * (2 if kind == "bf16" else 1 + 4 / _BLOCK**2) + 2 * rows * (inner + size // inner)
    return [
        Case(
            "block_matmul",
            f"{name}, {rows} rows, {kind}",
            form,
            functools.partial(_build, rows, shape, kind, backend),
            least,
            2 * rows * size,
        )
        for form, backend in ((OURS, "tpu"), ("xla", "reference"))
    ]


def cases() -> list[Case]:
    """Decode with 64 rows in FP8 for all of them; one row, prefill and bfloat16 for the largest ones."""
    decode = [case for name in SHAPES for case in _cases(name, 64, "fp8")]
    other = [(name, rows, kind) for name in ("q_a", "o") for rows, kind in ((1, "fp8"), (4096, "fp8"), (64, "bf16"))]
    return decode + [case for one in other for case in _cases(*one)]
