"""Cases of dense sparse MLA: decode at contexts where reading all of it wins, and prefill chunks of 2,048 tokens."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.case import OURS, Built, Case
from glm52_jax.cache.row_formats import LanePaddedFormat, RowFormat, TensorScaledFormat, UnquantizedFormat, empty_stack
from glm52_jax.kernels import Target
from glm52_jax.kernels.lib.selection import Selection
from glm52_jax.kernels.sparse_mla.reference import sparse_mla_reference

HEADS, WIDTH, RANK, PAGE, LAYERS = 64, 576, 512, 64, 4
SCALE = 256**-0.5
BF16 = jnp.dtype(jnp.bfloat16)
FORMATS: dict[str, RowFormat] = {
    "bf16": UnquantizedFormat(WIDTH, BF16, 128),
    "fp8": LanePaddedFormat(RANK, WIDTH - RANK, BF16, lanes=128),
    "fp8 tensor": TensorScaledFormat(WIDTH, (1.0,) * LAYERS, 128),
}
LEAST_ROW_BYTES = {"bf16": 2 * WIDTH, "fp8": 656, "fp8 tensor": WIDTH}


def cases() -> list[Case]:
    """Sequences full to the stated context; every query attends to all that is before it, the most that there is."""
    found = [
        _case(batch, tokens, context, "bf16", form)
        for batch in (1, 8, 64)
        for tokens in (1, 6)
        for context in (2048, 32768)
        for form in (OURS, "xla")
    ]
    found += [_case(8, 1, 32768, rows, OURS) for rows in ("fp8", "fp8 tensor")]
    found += [_case(1, 2048, context, "bf16", OURS) for context in (2048, 32768, 131072)]
    return [*found, _case(1, 2048, 2048, "bf16", "xla")]


def _case(batch: int, tokens: int, context: int, rows: str, form: str) -> Case:
    kind = f"decode b{batch} x{tokens}" if tokens < 64 else f"prefill {tokens // 1024}k"
    pairs = batch * (tokens * (context - tokens) + tokens * (tokens + 1) // 2)
    size = batch * tokens * HEADS * (WIDTH + RANK) * 2
    return Case(
        op="dense_mla",
        shape=f"{kind} {context // 1024}k {rows}",
        form=form,
        build=functools.partial(_build, batch, tokens, context, rows, form),
        hbm_bytes=batch * context * LEAST_ROW_BYTES[rows] + size,
        flops=2 * pairs * HEADS * (WIDTH + RANK),
        # The schedule of a long chunk is walked through block by block, which takes minutes.
        measured=tokens < 64 or context <= 2048,
    )


def _build(batch: int, tokens: int, context: int, rows: str, form: str, chip: str) -> Built:
    pages = batch * context // PAGE
    stack = jax.eval_shape(functools.partial(empty_stack, FORMATS[rows], (LAYERS, pages, PAGE)))
    arguments = (
        jax.ShapeDtypeStruct((batch, tokens, HEADS, WIDTH), BF16),
        stack,
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.ShapeDtypeStruct((batch, context // PAGE), jnp.int32),
        jax.ShapeDtypeStruct((batch, tokens), jnp.int32),
        jax.ShapeDtypeStruct((batch, tokens, context), jnp.bool_),
    )
    if form != OURS:

        def plain(q: Any, latent: Any, layer: Any, table: Any, positions: Any, mask: Any) -> Any:
            return sparse_mla_reference(q, latent, layer, table, positions, Selection(mask=mask), SCALE, RANK)

        return Built(plain, arguments)
    from glm52_jax.kernels.sparse_mla.dense import dense_mla

    target = Target.of(f"tpu:{chip}")
    assert target is not None
    run = functools.partial(dense_mla, scale=SCALE, kv_lora_rank=RANK, target=target)
    return Built(run, arguments, scalars=_scalars(target, batch, tokens, context))


def _scalars(target: Target, batch: int, tokens: int, context: int) -> dict[tuple[str, int], Any]:
    """What the kernel is told: layer, lengths, random pages, and which blocks are live, a bit each."""
    from glm52_jax.kernels.sparse_mla.dense_tile_sizes import choose

    sizes = choose(target, tokens, HEADS, batch, context)
    tiles, blocks = -(-tokens // sizes.queries), -(-context // sizes.keys)
    live = np.zeros((batch, tiles, -(-blocks // 32) * 32), np.int64)
    for tile in range(tiles):
        last = context - tokens + min(tokens, (tile + 1) * sizes.queries) - 1
        live[:, tile, : last // sizes.keys + 1] = 1
    words = (live.reshape(-1, 32) << np.arange(32)).sum(-1).astype(np.uint32).view(np.int32)
    table = np.random.default_rng(0).permutation(batch * context // PAGE).astype(np.int32)
    given = [np.ones(1, np.int32), np.full(batch, context, np.int32), table, words]
    return {("dense_mla", number): array for number, array in enumerate(given)}
