"""Cases of the cache write: latent rows and index keys of decode steps and of a prefill chunk."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.case import OURS, Built, Case
from glm52_jax.cache.row_formats import LanePaddedFormat, RowFormat, UnquantizedFormat, empty_stack
from glm52_jax.kernels.cache_write.api import write_rows
from glm52_jax.kernels.cache_write.new_rows import IndexKeyTransform, LatentRowTransform
from glm52_jax.kernels.lib.layers import Rotary

BF16 = jnp.dtype(jnp.bfloat16)
LATENT: dict[str, RowFormat] = {
    "bf16": UnquantizedFormat(576, BF16, 128),
    "fp8": LanePaddedFormat(512, 64, BF16, lanes=128),
}
PAGES = 128  # of a sequence
KEYS = UnquantizedFormat(128, BF16, 128)
SHAPES = {(batch, tokens): f"decode b{batch} x{tokens}" for batch in (1, 8, 64) for tokens in (1, 6)}
SHAPES[1, 2048] = "prefill 2k"


def cases() -> list[Case]:
    """Decode steps of 1, 8 and 64 sequences with 1 and 6 tokens each, and a chunk of 2,048 tokens of one."""
    found = []
    for (batch, tokens), shape in SHAPES.items():
        for what in ("latent bf16", "latent fp8", "keys bf16"):
            form = KEYS if what.startswith("keys") else LATENT[what.split()[1]]
            width, size = (128, 4) if form is KEYS else (576, 2)
            # Values are read; whole tiles of eight rows are written, and the first and last of a run read before.
            rows = batch * (tokens if tokens > 8 else 8)
            read = batch * min(16, 8 * (1 + (tokens > 8)))
            moved = batch * tokens * width * size + (rows + read) * form.row_bytes
            for name, backend in ((OURS, "tpu"), ("xla", "reference")):
                build = functools.partial(_build, batch, tokens, form, backend)
                found.append(
                    Case(
                        op="cache_write",
                        shape=f"{what} {shape}",
                        form=name,
                        build=build,
                        hbm_bytes=moved,
                        flops=0,
                        measured=tokens != 6,
                    )
                )
    return found


def _build(batch: int, tokens: int, form: RowFormat, backend: str, chip: str) -> Built:
    keys = form is KEYS
    pages = batch * PAGES
    stack = jax.eval_shape(functools.partial(empty_stack, form, (4, pages, 64)))
    positions = jax.ShapeDtypeStruct((batch, tokens), jnp.int32)
    rotary = jax.eval_shape(lambda p: Rotary.at(p, 64, 8e6), positions)
    width = 128 if keys else 576
    values = jax.ShapeDtypeStruct((batch, tokens, width), jnp.float32 if keys else BF16)
    norm = jax.ShapeDtypeStruct((128 if keys else 512,), BF16)
    transform = (
        IndexKeyTransform(norm, norm, rotary, 1e-6, True) if keys else LatentRowTransform(norm, rotary, 1e-5, True)
    )
    resolved = f"tpu:{chip}" if backend == "tpu" else backend

    def run(
        stack: Any, layer: jax.Array, values: jax.Array, table: jax.Array, positions: jax.Array, transform: Any
    ) -> Any:
        return write_rows(stack, layer, values, table, positions, transform=transform, backend=resolved)

    table = jax.ShapeDtypeStruct((batch, pages // batch), jnp.int32)
    arguments = (stack, jax.ShapeDtypeStruct((), jnp.int32), values, table, positions, transform)
    return Built(run, arguments, donate=(0,), scalars=_scalars(batch, tokens, chip))


def _scalars(batch: int, tokens: int, chip: str) -> dict[tuple[str, int], Any]:
    """What the kernel is told of its tiles: one sequence after another, each run at a random place of a page."""
    from glm52_jax.kernels.cache_write.tile_sizes import choose
    from glm52_jax.kernels.cache_write.tpu import tile_rows
    from sharding.compiler.chips import CHIPS

    generator = np.random.default_rng(0)
    first = generator.integers(0, 64 if tokens < 64 else 1, batch) * 1
    positions = (first[:, None] + np.arange(tokens)).astype(np.int32)
    table = generator.permutation(batch * PAGES).reshape(batch, PAGES).astype(np.int32)
    found = tile_rows(jnp.asarray(table), jnp.asarray(positions), 64, choose(CHIPS[chip], batch, tokens, 64))
    return {("cache_write", 1 + number): np.asarray(array) for number, array in enumerate(found)}
