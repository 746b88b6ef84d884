"""Routed experts and grouped matmuls: 256 experts on 64 chips, and on 32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.megablox import gmm

from benchmarks.kernels.case import OURS, Built, Case
from glm52_jax.kernels import Target
from glm52_jax.kernels.experts import tile_sizes
from glm52_jax.kernels.experts.api import routed_experts
from glm52_jax.params.quantization import FLOAT8, BlockQuantized
from sharding.compiler import chips

EMBED, WIDTH, K, ROUTED, LAYERS = 6144, 2048, 8, 256, 3
_BLOCK = 128
_SEED = 7  # with it 8 tokens choose one of the first 4 experts, as many as they do on average

Operands = tuple[Any, ...]


def _stacks(experts: int, kind: str) -> tuple[Any, Any]:
    shapes = (LAYERS, experts, 2, WIDTH, EMBED), (LAYERS, experts, EMBED, WIDTH)
    if kind == "bf16":
        gate_up, down = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
        return gate_up, down
    codes = FLOAT8 if kind == "fp8" else jnp.int8

    def in_blocks(shape: tuple[int, ...]) -> Any:
        grid = (*shape[:-2], shape[-2] // _BLOCK, shape[-1] // _BLOCK)
        arrays: dict[str, Any] = {
            "codes": jax.ShapeDtypeStruct(shape, codes),
            "scales": jax.ShapeDtypeStruct(grid, jnp.float32),
        }
        return BlockQuantized(**arrays, logical_shape=shape[-2:])

    return in_blocks(shapes[0]), in_blocks(shapes[1])


def _rows(tokens: int, experts: int, k: int) -> np.ndarray:
    """Rows of each expert on one device when every token chooses `k` at random: `K` of all, or of those here."""
    generator = np.random.default_rng(_SEED)
    chosen = np.stack([generator.permutation(ROUTED if k == K else experts)[:k] for _ in range(tokens)])
    return np.bincount(chosen[chosen < experts], minlength=experts)


def _tokens_of(tokens: int, counts: np.ndarray, size: int) -> np.ndarray:
    """The tokens of the rows, an expert's from a whole tile of so many rows on."""
    generator = np.random.default_rng(0)
    held = [np.sort(generator.permutation(tokens)[:count]) for count in counts]
    return np.concatenate([np.pad(rows, (0, -len(rows) % size)) for rows in held])


def _few_scalars(counts: np.ndarray, steps: int) -> dict[tuple[str, int], Any]:
    """Operands of the kernel for few rows: two lengths of its grid, the layer, and the experts in use."""
    used = np.flatnonzero(counts) if counts.any() else np.zeros(1, int)
    active = np.pad(used, (0, len(counts) - len(used)), mode="edge")
    operands = [len(used)], [steps], [1], active, [len(used)]
    return {("experts_few", place): np.asarray(values) for place, values in enumerate(operands)}


