"""Cases of the kernels that work on the tokens of all sequences together, at numbers that the engine may choose.

A step has its batch times its tokens of them, and experts get what devices send them: any number. Rows are padded to
what units take, up to 16 and 256 at a time for products, 8 and 64 for experts, 128 for the router: so both sides of
each bound are here. They are compiled only.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels.case import OURS, Built, Case
from glm52_jax.kernels.block_matmul.api import block_matmul
from glm52_jax.kernels.experts.api import routed_experts
from glm52_jax.kernels.router.api import choose_experts
from glm52_jax.kernels.router.rule import RoutingRule
from glm52_jax.params.quantization import FLOAT8, BlockQuantized
from sharding.compiler.chips import CHIPS

EMBED, ROUTED, HERE, K, WIDTH, OUT = 6144, 256, 4, 8, 512, 576
LAYERS, BLOCK = 2, 128
COUNTS = (1, 2, 5, 7, 8, 9, 15, 16, 17, 63, 64, 65, 72, 100, 127, 128, 129, 255, 256, 257, 960, 1000, 4096, 4100)
SHORT = (1, 7, 9, 17, 64, 65, 129, 257, 1000)


def cases() -> list[Case]:
    """Plain weights and those in codes; the short grid has each chip in turn."""
    found, turn, chips = [], 0, list(CHIPS)
    for count in COUNTS:
        for kind in ("bf16", "fp8"):
            short = (chips[turn % len(chips)],) if count in SHORT else ()
            turn += len(short)
            build = functools.partial(_build, count, kind)
            found.append(Case("tokens", f"{count} {kind}", OURS, build, 0, 0, measured=False, short=short))
    return found


def _stack(kind: str, *shape: int) -> Any:
    if kind == "bf16":
        return jax.ShapeDtypeStruct((LAYERS, *shape), jnp.bfloat16)
    grid = (*shape[:-2], -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK))
    scales: Any = jax.ShapeDtypeStruct((LAYERS, *grid), jnp.float32)
    codes: Any = jax.ShapeDtypeStruct((LAYERS, *shape), FLOAT8)
    return BlockQuantized(codes, scales, logical_shape=shape[-2:])


def _build(count: int, kind: str, chip: str) -> Built:
    make = jax.ShapeDtypeStruct
    arguments = (
        make((count, EMBED), jnp.bfloat16),
        make((count, ROUTED), jnp.float32),
        make((ROUTED,), jnp.float32),
        make((count,), jnp.bool_),
        _stack(kind, HERE, 2, WIDTH, EMBED),
        _stack(kind, HERE, EMBED, WIDTH),
        _stack(kind, OUT, EMBED),
        make((), jnp.int32),
    )
    return Built(functools.partial(_run, f"tpu:{chip}"), arguments)


def _run(backend: str, x: Any, logits: Any, bias: Any, real: Any, gate_up: Any, down: Any, weight: Any, n: Any) -> Any:
    experts, gates, _ = choose_experts(logits, bias, real, RoutingRule(K, scale=2.5), backend=backend)
    own = jnp.where(experts < HERE, experts, -1)
    return (
        routed_experts(x, own, gates, gate_up, down, n, backend=backend),
        block_matmul(x, weight, n, backend=backend),
    )
