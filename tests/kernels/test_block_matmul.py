"""Rows by a quantised matrix: no less exact than the product with the dequantised one, at any shape."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm52_jax.kernels.block_matmul import tile_sizes
from glm52_jax.kernels.block_matmul.api import block_matmul
from glm52_jax.params.quantization import FLOAT8, BlockQuantized, dequantize_blocks, quantize_blocks
from tests.kernels.compiling import compiled

LAYERS = 2


def stack(
    shape: tuple[int, ...], block: tuple[int, int], codes=FLOAT8, seed: int = 0
) -> tuple[BlockQuantized, np.ndarray]:
    weights = np.random.default_rng(seed).standard_normal((LAYERS, *shape)).astype(np.float32)
    pairs = [quantize_blocks(w, block, codes) for w in weights.reshape(-1, *shape[-2:])]
    stored, scales = (np.stack(part) for part in zip(*pairs, strict=True))
    stored, scales = stored.reshape(weights.shape), scales.reshape(*weights.shape[:-2], *scales.shape[-2:])
    # The view says nothing here: heads for instance.
    held = BlockQuantized(
        jnp.asarray(stored), jnp.asarray(scales), logical_shape=(shape[-2], 1, shape[-1]), block=block
    )
    return held, dequantize_blocks(stored, scales, block)


@functools.cache
def run(backend: str, dtype=None):
    return jax.jit(functools.partial(block_matmul, backend=backend, dtype=dtype))


@given(
    rows=st.sampled_from([1, 5, 33]),
    shape=st.sampled_from([(6, 10), (1, 1), (2, 7, 4), (40, 9)]),
    block=st.sampled_from([(3, 4), (128, 128), (1, 5)]),
    layer=st.integers(0, LAYERS - 1),
    quantised=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_any_shape(rows: int, shape: tuple[int, ...], block: tuple[int, int], layer: int, quantised: bool) -> None:
    weight, plain = stack(shape, block)
    x = np.random.default_rng(rows).standard_normal((rows, shape[-1])).astype(np.float32)
    got = block_matmul(x, weight if quantised else jnp.asarray(plain), layer, backend="interpret")
    expected = np.einsum("rk,...nk->r...n", x.astype(np.float64), plain[layer].astype(np.float64))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, atol=1e-4)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("chip", "codes", "rows", "shape"),
    [
        ("v5p", FLOAT8, 8, (576, 256)),
        ("v5p", FLOAT8, 300, (384, 256)),
        ("v6e", FLOAT8, 16, (576, 384)),
        ("v6e", FLOAT8, 16, (2, 256, 200)),
        ("tpu7x", FLOAT8, 300, (576, 256)),
        ("v5p", jnp.int8, 8, (256, 256)),
    ],
)
def test_no_less_exact_than_the_plain_form(chip: str, codes, rows: int, shape: tuple[int, ...]) -> None:
    """Rows of a tile, blocks of the matrix and columns that are cut at the end, for each way to widen codes."""
    weight, plain = stack(shape, (128, 128), codes)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((rows, shape[-1])), jnp.bfloat16)
    expected = np.einsum("rk,...nk->r...n", np.asarray(x, np.float64), plain[1].astype(np.float64))
    reference = np.asarray(run("reference", jnp.float32)(x, weight, 1))
    got = np.asarray(run(f"interpret:{chip}", jnp.float32)(x, weight, 1))
    assert np.abs(got - expected).max() < 0.01 * np.abs(reference - expected).max()
    rounded = run(f"interpret:{chip}")(x, weight, 1)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rounded, got.astype(jnp.bfloat16))


def test_every_code() -> None:
    """All 254 numbers of FP8; those below the least normal one, 2 ** -6, may count as zero, as `product` says."""
    codes = np.tile(np.setdiff1d(np.arange(256), [0x7F, 0xFF]).astype(np.uint8), 130)[: 128 * 256]
    values = codes.view(FLOAT8).reshape(1, 256, 128)
    weight = BlockQuantized(jnp.asarray(values), jnp.ones((1, 2, 1), jnp.float32), logical_shape=(256, 128))
    got = block_matmul(jnp.eye(128, dtype=jnp.bfloat16), weight, 0, backend="interpret:v5p", dtype=jnp.float32)
    expected = values[0].astype(np.float32).T
    normal = np.abs(expected) >= 2.0**-6
    np.testing.assert_array_equal(np.where(normal, got, 0), np.where(normal, expected, 0))
    # Here too the device may take a subnormal number for zero.
    assert np.isin(np.where(normal, 0, got - expected), [0, *np.unique(expected[~normal])]).all()


def test_a_row_does_not_depend_on_the_others() -> None:
    weight, _ = stack((256, 256), (128, 128))
    x = np.random.default_rng(2).standard_normal((20, 256)).astype(jnp.bfloat16)
    together = np.asarray(run("interpret:v5p")(x, weight, 0))
    x[10:] = np.nan
    x[12:] = np.inf
    np.testing.assert_array_equal(np.asarray(run("interpret:v5p")(x, weight, 0))[:10], together[:10])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_column_that_overflows_leaves_its_neighbours(dtype) -> None:
    """Infinities and NaN stay in their column where a product with a permutation puts columns in order."""
    weight, _ = stack((256, 128), (128, 128))
    codes, scales = np.asarray(weight.codes, np.float32), np.full((LAYERS, 2, 1), 2.0**64, np.float32)
    codes[:, :, 1] = 0
    codes[:, [3, 64, 131], 1] = 448, 448, -448
    x = np.zeros((3, 128), np.float32)
    x[:, 0], x[0, 1], x[1, 1] = 1, 2.0**60, -(2.0**60)  # 448 x 2 ** 124 is too large
    weight = BlockQuantized(jnp.asarray(codes, FLOAT8), jnp.asarray(scales), logical_shape=(256, 1, 128))
    got = np.asarray(run("interpret:v5p", dtype)(x.astype(jnp.bfloat16), weight, 0), np.float32)
    expected = np.asarray(run("reference", dtype)(x.astype(jnp.bfloat16), weight, 0), np.float32)
    assert np.isposinf(got[0, [3, 64]]).all()
    assert np.isneginf(got[0, 131])
    assert np.isneginf(got[1, [3, 64]]).all()
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(expected))
    np.testing.assert_allclose(got[np.isfinite(got)], expected[np.isfinite(got)], rtol=1e-2)
    scales[0, 1] = np.nan
    weight = BlockQuantized(weight.codes, jnp.asarray(scales), logical_shape=(256, 1, 128))
    lost = np.isnan(np.asarray(run("interpret:v6e", dtype)(x.astype(jnp.bfloat16), weight, 0), np.float32))
    assert lost[:, 128:].all()
    assert not lost[:, :128].any()  # the other block of a product of 256


def test_no_races(racing: str) -> None:
    weight, plain = stack((512, 256), (128, 128))
    x = np.random.default_rng(3).standard_normal((4, 256)).astype(np.float32)
    np.testing.assert_allclose(block_matmul(x, weight, 1, backend=racing), x @ plain[1].T, atol=1e-3)


def shapes(rows: int, shape: tuple[int, ...], quantised: bool):
    make = jax.ShapeDtypeStruct
    weight = make((3, *shape), jnp.bfloat16)
    if quantised:
        grid = -(-shape[-2] // 128), -(-shape[-1] // 128)
        scales = make((3, *shape[:-2], *grid), jnp.float32)
        weight = BlockQuantized(make((3, *shape), FLOAT8), scales, logical_shape=shape[-2:])
    return make((rows, shape[-1]), jnp.bfloat16), weight, make((), jnp.int32)


@pytest.mark.parametrize(
    ("chip", "rows", "shape", "quantised"),
    [
        ("v5e", 1, (576, 6144), True),
        ("v5p", 64, (6144, 16384), True),
        ("v6e", 8, (2, 2048, 6144), True),
        ("tpu7x", 64, (576, 6144), False),
        ("tpu7x", 4096, (2048, 6144), True),
    ],
)
def test_compiles(chip: str, rows: int, shape: tuple[int, ...], quantised: bool) -> None:
    """Nothing of the matrix's size is copied or kept beside it."""
    step = compiled(functools.partial(block_matmul, backend=f"tpu:{chip}"), shapes(rows, shape, quantised), chip)
    assert any("block_matmul" in kernel.name for kernel in step.program.kernels)
    assert not [copy for copy in step.program.copies if rows < 4096]
    assert step.memory.temporaries < (4 if rows < 4096 else 52) * 2**20


def test_costs_are_those_of_the_plain_form() -> None:
    x, weight, layer = shapes(64, (2048, 6144), False)
    cost = tile_sizes.cost(64, weight, x.dtype, x.dtype)
    plain = jax.jit(functools.partial(block_matmul, backend="reference")).lower(x, weight, layer).compile()
    assert cost.flops == pytest.approx(plain.cost_analysis()["flops"], rel=0.05)
    assert cost.bytes_accessed == 2 * (2048 * 6144 + 64 * (2048 + 6144))
