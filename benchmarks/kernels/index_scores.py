"""Cases of the index scores: decode steps at full contexts, and a prefill chunk at the end of one."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.case import OURS, Built, Case
from glm52_jax.cache.row_formats import LanePaddedFormat, RowFormat, UnquantizedFormat, empty_stack
from glm52_jax.kernels.index_scores.api import index_scores

HEADS, DIM, PAGE, INDEXERS = 32, 128, 64, 2
BF16 = jnp.dtype(jnp.bfloat16)
FORMATS: dict[str, RowFormat] = {"bf16": UnquantizedFormat(DIM, BF16), "fp8": LanePaddedFormat(DIM, 0, BF16, DIM)}
CHIPS = ("v5e", "v5p", "v6e", "tpu7x")  # the keys of 64 sequences of 1M are 16 GiB, more than the first has
CONTEXTS = {"32k": 2**15, "128k": 2**17, "1m": 2**20}


def cases() -> list[Case]:
    """Decode steps of 1, 8 and 64 sequences with 1 and 6 tokens each, and a chunk of 2,048 tokens of one."""
    shapes = [(batch, tokens, context) for batch in (1, 8, 64) for tokens in (1, 6) for context in CONTEXTS]
    found = []
    for batch, tokens, context in [*shapes, (1, 2048, "128k")]:
        name = _words(batch, tokens, context)
        large = batch * CONTEXTS[context] > 2**21  # simulated for minutes, and like the smaller ones
        for keys, form, backend in (("bf16", OURS, "tpu"), ("fp8", OURS, "tpu"), ("bf16", "xla", "reference")):
            if keys == "fp8" and (batch, context) not in ((1, "128k"), (8, "32k")):
                continue
            if backend == "reference" and large:
                continue
            capacity = CONTEXTS[context]
            scores = batch * tokens * capacity
            read = batch * capacity * FORMATS[keys].row_bytes + batch * tokens * HEADS * (DIM * 2 + 4)
            found.append(
                Case(
                    op="index_scores",
                    shape=f"{keys} {name}",
                    form=form,
                    build=functools.partial(_build, batch, tokens, capacity, keys, backend),
                    hbm_bytes=read + 4 * scores,
                    flops=2 * scores * HEADS * DIM,
                    copies=batch * capacity // PAGE if backend == "tpu" else 0,
                    chips=("v5p", "v6e", "tpu7x") if batch * capacity > 2**25 else CHIPS,
                    measured=not large,
                )
            )
    return found


def sweep() -> list[tuple[str, Case]]:
    """Our form with other blocks: few tokens by keys of a chunk, of a product and chunks, many by tokens too."""
    few = [(8, 8, keys, part, chunks) for keys, part, chunks in ((2048, 2048, 2), (2048, 2048, 4), (4096, 2048, 2))]
    many = [(128, together, keys, keys, 1) for together, keys in ((8, 2048), (16, 2048), (32, 1024), (64, 1024))]
    by_shape = {case.shape: case for case in cases() if case.form == OURS}
    found = []
    for batch, tokens, context, choices in ((8, 1, "32k", few), (8, 6, "32k", few), (1, 2048, "128k", many)):
        case = by_shape[f"bf16 {_words(batch, tokens, context)}"]
        for sizes in choices:
            build = functools.partial(_build, batch, tokens, CONTEXTS[context], "bf16", "tpu", sizes=sizes)
            found.append((" ".join(map(str, sizes)), dataclasses.replace(case, build=build)))
    return found


def _words(batch: int, tokens: int, context: str) -> str:
    return f"prefill 2k {context}" if tokens > 6 else f"decode b{batch} x{tokens} {context}"


def _build(
    batch: int,
    tokens: int,
    capacity: int,
    keys: str,
    backend: str,
    chip: str,
    sizes: tuple[int, int, int, int, int] | None = None,
) -> Built:
    pages = batch * capacity // PAGE
    stack = jax.eval_shape(
        functools.partial(empty_stack, FORMATS[keys], (1 if pages > 2**19 else INDEXERS, pages, PAGE))
    )
    arguments = (
        jax.ShapeDtypeStruct((batch, tokens, HEADS, DIM), jnp.float32),
        jax.ShapeDtypeStruct((batch, tokens, HEADS), jnp.float32),
        stack,
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.ShapeDtypeStruct((batch, capacity // PAGE), jnp.int32),
        jax.ShapeDtypeStruct((batch, tokens), jnp.int32),
    )
    if backend != "tpu":
        return Built(functools.partial(index_scores, backend=backend), arguments)
    from glm52_jax.kernels import Target
    from glm52_jax.kernels.index_scores.tile_sizes import choose
    from glm52_jax.kernels.index_scores.tpu import index_scores as on_tpu
    from sharding.compiler.chips import chip as chip_of

    target = Target(chip_of(chip))
    blocks = choose(target, tokens, capacity, PAGE, sizes)
    scalars = _scalars(batch, tokens, capacity, blocks)
    return Built(functools.partial(on_tpu, target=target, blocks=blocks), arguments, scalars=scalars)


def _scalars(batch: int, tokens: int, capacity: int, blocks: Any) -> dict[tuple[str, int], Any]:
    """What the kernel is told: pages in random order, and queries that are the last tokens of full sequences."""
    positions = np.full((batch, -(-tokens // blocks.tokens) * blocks.tokens), -1, np.int32)
    positions[:, :tokens] = capacity - tokens + np.arange(tokens)
    newest = positions.reshape(-1, blocks.groups, blocks.together).max(2)
    table = np.random.default_rng(0).permutation(batch * capacity // PAGE).astype(np.int32)
    found = (table, newest.max(1), newest.reshape(-1))
    return {("index_scores", number): array for number, array in enumerate(found)}
