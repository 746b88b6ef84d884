"""Scores and selection in one kernel beside one after the other, on whole numbers, whose scores are exact."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm52_jax.cache.row_formats import (
    GroupScaledFormat,
    LanePaddedFormat,
    RowFormat,
    UnquantizedFormat,
    empty_stack,
    encode_rows,
    parts_of,
)
from glm52_jax.kernels import Target
from glm52_jax.kernels.index_scores.api import index_scores
from glm52_jax.kernels.index_topk import tpu
from glm52_jax.kernels.index_topk.api import index_topk
from glm52_jax.kernels.index_topk.tile_sizes import IndexTopkTileSizes, choose, cost, vmem_bytes
from glm52_jax.kernels.lib.pallas import vmem_limit
from glm52_jax.kernels.topk import tile_sizes as selection
from glm52_jax.kernels.topk.api import topk
from sharding.compiler.chips import CHIPS
from tests.kernels.compiling import compiled
from tests.kernels.quickly import quickly

DIM, HEADS = 10, 3
BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
FORMATS: dict[str, RowFormat] = {
    "float32": UnquantizedFormat(DIM, F32),
    "bf16 lanes": UnquantizedFormat(DIM, BF16, 16),
    "fp8": GroupScaledFormat(DIM, 0, BF16, DIM),
    "fp8 lanes": LanePaddedFormat(DIM, 0, BF16, DIM, lanes=16),
}


def setting(form: RowFormat, lengths: list[int], tokens: int, page: int, pages: int) -> list:
    """The last tokens of sequences of those lengths, -1 before their start; poison in what was never written."""
    generator = np.random.default_rng(len(lengths))
    batch, count = len(lengths), len(lengths) * pages + 2
    table = generator.permutation(count)[: batch * pages].reshape(batch, pages).astype(np.int32)
    stack = empty_stack(form, (2, count, page))
    rows = generator.integers(-3, 4, (2, count, page, DIM))
    rows[..., 0] = 3  # the largest of each row, by which FP8 scales it
    written = encode_rows(stack, jnp.asarray(rows, jnp.float32), 1)
    seen = np.zeros((2, count, page), bool)
    for row, length in enumerate(lengths):
        place = np.arange(length)
        seen[1, table[row, place // page], place % page] = True
    poison = jnp.asarray(generator.choice([np.nan, np.inf], (2, count, page, 1)))
    parts = {name: jnp.where(seen[..., None], part, poison.astype(part.dtype)) for name, part in written.items()}
    stack = parts["values"] if isinstance(stack, jax.Array) else stack.replace(parts=parts)
    queries = generator.integers(-3, 4, (batch, tokens, HEADS, DIM)).astype(np.float32)
    weights = generator.integers(-2, 4, (batch, tokens, HEADS)).astype(np.float32)
    positions = np.maximum(np.array(lengths)[:, None] - tokens + np.arange(tokens), -1).astype(np.int32)
    return [queries, weights, stack, 1, table, positions]


def check(arguments: list, k: int, run) -> None:
    indices, values = (np.asarray(part) for part in jax.jit(functools.partial(run, k=k))(*arguments))
    scores = jax.jit(functools.partial(index_scores, backend="reference"))(*arguments)
    places, best = (np.asarray(part) for part in topk(scores, k, backend="reference"))
    order = np.argsort(np.where(places < 0, np.iinfo(np.int32).max, places), axis=-1, kind="stable")
    np.testing.assert_array_equal(indices, np.take_along_axis(places, order, -1))
    np.testing.assert_array_equal(values, np.take_along_axis(best, order, -1))


interpreted = functools.partial(index_topk, backend="interpret")


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("name", "tokens", "page", "lengths"),
    quickly(
        [
            ("float32", 1, 16, [37, 0, 160]),
            ("bf16 lanes", 6, 3, [5, 30]),
            ("fp8", 2, 64, [100]),
            ("fp8 lanes", 1, 1, [99, 7]),
        ],
        ("float32", 1, 16, [37, 0, 160]),
        ("bf16 lanes", 6, 3, [5, 30]),
    ),
)
def test_equals_one_after_the_other(name: str, tokens: int, page: int, lengths: list[int]) -> None:
    """Formats, tokens that do not fill a register, sequences that are empty or shorter than the selection."""
    check(setting(FORMATS[name], lengths, tokens, page, -(-max(lengths) // page)), 20, interpreted)


@pytest.mark.slow
def test_several_blocks() -> None:
    """Of which short sequences need fewer; the next sequence's first block is read while the best are selected."""
    page, pages, k = 64, 150, 40
    sizes = selection.choose(2, page * pages, k, interpret=True, chunk=4096)
    blocks = IndexTopkTileSizes(sizes, keys=1024, part=512, cores=2)
    run = functools.partial(tpu.index_topk, backend="interpret:v5p", target=Target.of("interpret:v5p"), blocks=blocks)
    check(setting(FORMATS["bf16 lanes"], [9600, 0, 4096, 4097, 100], 2, page, pages), k, run)


