"""Cases of the selection: scores of decode steps and of a prefill chunk, beside XLA's full sort."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from benchmarks.kernels.case import OURS, Built, Case
from benchmarks.schedule.machine import VECTOR_TO_SCALAR
from glm52_jax.kernels.topk.api import kth_best, topk, topk_mask
from glm52_jax.kernels.topk.tile_sizes import cost, threshold_cost

K = 2048
LENGTHS = {"8k": 1 << 13, "32k": 1 << 15, "128k": 1 << 17, "1m": 1 << 20}


def cases() -> list[Case]:
    """Lists of decode steps of 1, 8 and 64 sequences with 1 and 6 tokens and of a chunk of 2,048; masks; a last one."""
    shapes = {
        f"decode b{batch} x{tokens} {name}": (batch, tokens, length)
        for name, length in LENGTHS.items()
        for batch in (1, 8, 64)
        for tokens in (1, 6)
        if name != "8k" or (batch, tokens) == (8, 1)
    }
    shapes["prefill 2k 128k"] = (1, 2048, 1 << 17)
    found = []
    for shape, dims in shapes.items():
        rows = dims[0] * dims[1]
        moved = cost(rows, dims[2], K).bytes_accessed
        ours = dims[1] == 1 or dims[0] == 1
        found.append(_case(shape, OURS, functools.partial(_lists, dims, "tpu"), moved, measured=ours))
        # Each sort of 32K scores or more takes minutes to compile.
        found.append(
            _case(shape, "lax.top_k", functools.partial(_lists, dims, "reference"), moved, measured="8k" in shape)
        )
    chunk = (1, 2048, 1 << 17)
    # A mask is a byte a score, and the scores are read again for it.
    moved = 2048 * (1 << 17) * (2 * 4 + 1)
    found.append(_case("mask prefill 2k 128k", OURS, functools.partial(_mask, chunk), moved))
    for devices in (4, 64):
        moved = threshold_cost(8, devices * K, 2).bytes_accessed
        found.append(_case(f"last of {devices} x 2k b8", OURS, functools.partial(_last, (8, devices * K)), moved))
    return found


def _case(shape: str, form: str, build, moved: float, *, measured: bool = True) -> Case:
    return Case(op="topk", shape=shape, form=form, build=build, hbm_bytes=moved, flops=0, measured=measured)


def _backend(name: str, chip: str) -> str:
    return f"tpu:{chip}" if name == "tpu" else name


def scalars(name: str) -> dict:
    """What a kernel's scalar core reads of its vectors: no ties to cut, and something to list in every register."""
    return {(name, VECTOR_TO_SCALAR): [1]}


def _lists(dims: tuple[int, ...], name: str, chip: str) -> Built:
    backend = _backend(name, chip)
    # As the scores' kernel lays them out: XLA would put sequences, not the six tokens of one, side by side in a tile.
    dims = dims if dims[1] == 1 else (1, dims[0] * dims[1], dims[2])
    scores = jax.ShapeDtypeStruct(dims, jnp.float32)
    return Built(lambda scores: topk(scores, K, backend=backend), (scores,), scalars=scalars("topk"))


def _mask(dims: tuple[int, ...], chip: str) -> Built:
    # As the scores' kernel lays them out: XLA would put sequences, not the six tokens of one, side by side in a tile.
    dims = dims if dims[1] == 1 else (1, dims[0] * dims[1], dims[2])
    scores = jax.ShapeDtypeStruct(dims, jnp.float32)
    return Built(lambda scores: topk_mask(scores, K, backend=f"tpu:{chip}"), (scores,), scalars=scalars("topk_last"))


def _last(dims: tuple[int, ...], chip: str) -> Built:
    arguments = jax.ShapeDtypeStruct(dims, jnp.float32), jax.ShapeDtypeStruct(dims, jnp.int32)
    run = functools.partial(kth_best, k=K, backend=f"tpu:{chip}")
    return Built(run, arguments, scalars=scalars("topk_last"))
