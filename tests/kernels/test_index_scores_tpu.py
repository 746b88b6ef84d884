"""The index scores for TPUs beside the plain ones: formats, shapes, what is not seen, interpreted and compiled."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from glm52_jax.kernels.index_scores.score_block import query_rows, score_block, token_groups, weight_rows
from glm52_jax.kernels.index_scores.tile_sizes import IndexScoresTileSizes, choose, cost
from glm52_jax.kernels.index_scores.tpu import index_scores as index_scores_tpu
from sharding.compiler.chips import CHIPS
from tests.kernels.compiling import compiled
from tests.kernels.quickly import quickly

DIM = 10
BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
FORMATS: dict[str, RowFormat] = {
    "float32": UnquantizedFormat(DIM, F32),
    "bf16": UnquantizedFormat(DIM, BF16),
    "lanes": UnquantizedFormat(DIM, BF16, 16),
    "fp8": GroupScaledFormat(DIM, 0, F32, DIM),
    "fp8 bf16": GroupScaledFormat(DIM, 0, BF16, DIM),
    "fp8 lanes": LanePaddedFormat(DIM, 0, BF16, DIM, lanes=16),
    "fp8 float32 lanes": LanePaddedFormat(DIM, 0, F32, DIM, rotated=True, lanes=16),
}
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
interpreted = functools.partial(index_scores_tpu, target=Target.of("interpret:v5p"))


def setting(form: RowFormat, batch: int, tokens: int, heads: int, page: int, pages: int, seed: int = 0) -> list:
    """Queries at the ends of sequences of random lengths; pages in random order, NaN in what was never written."""
    generator = np.random.default_rng(seed)
    count = batch * pages + 2
    table = generator.permutation(count)[: batch * pages].reshape(batch, pages).astype(np.int32)
    stack = empty_stack(form, (2, count, page))
    rows = generator.standard_normal((2, count, page, DIM)) * 2.0 ** generator.integers(-3, 3, (2, count, page, 1))
    written = encode_rows(stack, jnp.asarray(rows, jnp.float32), 1)
    lengths = np.minimum(generator.integers(tokens, tokens + page * pages, batch), page * pages)
    seen = np.zeros((2, count, page), bool)
    for row in range(batch):
        for place in range(lengths[row]):
            seen[1, table[row, place // page], place % page] = True
    poison = generator.choice([np.nan, np.inf], (2, count, page, 1))

    def poisoned(part: jax.Array) -> jax.Array:
        return jnp.where(seen[..., None], part, jnp.asarray(poison).astype(part.dtype))

    parts = {name: poisoned(part) for name, part in written.items()}
    stack = parts["values"] if isinstance(stack, jax.Array) else stack.replace(parts=parts)
    queries = generator.standard_normal((batch, tokens, heads, DIM)).astype(np.float32)
    if "float32" not in str(getattr(form, "dtype", "")):
        queries = queries.astype(jnp.bfloat16).astype(np.float32)  # which the kernel does; nothing else is rounded
    weights = generator.standard_normal((batch, tokens, heads)).astype(np.float32)
    positions = (lengths[:, None] - tokens + np.arange(tokens)).astype(np.int32)
    return [queries, weights, stack, 1, table, positions]


def same(got: jax.Array, expected: jax.Array) -> None:
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(expected))
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(got[~finite], expected[~finite])
    np.testing.assert_allclose(got[finite], expected[finite], atol=4e-5, rtol=2e-5)
    assert not np.signbit(got[got == 0]).any()


def both(arguments: list, **options: object) -> np.ndarray:
    got = jax.jit(functools.partial(interpreted, **options), compiler_options=QUICK)(*arguments)
    same(got, jax.jit(functools.partial(index_scores, backend="reference"))(*arguments))
    return np.asarray(got)


def with_padding(arguments: list, share: float) -> None:
    """Some queries become padding, and what they hold must not matter."""
    padding = np.random.default_rng(1).random(arguments[5].shape) < share
    arguments[0][padding], arguments[1][padding] = np.nan, np.inf
    arguments[5][padding] = -1
    got = both(arguments)
    assert (got[padding] == -np.inf).all()


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str) -> None:
    with_padding(setting(FORMATS[name], 2, 7, 3, 8, 5), 0.3)


@pytest.mark.slow
@given(
    name=st.sampled_from(list(FORMATS)),
    page=st.sampled_from([1, 2, 3, 4, 16]),
    pages=st.integers(1, 7),
    tokens=st.sampled_from([1, 2, 5, 6, 7, 8, 9, 17]),
    batch=st.sampled_from([1, 3]),
    heads=st.sampled_from([1, 3, 16, 32]),
    share=st.sampled_from([0, 0.3, 1]),
    seed=st.integers(0, 99),
)
@settings(max_examples=4, deadline=None)
def test_shapes(name: str, page: int, pages: int, tokens: int, batch: int, heads: int, share: float, seed: int) -> None:
    pages = max(pages, -(-tokens // page))
    with_padding(setting(FORMATS[name], batch, tokens, heads, page, pages, seed), share)


@pytest.mark.parametrize(("lengths", "cores"), [((48, 48, 48), 2), ((0, 33, 0), 1), ((9, 0, 48), 2)])
def test_lengths_of_a_batch(lengths: tuple[int, ...], cores: int) -> None:
    """Blocks that no query of a sequence sees are not read, whichever core has them, and the next sequence is."""
    arguments = setting(FORMATS["bf16"], 3, 2, 4, 4, 12)
    arguments[2] = jnp.nan_to_num(arguments[2], nan=1.0, posinf=2.0)
    arguments[5] = np.array([[length - 1, length - 1] for length in lengths], np.int32)
    both(arguments, blocks=IndexScoresTileSizes(2, 2, 8, 4, 2 if cores == 1 else 3, cores))


def test_pages_beyond_a_sequence_may_be_anything() -> None:
    arguments = setting(FORMATS["float32"], 2, 3, 4, 4, 12)
    arguments[5][:] = [[3, 4, 5], [-1, 0, 1]]
    arguments[2] = jnp.nan_to_num(arguments[2], posinf=1.0)
    arguments[4] = np.where(np.arange(12) < 2, arguments[4], [[-7], [2**30]]).astype(np.int32)
    both(arguments)


def test_a_page_table_that_scalar_memory_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm52_jax.kernels.index_scores.tpu._TABLE_ENTRIES", 25)
    both(setting(FORMATS["bf16"], 6, 2, 4, 4, 12))


def test_no_score_is_nan_or_negative_zero() -> None:
    arguments = setting(FORMATS["float32"], 2, 9, 3, 4, 5)
    arguments[1] = -np.abs(arguments[1])
    arguments[0], arguments[2] = np.abs(arguments[0]), -jnp.abs(arguments[2])
    got = both(arguments)
    assert (got[np.isfinite(got)] == 0).all()
    assert np.isfinite(got).any()
    arguments[2] = arguments[2].at[1, arguments[4][:, 0], 2].set(jnp.nan)
    got = both(arguments)
    assert (got[..., 2] == -np.inf).all()
    assert not np.isnan(got).any()


def test_queries_are_rounded_as_the_keys_are() -> None:
    """Weights and sums are not, which the order of selection depends on."""
    arguments = setting(FORMATS["bf16"], 1, 6, 32, 16, 3)
    arguments[0] = np.random.default_rng(3).standard_normal(arguments[0].shape).astype(np.float32)
    got = jax.jit(interpreted, compiler_options=QUICK)(*arguments)
    rounded = [arguments[0].astype(jnp.bfloat16).astype(np.float32), *arguments[1:]]
    same(got, index_scores(*rounded, backend="reference"))


@pytest.mark.quick(1)
@pytest.mark.parametrize("tokens", [1, 12])
def test_no_races(tokens: int, racing: str) -> None:
    arguments = setting(FORMATS["fp8 lanes"], 2, tokens, 3, 8, 5)
    got = jax.jit(functools.partial(index_scores, backend=racing), compiler_options=QUICK)(*arguments)
    same(got, index_scores(*arguments, backend="reference"))


@pytest.mark.parametrize("tokens", quickly([1, 3, 6, 8, 13], 1, 6))
def test_a_block_for_another_kernel(tokens: int) -> None:
    generator = np.random.default_rng(4)
    queries, weights, keys = (
        jnp.asarray(generator.standard_normal(shape), jnp.float32)
        for shape in ((2, tokens, 5, DIM), (2, tokens, 5), (256, DIM))
    )
    q, w = query_rows(queries, jnp.float32, DIM), weight_rows(weights)
    assert sum(token_groups(tokens)) == tokens
    scales = jnp.exp2(jnp.arange(256.0) % 5)[:, None]
    expected = jnp.einsum("bth,bthk->btk", weights, jax.nn.relu(jnp.einsum("bthd,kd->bthk", queries, keys)))
    got = score_block(q[1], w[1], keys, tokens=tokens, heads=5, scales=scales)
    np.testing.assert_allclose(got, expected[1] * scales[:, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("capacity", [64, 192, 640, 6400, 32768, 131072])
@pytest.mark.parametrize("tokens", [1, 6, 9, 130, 2048])
def test_blocks_fit_every_capacity(capacity: int, tokens: int) -> None:
    for chip in CHIPS.values():
        blocks = choose(Target(chip), tokens, capacity, 64)
        assert blocks.tokens % blocks.together == blocks.keys % blocks.part == blocks.part % 128 == 0
        assert -(-capacity // blocks.block) % blocks.cores == 0
        if capacity >= 32768:
            assert blocks.cores == chip.cores_per_device


def test_the_cost_is_what_the_reference_counts() -> None:
    batch, tokens, heads, dim, capacity = 2, 4, 32, 128, 256
    pool = jax.ShapeDtypeStruct((1, 8, 64, dim), jnp.float32)
    shapes = [(batch, tokens, heads, dim), (batch, tokens, heads)]
    queries, weights = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    table = jax.ShapeDtypeStruct((batch, capacity // 64), jnp.int32)
    positions = jax.ShapeDtypeStruct((batch, tokens), jnp.int32)
    run = jax.jit(functools.partial(index_scores, backend="reference"))
    counted = run.lower(queries, weights, pool, 0, table, positions).compile().cost_analysis()
    ours = cost(batch, tokens, heads, dim, capacity, key_bytes=4 * dim, query_bytes=4)
    assert math.isclose(ours.flops, counted["flops"], rel_tol=0.02)
    moved = batch * capacity * dim * 4 + batch * tokens * (heads * (dim + 1) + capacity) * 4
    assert ours.bytes_accessed == moved


@pytest.mark.parametrize("chip", quickly(CHIPS, "v5e", "tpu7x"))
def test_compiles_without_copies(chip: str) -> None:
    formats = {"bf16": UnquantizedFormat(128, BF16), "fp8": LanePaddedFormat(128, 0, BF16, 128)}
    for (batch, tokens, capacity), form in (((8, 1, 32768), "bf16"), ((1, 1, 131072), "fp8"), ((1, 16, 32768), "bf16")):
        pages = batch * capacity // 64
        stack = jax.eval_shape(functools.partial(empty_stack, formats[form], (3, pages, 64)))
        arguments = (
            jax.ShapeDtypeStruct((batch, tokens, 32, 128), jnp.float32),
            jax.ShapeDtypeStruct((batch, tokens, 32), jnp.float32),
            stack,
            jax.ShapeDtypeStruct((), jnp.int32),
            jax.ShapeDtypeStruct((batch, capacity // 64), jnp.int32),
            jax.ShapeDtypeStruct((batch, tokens), jnp.int32),
        )
        step = compiled(functools.partial(index_scores, backend=f"tpu:{chip}"), arguments, chip)
        assert [kernel.name for kernel in step.program.kernels] == ["index_scores"]
        layer = min(part.size for part in parts_of(stack).values()) // 3
        assert all(copy.bytes < layer / 4 for copy in step.program.copies), form
        assert step.memory.temporaries < 6 * 2**20
