"""What the kernels are fed: GLM-5.2's widths, few heads and pages, and everything that has ever gone wrong: padding,
pages in any order, slots that were never written, ties, queries that attend to nothing, experts that nobody chose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glm52_jax.cache.cache_format import CACHE_FORMATS
from glm52_jax.cache.row_formats import PackedStack, RowStack, encode_rows, parts_of
from glm52_jax.config import BUILT_IN, FULL, SPARSE
from glm52_jax.kernels.lib.selection import Selection
from glm52_jax.kernels.router.rule import RoutingRule
from glm52_jax.params.quantization import BlockQuantized, quantize_blocks
from infer.steps import StepProvider

_LAYERS, _BATCH, _CAPACITY, _PAGE = 2, 2, 192, 64
_LENGTHS = (150, 97)
CONFIG = dataclasses.replace(
    BUILT_IN["glm-5.2"],
    num_hidden_layers=_LAYERS,
    indexer_types=(FULL,) * _LAYERS,
    mlp_layer_types=(SPARSE,) * _LAYERS,
    num_nextn_predict_layers=0,
)
_LAYER = np.int32(1)


def _random(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def _normal(generator: np.random.Generator, *shape: int) -> np.ndarray:
    return generator.standard_normal(shape).astype(np.float32)


def _table(generator: np.random.Generator) -> np.ndarray:
    pages = _CAPACITY // _PAGE
    return generator.permutation(_BATCH * pages).reshape(_BATCH, pages).astype(np.int32)


def _stack(kv: str, dtype: Any, kind: str) -> RowStack:
    """Shapes of a stack of rows as generation makes it for these devices."""
    provider = StepProvider(
        CONFIG,
        jnp.dtype(dtype),
        batch=_BATCH,
        capacity=_CAPACITY,
        chunk=1,
        page_size=_PAGE,
        cache_format=CACHE_FORMATS[kv],
    )
    return getattr(jax.eval_shape(provider.own_state).cache, kind)


def _filled(stack: RowStack, generator: np.random.Generator, table: np.ndarray, fill: float) -> Any:
    """A stack whose layer `_LAYER` has rows up to each sequence's length; all else is `fill`."""
    width = CONFIG.latent_width if _is_latent(stack) else CONFIG.index_head_dim
    new = encode_rows(stack, jnp.asarray(_normal(generator, _BATCH, _CAPACITY, width)), 1)
    pools: dict[str, Any] = {}
    for name, part in parts_of(stack).items():
        pool, rows = np.full(part.shape, fill, np.float32).astype(part.dtype), np.asarray(new[name])
        for row, length in enumerate(_LENGTHS):
            for position in range(length):
                pool[1, table[row, position // _PAGE], position % _PAGE] = rows[row, position]
        pools[name] = pool
    return dataclasses.replace(stack, parts=pools) if isinstance(stack, PackedStack) else pools["values"]


def _is_latent(stack: RowStack) -> bool:
    return sum(part.shape[-1] for part in parts_of(stack).values()) >= CONFIG.latent_width


def _pair(stack: RowStack, seed: int, table: np.ndarray) -> tuple[Any, Any]:
    """The same rows twice: with NaN and with zeros where nothing was written."""
    dirty, clean = (_filled(stack, _random(seed), table, fill) for fill in (np.nan, 0.0))
    return dirty, clean


def _last_positions(tokens: int) -> np.ndarray:
    """Queries at the end of each sequence; the first of the first one is padding where there are several."""
    positions = np.array(_LENGTHS, np.int32)[:, None] - tokens + np.arange(tokens, dtype=np.int32)
    if tokens > 1:
        positions[0, 0] = -1
    return positions


def _spoil(array: np.ndarray, padding: np.ndarray, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """The array with NaN and with zeros in the rows of padding."""
    dirty, clean = array.copy(), array.copy()
    dirty[padding], clean[padding] = np.nan, 0
    return dirty.astype(dtype), clean.astype(dtype)


def _only(real: np.ndarray) -> Callable[[Any], Any]:
    """Of a result, the rows of queries that are no padding, whose own rows mean nothing."""
    return lambda result: jax.tree.map(lambda array: np.asarray(array)[real], result)


def _index_scores(tokens: int, kv: str) -> Callable[[str], KernelCase]:
    def make(name: str) -> KernelCase:
        generator, heads = _random(tokens), 8
        table, positions = _table(generator), _last_positions(tokens)
        keys = _pair(_stack(kv, jnp.bfloat16, "index_keys"), 1, table)
        shape = (_BATCH, tokens, heads)
        queries = _spoil(_normal(generator, *shape, CONFIG.index_head_dim), positions < 0, jnp.bfloat16)
        weights = _spoil(_normal(generator, *shape), positions < 0, np.float32)
        arrays = [(queries[i], weights[i], keys[i], _LAYER, table, positions) for i in range(2)]
        return KernelCase(name, {}, *arrays, bound=2e-5)

    return make


def _sparse_mla(tokens: int, kv: str, form: str) -> Callable[[str], KernelCase]:
    def make(name: str) -> KernelCase:
        generator, heads = _random(tokens), 8
        table, positions = _table(generator), _last_positions(tokens)
        latent = _pair(_stack(kv, jnp.bfloat16, "latent"), 2, table)
        mask = generator.random((_BATCH, tokens, _CAPACITY)) < 0.4
        mask &= np.arange(_CAPACITY) <= positions[..., None]
        if tokens > 1:
            mask[1, 0] = False  # a query that attends to nothing
        selection = Selection(mask=jnp.asarray(mask))
        if form == "indices":
            # The order is free, and -1 may come first.
            selection = Selection(indices=jnp.flip(selection.sorted_indices(128), -1))
        shape = (_BATCH, tokens, heads, CONFIG.latent_width)
        queries = _spoil(_normal(generator, *shape), positions < 0, jnp.bfloat16)
        static = {"scale": CONFIG.qk_head_dim**-0.5, "kv_lora_rank": CONFIG.kv_lora_rank}
        arrays = [(queries[i], latent[i], _LAYER, table, positions, selection) for i in range(2)]
        return KernelCase(name, static, *arrays, bound=2e-2, compared=_only(positions >= 0))

    return make


def _masked_attention(tokens: int) -> Callable[[str], KernelCase]:
    def make(name: str) -> KernelCase:
        generator, heads = _random(3), 4
        positions = _last_positions(tokens)
        mask = generator.random((_BATCH, tokens, _CAPACITY)) < 0.5
        mask &= np.arange(_CAPACITY) <= positions[..., None]
        mask[1, 2] = False
        queries = _spoil(_normal(generator, _BATCH, tokens, heads, CONFIG.qk_head_dim), positions < 0, jnp.bfloat16)
        keys = _normal(generator, _BATCH, _CAPACITY, heads, CONFIG.qk_head_dim).astype(jnp.bfloat16)
        values = _normal(generator, _BATCH, _CAPACITY, heads, CONFIG.v_head_dim).astype(jnp.bfloat16)
        arrays = [(queries[i], keys, values, positions, mask) for i in range(2)]
        return KernelCase(
            name, {"scale": CONFIG.qk_head_dim**-0.5}, *arrays, bound=2e-2, compared=_only(positions >= 0)
        )

    return make


def _scores(kind: str) -> np.ndarray:
    scores = _normal(_random(4), 5, 1024)
    if kind == "tied":
        scores = np.round(scores * 2) / 2 + np.float32(0)
    if kind == "causal":  # fewer than `k` in the first rows, and none in the very first
        scores[np.arange(1024) >= np.array([0, 1, 63, 500, 1024])[:, None]] = -np.inf
    return scores


def _by_position(chosen: Any) -> Any:
    """Lists in order, with their scores where they have some: the order is free."""
    lists, *scores = jax.tree.leaves(chosen)
    order = np.argsort(lists, axis=-1, kind="stable")
    return [np.take_along_axis(np.asarray(part), order, -1) for part in (lists, *scores)]


def _topk(kind: str) -> Callable[[str], KernelCase]:
    return lambda name: KernelCase(name, {"k": 100}, (_scores(kind),), (_scores(kind),), compared=_by_position)


def _kth_best(name: str) -> KernelCase:
    scores = _scores("tied")
    positions = _random(4).permuted(np.broadcast_to(np.arange(1024, dtype=np.int32), scores.shape), axis=-1)
    return KernelCase(name, {"k": 100}, (scores, positions), (scores, positions))


def _compact(name: str) -> KernelCase:
    lists = np.where(_random(4).random((5, 256)) < 0.3, np.arange(256, dtype=np.int32) * 5, -1)
    return KernelCase(name, {}, (lists,), (lists,), compared=_by_position)


def _index_topk(tokens: int) -> Callable[[str], KernelCase]:
    """Queries, keys and weights are whole numbers: scores are exact in any order of adding, and many are tied."""

    def make(name: str) -> KernelCase:
        generator, heads = _random(tokens), 8
        table, positions = _table(generator), _last_positions(tokens)
        keys = _pair(_stack("plain", jnp.bfloat16, "index_keys"), 1, table)
        keys = [jax.tree.map(jnp.round, stack) for stack in keys]
        shape = (_BATCH, tokens, heads)
        queries = _spoil(np.round(_normal(generator, *shape, CONFIG.index_head_dim)), positions < 0, jnp.bfloat16)
        weights = _spoil(np.round(_normal(generator, *shape)), positions < 0, np.float32)
        arrays = [(queries[i], weights[i], keys[i], _LAYER, table, positions) for i in range(2)]
        return KernelCase(name, {"k": 40}, arrays[0], arrays[1], compared=_by_position)

    return make


def _choose_experts(name: str) -> KernelCase:
    generator, tokens, count = _random(7), 24, 64
    logits, bias = _normal(generator, tokens, count), 0.1 * _normal(generator, count)
    logits[3] = 0.5  # ties go to the lower number
    real = np.arange(tokens) % 5 > 0
    spoiled = _spoil(logits, ~real, np.float32)
    rule = RoutingRule(k=8, scale=2.5)
    return KernelCase(name, {"rule": rule}, *[(logits, bias, real) for logits in spoiled], bound=1e-5)


def _block_matmul(rows: int) -> Callable[[str], KernelCase]:
    def make(name: str) -> KernelCase:
        generator = _random(rows)
        weight = _blocks(0.1 * _normal(generator, _LAYERS, 192, 512))  # the last block of rows is cut
        x = _normal(generator, rows, 512).astype(jnp.bfloat16)
        return KernelCase(name, {"dtype": jnp.float32}, (x, weight, _LAYER), (x, weight, _LAYER), bound=1e-2)

    return make


def _topk_mask(kind: str) -> Callable[[str], KernelCase]:
    return lambda name: dataclasses.replace(_topk(kind)(name), compared=lambda chosen: chosen)


def _write_rows(tokens: int, kv: str) -> Callable[[str], KernelCase]:
    def make(name: str) -> KernelCase:
        generator = _random(tokens)
        table = _table(generator)
        stack, _ = _pair(_stack(kv, jnp.bfloat16, "latent"), 5, table)
        positions = np.full((_BATCH, tokens), -1, np.int32)
        for row, (column, first) in enumerate([(0, 61), (tokens // 3, 3)]):
            count = tokens - column
            positions[row, column:] = first + np.arange(count)
        rows = _spoil(_normal(generator, _BATCH, tokens, CONFIG.latent_width), positions < 0, jnp.bfloat16)
        # Slots that were never written hold NaN before and after, in both.
        dirty, clean = ((stack, _LAYER, rows[i], table, positions) for i in range(2))
        return KernelCase(
            name, {}, dirty, clean, compared=lambda result: {n: np.asarray(p) for n, p in parts_of(result).items()}
        )

    return make


def _routed_experts(kind: str) -> Callable[[str], KernelCase]:
    def make(name: str) -> KernelCase:
        generator, tokens, count, embed, inner, k = _random(6), 24, 8, 256, 128, 2
        gate_up = 0.1 * _normal(generator, _LAYERS, count, 2, inner, embed)
        down = 0.1 * _normal(generator, _LAYERS, count, embed, inner)
        experts = np.stack([np.arange(tokens) % 3, 3 + np.arange(tokens) % 2], -1).astype(np.int32)
        if kind == "one expert":
            experts[:] = (6, 2)
        experts[5], experts[-3:] = -1, -1
        padding = experts[:, 0] < 0
        gates = np.where(experts >= 0, generator.random((tokens, k)), 0).astype(np.float32)
        x = _spoil(_normal(generator, tokens, embed), padding, jnp.bfloat16)
        stacks = [_blocks(w) if kind == "FP8" else w.astype(jnp.bfloat16) for w in (gate_up, down)]
        return KernelCase(name, {}, *[(x[i], experts, gates, *stacks, _LAYER) for i in range(2)], bound=2e-2)

    return make


def _blocks(weights: np.ndarray) -> BlockQuantized:
    pairs = [quantize_blocks(matrix, (128, 128)) for matrix in weights.reshape(-1, *weights.shape[-2:])]
    codes, scales = (jnp.asarray(np.stack(part)) for part in zip(*pairs, strict=True))
    scales = scales.reshape(*weights.shape[:-2], *scales.shape[-2:])
    return BlockQuantized(codes.reshape(weights.shape), scales, logical_shape=weights.shape[-2:], block=(128, 128))


CASES: dict[str, dict[str, Callable[[str], KernelCase]]] = {
    "index_scores": {
        "1 query": _index_scores(1, "plain"),
        "20 queries, FP8 keys": _index_scores(20, "fp8"),
    },
    "topk": {kind: _topk(kind) for kind in ("tied", "causal")},
    "topk_indices": {kind: _topk(kind) for kind in ("tied", "causal")},
    "topk_mask": {kind: _topk_mask(kind) for kind in ("tied", "causal")},
    "kth_best": {"tied": _kth_best},
    "compact": {"a third left": _compact},
    "index_topk": {"1 query": _index_topk(1), "20 queries": _index_topk(20)},
    "sparse_mla": {
        "1 query": _sparse_mla(1, "plain", "indices"),
        "4 queries, FP8 latents": _sparse_mla(4, "fp8", "indices"),
        "mask": _sparse_mla(4, "plain", "mask"),
    },
    "masked_attention": {"40 queries": _masked_attention(40)},
    "write_rows": {
        "1 token": _write_rows(1, "plain"),
        "a run over pages": _write_rows(99, "plain"),
        "FP8, 3 tokens": _write_rows(3, "fp8"),
    },
    "choose_experts": {"64 experts": _choose_experts},
    "block_matmul": {"1 row": _block_matmul(1), "100 rows": _block_matmul(100)},
    "routed_experts": {kind: _routed_experts(kind) for kind in ("few experts", "one expert", "FP8")},
}
"""Makers of the cases of each operation, by its function's name and the case's."""


@dataclasses.dataclass(frozen=True)
class KernelCase:
    """Inputs of an operation, and how near its result must be.

    Attributes:
        name: what is special about them.
        static: arguments by name that are no arrays.
        arrays: in order, with NaN where nothing may be read.
        clean: the same with zeros there.
        bound: largest difference, as a part of the largest value of the reference; 0 for equal.
        view: of a result, what counts.
    """

    name: str
    static: dict[str, Any]
    arrays: tuple[Any, ...]
    clean: tuple[Any, ...]
    bound: float = 0.0
    compared: Callable[[Any], Any] = lambda result: result
