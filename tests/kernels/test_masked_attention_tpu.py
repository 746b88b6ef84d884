"""Masked attention for TPUs beside the plain form: shapes, blocks that are skipped, gradients, compiled."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm52_jax.kernels import Target
from glm52_jax.kernels.masked_attention.api import masked_attention
from glm52_jax.kernels.masked_attention.gradient import gradient
from glm52_jax.kernels.masked_attention.tile_sizes import MaskedAttentionTileSizes, choose, cost
from glm52_jax.kernels.masked_attention.tpu import masked_attention_forward
from sharding.compiler.chips import CHIPS
from tests.kernels.compiling import compiled
from tests.kernels.quickly import quickly

SCALE = 0.3
INTERPRETED = Target.of("interpret")


def setting(
    batch: int,
    tokens: int,
    room: int,
    heads: int,
    width: int = 10,
    value_width: int = 6,
    dtype: str = "float32",
    seed: int = 0,
) -> tuple:
    """Queries, keys, values, positions and mask; the first query of the last sequence is padding and holds NaN."""
    generator = np.random.default_rng(seed)

    def values(*shape: int) -> jax.Array:
        return jnp.asarray(generator.standard_normal(shape), dtype)

    positions = np.tile(room - tokens + np.arange(tokens, dtype=np.int32), (batch, 1))
    mask = (generator.random((batch, tokens, room)) < 0.5) & (np.arange(room) <= positions[..., None])
    mask[0, -1] = False
    mask[-1, 0] = False
    mask[:, :, : room // 2] &= generator.random((batch, 1, 1)) < 0.5  # blocks that nobody attends to
    positions[-1, 0] = -1
    queries = values(batch, tokens, heads, width).at[-1, 0].set(jnp.nan)
    keys, averaged = values(batch, room, heads, width), values(batch, room, heads, value_width)
    return queries, keys, averaged, jnp.asarray(positions), jnp.asarray(mask)


def same(got: jax.Array, operands: tuple, atol: float = 1e-5) -> None:
    expected = masked_attention(jnp.nan_to_num(operands[0]), *operands[1:], SCALE, backend="reference")
    assert got.dtype == expected.dtype
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(expected, np.float32), atol=atol)
    assert (np.asarray(got, np.float32)[~np.asarray(operands[4]).any(-1)] == 0).all()


@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_equals_the_reference(dtype: str, atol: float) -> None:
    """Several tiles and blocks, parts of a tile, heads that share a mask; whole lanes wide as on a TPU."""
    operands = setting(2, 20, 300, 4, 128, 128, dtype)
    queries, keys, values, _, mask = operands
    run = functools.partial(
        masked_attention_forward, target=INTERPRETED, blocks=MaskedAttentionTileSizes(16, 128, 2, 8)
    )
    same(jax.jit(lambda *a: run(*a, SCALE)[0])(queries, keys, values, mask), operands, atol)


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(st.data())
def test_odd_shapes(data: st.DataObject) -> None:
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    tokens = draw(1, 9)
    operands = setting(draw(1, 2), tokens, tokens + draw(0, 9), draw(1, 3), draw(1, 9), draw(1, 9), seed=draw(0, 9))
    same(jax.jit(functools.partial(masked_attention, scale=SCALE, backend="interpret"))(*operands), operands)


def test_no_races(racing: str) -> None:
    operands = setting(1, 5, 9, 2)
    same(masked_attention(*operands, SCALE, backend=racing), operands)


def test_log_sum_exp() -> None:
    queries, keys, values, _, mask = setting(2, 5, 9, 3)
    _, lse = masked_attention_forward(queries, keys, values, mask, SCALE, target=INTERPRETED, with_lse=True)
    scores = jnp.einsum("bshd,bthd->bhst", jnp.nan_to_num(queries), keys) * SCALE
    expected = jax.nn.logsumexp(jnp.where(mask[:, None], scores, -jnp.inf), axis=-1)
    np.testing.assert_allclose(lse, expected, atol=1e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient(dtype: str) -> None:
    """A query that attends to nothing changes no gradient, whatever it holds."""
    operands = setting(2, 7, 12, 2, dtype=dtype)

    def loss(backend: str, *given: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(masked_attention(*given, *operands[3:], SCALE, backend=backend).astype(jnp.float32)))

    clean = (jnp.nan_to_num(operands[0]), *operands[1:3])
    got = jax.jit(jax.grad(functools.partial(loss, "interpret"), argnums=(0, 1, 2)))(*operands[:3])
    expected = jax.grad(functools.partial(loss, "reference"), argnums=(0, 1, 2))(*clean)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == theirs.dtype
        atol = 2e-6 if dtype == "float32" else 3e-2
        np.testing.assert_allclose(np.asarray(mine, np.float32), np.asarray(theirs, np.float32), atol=atol)


@pytest.mark.slow
def test_gradient_in_blocks() -> None:
    """Several tiles and blocks, some of them skipped."""
    queries, keys, values, _, mask = setting(1, 20, 30, 2)
    queries = jnp.nan_to_num(queries)
    out, lse = masked_attention_forward(queries, keys, values, mask, SCALE, target=INTERPRETED, with_lse=True)
    d_out = jnp.cos(out)
    got = jax.jit(
        lambda *a: gradient(*a[:4], SCALE, *a[4:], target=INTERPRETED, blocks=MaskedAttentionTileSizes(8, 8, 2))
    )(queries, keys, values, mask, out, lse, d_out)  # fmt: skip
    plain = functools.partial(masked_attention, positions=jnp.zeros((1, 20), jnp.int32), mask=mask, scale=SCALE)
    expected = jax.vjp(functools.partial(plain, backend="reference"), queries, keys, values)[1](d_out)
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-6)


def test_the_cost_is_what_the_reference_counts() -> None:
    batch, tokens, room, heads, width = 1, 64, 256, 4, 128
    queries = jax.ShapeDtypeStruct((batch, tokens, heads, width), jnp.float32)
    keys = jax.ShapeDtypeStruct((batch, room, heads, width), jnp.float32)
    positions = jax.ShapeDtypeStruct((batch, tokens), jnp.int32)
    mask = jax.ShapeDtypeStruct((batch, tokens, room), jnp.bool_)
    run = jax.jit(functools.partial(masked_attention, scale=SCALE, backend="reference"))
    counted = run.lower(queries, keys, keys, positions, mask).compile().cost_analysis()
    mine = cost(batch, tokens, room, heads, width, width, 4)
    assert math.isclose(mine.flops, counted["flops"], rel_tol=0.05)
    assert mine.bytes_accessed == heads * (tokens + room) * 2 * width * 4 + tokens * room


@pytest.mark.parametrize("tokens", [1, 100, 512, 2048])
def test_blocks_fit(tokens: int) -> None:
    for chip in CHIPS.values():
        for heads in (1, 2, 8, 64):
            blocks = choose(Target(chip), tokens, 4096, heads)
            assert heads % blocks.heads == 0
            assert blocks.queries <= tokens


@pytest.mark.parametrize("chip", quickly(CHIPS, "v5p", "tpu7x"))
def test_compiles_with_its_gradient(chip: str) -> None:
    shape = jax.ShapeDtypeStruct((1, 512, 2, 256), jnp.bfloat16)
    positions = jax.ShapeDtypeStruct((1, 512), jnp.int32)
    mask = jax.ShapeDtypeStruct((1, 512, 512), jnp.bool_)

    def loss(queries, keys, values, positions, mask):
        out = masked_attention(queries, keys, values, positions, mask, 0.0625, backend=f"tpu:{chip}")
        return jnp.sum(out.astype(jnp.float32) ** 2)

    step = compiled(jax.grad(loss, argnums=(0, 1, 2)), (shape, shape, shape, positions, mask), chip)
    names = " ".join(kernel.name for kernel in step.program.kernels)
    assert all(name in names for name in ("masked_attention", "masked_attention_dq", "masked_attention_dkv"))
    assert step.memory.temporaries < 16 * 2**20
