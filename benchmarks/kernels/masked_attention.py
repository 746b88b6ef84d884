"""Cases of masked attention: short prefill, and its gradient; JAX's own flash attention beside it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.case import OURS, Built, Case
from glm52_jax.kernels import Target
from glm52_jax.kernels.masked_attention.api import masked_attention

WIDTH = 256
SCALE = WIDTH**-0.5
BF16 = jnp.dtype(jnp.bfloat16)
FLASH, SPLASH = "jax flash_attention", "jax splash_attention"
GRADIENT = "glm52 gradient"


def cases() -> list[Case]:
    """A chunk that is all of its context, causal: all heads, and those of one device of eight."""
    found = [
        _case(tokens, heads, form)
        for tokens, heads in ((2048, 64), (2048, 8), (4096, 8))
        for form in (OURS, FLASH, SPLASH, "xla")
    ]
    return [*found, _case(2048, 8, GRADIENT)]


def _case(tokens: int, heads: int, form: str) -> Case:
    pairs = tokens * (tokens + 1) // 2 * heads
    gradient = form == GRADIENT
    operands = tokens * heads * WIDTH * 2
    return Case(
        op="masked_attention",
        shape=f"{'gradient' if gradient else 'prefill'} {tokens // 1024}k h{heads}",
        form=form,
        build=functools.partial(_build, tokens, heads, form),
        hbm_bytes=operands * (11 if gradient else 4) + tokens * tokens // 2,
        # Forward two products of a head's width; the gradient seven more, of which two compute the scores again.
        flops=2 * pairs * WIDTH * (9 if gradient else 2),
        measured=tokens == 2048 and heads == 8,
    )


def _build(tokens: int, heads: int, form: str, chip: str) -> Built:
    x = jax.ShapeDtypeStruct((1, tokens, heads, WIDTH), BF16)
    if form in (FLASH, SPLASH):
        by_head = jax.ShapeDtypeStruct((1, heads, tokens, WIDTH), BF16)
        return Built(_flash if form == FLASH else functools.partial(_splash, tokens, heads), (by_head,) * 3)
    positions = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    mask = jax.ShapeDtypeStruct((1, tokens, tokens), jnp.bool_)
    backend = "reference" if form == "xla" else f"tpu:{chip}"
    run = functools.partial(masked_attention, scale=SCALE, backend=backend)
    if form == GRADIENT:

        def loss(q: Any, k: Any, v: Any, positions: Any, mask: Any) -> Any:
            return jnp.sum(run(q, k, v, positions, mask).astype(jnp.float32) ** 2)

        return Built(jax.grad(loss, (0, 1, 2)), (x, x, x, positions, mask), scalars=_scalars(chip, tokens, heads))
    return Built(run, (x, x, x, positions, mask), scalars=_scalars(chip, tokens, heads))


def _flash(q: Any, k: Any, v: Any) -> Any:
    from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention

    sizes = BlockSizes(block_q=512, block_k_major=512, block_k=512, block_b=1)
    return flash_attention(q, k, v, causal=True, sm_scale=SCALE, block_sizes=sizes)


def _splash(tokens: int, heads: int, q: Any, k: Any, v: Any) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        CausalMask,
        MultiHeadMask,
        make_splash_mha_single_device,
    )

    mask = MultiHeadMask([CausalMask((tokens, tokens)) for _ in range(heads)])
    return jax.vmap(make_splash_mha_single_device(mask))(q * SCALE, k, v)


def _scalars(chip: str, tokens: int, heads: int) -> dict[tuple[str, int], Any]:
    """Which blocks are live under a causal mask, by tile of queries and, for the gradient of keys, the other way."""
    from glm52_jax.kernels.masked_attention.tile_sizes import choose

    target = Target.of(f"tpu:{chip}")
    assert target is not None
    given: dict[tuple[str, int], Any] = {}
    for name, backward in (("masked_attention", False), ("masked_attention_dq", True), ("masked_attention_dkv", True)):
        sizes = choose(target, tokens, tokens, heads, backward=backward)
        last = (np.arange(tokens // sizes.queries) + 1) * sizes.queries - 1
        live = np.arange(tokens // sizes.keys) * sizes.keys <= last[:, None]
        live = live.T if name.endswith("dkv") else live
        counts = live.sum(1)
        order = np.argsort(~live, axis=1, kind="stable")
        places = np.minimum(np.arange(order.shape[1]), np.maximum(counts - 1, 0)[:, None])
        given[name, 0] = np.take_along_axis(order, places, 1).astype(np.int32).reshape(-1)
        given[name, 1] = counts.astype(np.int32)
    return given
