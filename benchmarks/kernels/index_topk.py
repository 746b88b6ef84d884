"""Cases of scores and selection together: decode steps, fused and as two kernels one after the other."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.case import OURS, Built, Case
from benchmarks.kernels.topk import LENGTHS, K, scalars
from glm52_jax.cache.row_formats import LanePaddedFormat, RowFormat, UnquantizedFormat, empty_stack
from glm52_jax.kernels.index_topk.api import index_topk
from glm52_jax.kernels.index_topk.reference import index_topk_separate
from glm52_jax.kernels.index_topk.tile_sizes import cost

HEADS, DIM, PAGE, INDEXERS = 32, 128, 64, 21
_MOST_BYTES = 8 << 30
BF16 = jnp.dtype(jnp.bfloat16)
FORMATS: dict[str, RowFormat] = {"bf16": UnquantizedFormat(DIM, BF16, 128), "fp8": LanePaddedFormat(DIM, 0, BF16, DIM)}


def cases() -> list[Case]:
    """1, 8 and 64 sequences with 1 and 6 tokens at 32K, 128K and 1M; one of them with keys in FP8."""
    found = []
    for name in ("32k", "128k", "1m"):
        for batch in (1, 8, 64):
            for tokens in (1, 6):
                dims = (batch, tokens, LENGTHS[name])
                shape = f"decode b{batch} x{tokens} {name}"
                # The cache of 64 sequences of 1M is larger than a device's memory.
                if batch * LENGTHS[name] * DIM * 2 * INDEXERS > 64 << 30:
                    continue
                few = tokens == 1 or (batch, name) == (8, "128k")
                found.append(_case(shape, OURS, dims, "bf16", index_topk, measured=few))
                separate = (batch, tokens) == (8, 1) or batch == 1
                found.append(_case(shape, "two kernels", dims, "bf16", index_topk_separate, measured=few and separate))
    dims = (8, 1, LENGTHS["128k"])
    found.append(_case("decode b8 x1 128k fp8", OURS, dims, "fp8", index_topk, measured=True))
    return found


def _case(shape: str, form: str, dims: tuple[int, int, int], keys: str, run: Any, *, measured: bool) -> Case:
    batch, tokens, length = dims
    least = cost(batch, tokens, HEADS, DIM, length, K, key_bytes=FORMATS[keys].row_bytes, query_bytes=2)
    return Case(
        op="index_topk",
        shape=shape,
        form=form,
        build=functools.partial(_build, dims, keys, run),
        hbm_bytes=least.bytes_accessed,
        flops=least.flops,
        measured=measured,
    )


def _build(dims: tuple[int, int, int], keys: str, run: Any, chip: str) -> Built:
    batch, tokens, length = dims
    pages = batch * length // PAGE
    # So many layers as have room on every chip, where any have.
    layers = max(2, min(INDEXERS, _MOST_BYTES // (pages * PAGE * FORMATS[keys].row_bytes)))
    stack = jax.eval_shape(functools.partial(empty_stack, FORMATS[keys], (layers, pages, PAGE)))
    arguments = (
        jax.ShapeDtypeStruct((batch, tokens, HEADS, DIM), jnp.float32),
        jax.ShapeDtypeStruct((batch, tokens, HEADS), jnp.float32),
        stack,
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.ShapeDtypeStruct((batch, length // PAGE), jnp.int32),
        jax.ShapeDtypeStruct((batch, tokens), jnp.int32),
    )
    function = functools.partial(run, k=K, backend=f"tpu:{chip}")
    table = np.random.default_rng(0).permutation(pages).astype(np.int32)
    newest = np.full(batch, length - 1, np.int32)
    known = {("index_topk", 0): table, ("index_topk", 1): newest, **scalars("index_topk"), **scalars("topk")}
    known |= {("index_scores", 0): table, ("index_scores", 1): newest, ("index_scores", 2): newest}
    return Built(function, arguments, scalars=known)