@pytest.mark.slow
def test_many_tokens_are_selected_for_by_two_kernels() -> None:
    check(setting(FORMATS["bf16 lanes"], [40], 9, 16, 3), 7, interpreted)


@pytest.mark.slow
def test_no_races(racing: str) -> None:
    check(setting(FORMATS["fp8 lanes"], [200, 3], 1, 16, 13), 20, functools.partial(index_topk, backend=racing))


def test_the_rule() -> None:
    """Fused: few tokens, a sequence for each core, and what fits into vector memory."""
    for chip in CHIPS.values():
        target = Target(chip)
        for batch in (1, 2, 8, 64):
            for tokens in (1, 2, 6, 8, 9):
                for capacity in (64, 5000, 1 << 15, 1 << 17, 1 << 20):
                    blocks = choose(target, batch, tokens, capacity, 64, 256, 2048)
                    if tokens > 8 or batch < chip.cores_per_device:
                        assert blocks is None
                    elif capacity < 1 << 20 or tokens <= 2:
                        assert blocks is not None
                    if blocks:
                        assert blocks.block % blocks.keys == blocks.keys % blocks.part == blocks.keys % 64 == 0
                        rows = blocks.selection.rows
                        assert vmem_bytes(rows, capacity, blocks.block, 256, 2048) <= vmem_limit(target)


def test_cost() -> None:
    """What the scores cost, and a comparison of each."""
    estimate = cost(2, 4, 32, 128, 256, 16, key_bytes=256, query_bytes=2)
    assert estimate.flops == 2 * 4 * 256 * (32 * (2 * 128 + 3) + 1)
    assert estimate.bytes_accessed == 2 * 256 * 256 + 2 * 4 * (32 * (128 * 2 + 4) + 16 * 8)


@pytest.mark.parametrize(
    ("chip", "batch", "tokens", "capacity", "name"),
    [
        ("v5e", 8, 6, 1 << 15, "bf16"),
        ("v5p", 8, 1, 1 << 17, "bf16"),
        ("v6e", 3, 1, 1 << 17, "fp8"),
        ("tpu7x", 1, 1, 1 << 20, "bf16"),
    ],
)
def test_compiles_without_copies(chip: str, batch: int, tokens: int, capacity: int, name: str) -> None:
    form = {"bf16": UnquantizedFormat(128, BF16), "fp8": LanePaddedFormat(128, 0, BF16, 128)}[name]
    pages = batch * capacity // 64
    stack = jax.eval_shape(functools.partial(empty_stack, form, (3, pages, 64)))
    arguments = (
        jax.ShapeDtypeStruct((batch, tokens, 32, 128), jnp.float32),
        jax.ShapeDtypeStruct((batch, tokens, 32), jnp.float32),
        stack,
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.ShapeDtypeStruct((batch, capacity // 64), jnp.int32),
        jax.ShapeDtypeStruct((batch, tokens), jnp.int32),
    )
    step = compiled(functools.partial(index_topk, k=2048, backend=f"tpu:{chip}"), arguments, chip)
    assert [kernel.name for kernel in step.program.kernels] == ["index_topk"]
    layer = min(part.size for part in parts_of(stack).values()) // 3
    assert all(copy.bytes < layer / 4 for copy in step.program.copies)
    assert step.memory.temporaries < 6 << 20