def _grouped_scalars(tokens: int, counts: np.ndarray, sizes: tile_sizes.GroupedTileSizes) -> dict[tuple[str, int], Any]:
    """The same for the kernels for many rows; the first window stands for all."""
    experts = len(counts)
    used = np.flatnonzero(counts) if counts.any() else np.zeros(1, int)
    tiles = -(-counts // sizes.rows)
    first = (np.cumsum(tiles) - tiles)[used]
    end = min(sizes.window, int(tiles.sum()))
    groups = [np.pad(part, (0, experts - len(used)), mode="edge") for part in (used, first, counts[used])]
    token_of = _tokens_of(tokens, counts, sizes.rows)
    hidden = [[int((first < end).sum())], [1], [0, 0, end, 0], *groups]
    outputs = [[len(used)], [1], [len(used), int(tiles.sum())], *groups, token_of]
    return {
        (name, place): np.asarray(values)
        for name, operands in (("experts_hidden", hidden), ("experts_outputs", outputs))
        for place, values in enumerate(operands)
    }


def _build(tokens: int, experts: int, k: int, kind: str, backend: str, chip: str) -> Built:
    x = jax.ShapeDtypeStruct((tokens, EMBED), jnp.bfloat16)
    chosen = (jax.ShapeDtypeStruct((tokens, k), dtype) for dtype in (jnp.int32, jnp.float32))
    weights = _stacks(experts, kind)
    scalars: dict[tuple[str, int], Any] = {}
    if backend == "tpu":
        counts, target = _rows(tokens, experts, k), Target(chips.chip(chip))
        room = tile_sizes.grouped(target, x.dtype, *weights)
        room = room.within(tile_sizes.most_tiles(tokens, k, experts, room.rows))
        scalars = _few_scalars(counts, tile_sizes.few(target, weights[0])[2]) | _grouped_scalars(tokens, counts, room)
        backend = f"tpu:{chip}"
    function = functools.partial(routed_experts, backend=backend)
    return Built(function, (x, *chosen, *weights, jax.ShapeDtypeStruct((), jnp.int32)), scalars=scalars)


def _experts(tokens: int, experts: int, kind: str, k: int = K) -> list[Case]:
    counts = _rows(tokens, experts, k)
    weights = 3 * WIDTH * EMBED * (2 if kind == "bf16" else 1 + 4 / _BLOCK**2)
    # The weights of the experts in use, each token's row and its float32 result.
    least = int((counts > 0).sum()) * weights + tokens * EMBED * (2 + 4)
    flops = 6 * int(counts.sum()) * WIDTH * EMBED
    shape = f"{tokens} tokens, {k} of {ROUTED if k == K else experts}, {experts} experts here, {kind}"
    forms = ((OURS, "tpu"), ("xla", "reference"))
    return [
        Case("experts", shape, form, functools.partial(_build, tokens, experts, k, kind, backend), least, flops)
        for form, backend in forms
    ]


def _gmm_groups(rows: int, experts: int) -> np.ndarray:
    return np.bincount(np.random.default_rng(0).integers(0, experts, rows), minlength=experts)


def _gmm_scalars(rows: int, experts: int, tile: int) -> dict[tuple[str, int], Any]:
    """Operands of megablox's kernel: the length of its grid, first rows of the groups, group and tile of each visit."""
    counts = _gmm_groups(rows, experts)
    ends = np.cumsum(counts)
    visits = [
        (group, number)
        for group, (end, count) in enumerate(zip(ends, counts, strict=True))
        for number in range((end - count) // tile, -(-end // tile) if count else (end - count) // tile)
    ]
    groups, numbers = np.asarray(visits).T
    operands = [len(visits)], np.pad(ends, (1, 0)), groups, numbers, [0]
    return {("gmm", place): np.asarray(values) for place, values in enumerate(operands)}


def _peer(rows: int, experts: int, out: int, kind: str, chip: str) -> Built:
    """The public forms of a bare grouped matmul, given their weights as they want them: one layer's, `[in, out]`."""
    del chip
    operands = (
        jax.ShapeDtypeStruct((rows, EMBED), jnp.bfloat16),
        jax.ShapeDtypeStruct((experts, EMBED, out), jnp.bfloat16),
        jax.ShapeDtypeStruct((experts,), jnp.int32),
    )
    tile = min(rows, 128)

    def megablox(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
        return gmm(x, weight, sizes, preferred_element_type=jnp.float32, tiling=(tile, 1024, 512))

    def ragged(x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(x, weight, sizes, preferred_element_type=jnp.float32)

    functions: dict[str, Callable[..., jax.Array]] = {"megablox": megablox, "ragged_dot": ragged}
    return Built(functions[kind], operands, scalars=_gmm_scalars(rows, experts, tile))


def _bare(rows: int, experts: int, out: int) -> list[Case]:
    used = int((_gmm_groups(rows, experts) > 0).sum())
    least = 2 * used * EMBED * out + rows * (2 * EMBED + 4 * out)
    shape = f"grouped matmul {experts} x {EMBED} x {out}, {rows} rows"
    return [
        Case("experts", shape, form, functools.partial(_peer, rows, experts, out, form), least, 2 * rows * EMBED * out)
        for form in ("megablox", "ragged_dot")
    ]


def cases() -> list[Case]:
    """8 to 4,096 tokens that reach a device, with a sixty-fourth or a thirty-second part of the experts on it.

    Then one expert a token of 32: their gate and up are the `[6144, 4096]` matrices that public grouped matmuls are
    measured with.
    """
    shapes = [(8, 4), (64, 4), (64, 8), (4096, 4), (4096, 8)]
    ours = [case for tokens, experts in shapes for kind in ("bf16", "fp8") for case in _experts(tokens, experts, kind)]
    ours += _experts(64, 32, "bf16", 1) + _experts(2048, 32, "bf16", 1)
    return ours + _bare(64, 32, 4096) + _bare(2048, 32, 4096)
