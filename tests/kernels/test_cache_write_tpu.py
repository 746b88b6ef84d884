"""The cache write for TPUs beside the plain one: rows made and as they are, every format, interpreted and compiled."""

import functools

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
    TensorScaledFormat,
    UnquantizedFormat,
    empty_stack,
    parts_of,
)
from glm52_jax.kernels.cache_write.api import write_rows
from glm52_jax.kernels.cache_write.new_rows import IndexKeyTransform, LatentRowTransform, RowTransform
from glm52_jax.kernels.cache_write.tile_sizes import choose, cost
from glm52_jax.kernels.lib.layers import Rotary
from sharding.compiler.chips import CHIPS
from tests.kernels.compiling import compiled
from tests.kernels.quickly import quickly

RANK, ROPE = 8, 4
LATENT: dict[str, RowFormat] = {
    "plain": UnquantizedFormat(RANK + ROPE, jnp.dtype(jnp.bfloat16)),
    "float32": UnquantizedFormat(RANK + ROPE, jnp.dtype(jnp.float32)),
    "lanes": UnquantizedFormat(RANK + ROPE, jnp.dtype(jnp.bfloat16), 16),
    "groups": GroupScaledFormat(RANK, ROPE, jnp.dtype(jnp.bfloat16), 4),
    "groups in lanes": LanePaddedFormat(RANK, ROPE, jnp.dtype(jnp.bfloat16), 4, lanes=8),
    "tensor": TensorScaledFormat(RANK + ROPE, (0.5, 0.01), 16),
}
KEYS: dict[str, RowFormat] = {
    "plain": UnquantizedFormat(RANK, jnp.dtype(jnp.bfloat16)),
    "padded": UnquantizedFormat(RANK, jnp.dtype(jnp.bfloat16), 16),
    "fp8": LanePaddedFormat(RANK, 0, jnp.dtype(jnp.bfloat16), RANK, lanes=8),
    "fp8_rotated": LanePaddedFormat(RANK, 0, jnp.dtype(jnp.bfloat16), RANK, rotated=True, lanes=8),
}


def latent_making(positions: np.ndarray, generator: np.random.Generator, *, interleave: bool) -> LatentRowTransform:
    norm = jnp.asarray(generator.standard_normal(RANK), jnp.float32)
    return LatentRowTransform(norm, Rotary.at(jnp.asarray(positions), ROPE, 1e4), 1e-5, interleave)


def key_making(positions: np.ndarray, generator: np.random.Generator, form: RowFormat) -> IndexKeyTransform:
    norm, bias = (jnp.asarray(generator.standard_normal(RANK), jnp.float32) for _ in range(2))
    hadamard_rotated = isinstance(form, GroupScaledFormat) and form.rotated
    return IndexKeyTransform(
        norm,
        bias,
        Rotary.at(jnp.asarray(positions), ROPE, 1e4),
        1e-6,
        interleave=True,
        hadamard_rotated=hadamard_rotated,
    )


def chunk(batch: int, tokens: int, capacity: int, generator: np.random.Generator) -> np.ndarray:
    """Positions of a run in each row, with padding on either side; the first row has none, the second nothing else."""
    positions = np.full((batch, tokens), -1, np.int32)
    for row in range(batch):
        count = tokens if row == 0 else 0 if row == 1 else generator.integers(0, tokens + 1)
        first, column = generator.integers(0, capacity - count + 1), generator.integers(0, tokens - count + 1)
        positions[row, column : column + count] = first + np.arange(count)
    return positions


def same(got: jax.Array, expected: jax.Array) -> None:
    """Equal but for the last place of a sum that was added in another order; NaN where there is NaN."""
    got, expected = (np.asarray(a).astype(np.float32) for a in (got, expected))
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(got), finite)
    apart = np.abs(got[finite] - expected[finite])
    assert (apart <= np.abs(expected[finite]) / 8).all()
    assert not apart.size or (apart > 1e-6 * np.abs(expected[finite])).mean() < 0.02


def both(
    form: RowFormat,
    transform: RowTransform | None,
    values: np.ndarray,
    positions: np.ndarray,
    page_size: int,
    generator: np.random.Generator,
    backend: str = "interpret",
    *,
    table: list[list[int]] | None = None,
    pool: int = 0,
) -> None:
    """Compares the kernel with the reference; pages in any order where no table is given."""
    batch, tokens = positions.shape
    pages = max(1, -(-(int(positions.max()) + 1) // page_size))
    pool = pool or batch * pages + 1
    order = generator.permutation(pool)
    table = np.array(order[: batch * pages].reshape(batch, pages) if table is None else table, np.int32)
    stack = jax.tree.map(
        lambda part: jnp.full(part.shape, jnp.nan, part.dtype), empty_stack(form, (3, pool, page_size))
    )
    run = jax.jit(write_rows, static_argnames="backend")
    got, expected = (
        run(stack, 1, values, table, positions, transform=transform, backend=b) for b in (backend, "reference")
    )
    jax.tree.map(same, got, expected)
    unwritten = np.asarray(parts_of(got)[next(iter(parts_of(got)))][::2]).astype(np.float32)
    assert np.isnan(unwritten).all()  # the layers before and after are left alone
    assert tokens == values.shape[1]


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", quickly(LATENT, "plain", "lanes", "groups in lanes", "tensor"))
@given(
    page_size=st.sampled_from([1, 3, 4, 8, 16]),
    tokens=st.sampled_from([1, 2, 7, 8, 9, 17]),
    batch=st.sampled_from([1, 3]),
    seed=st.integers(0, 99),
    make=st.sampled_from([None, True, False]),
)
@settings(max_examples=3, deadline=None)
def test_latent_rows(name: str, page_size: int, tokens: int, batch: int, seed: int, make: bool | None) -> None:
    generator = np.random.default_rng(seed)
    positions = chunk(batch, tokens, 40, generator)
    values = generator.standard_normal((batch, tokens, RANK + ROPE)).astype(np.float32)
    values[positions < 0] = np.nan  # what padding holds must not matter
    transform = None if make is None else latent_making(positions, generator, interleave=make)
    dtype = jnp.float32 if name == "float32" else jnp.bfloat16
    both(LATENT[name], transform, jnp.asarray(values, dtype), positions, page_size, generator)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", quickly(KEYS, "padded", "fp8_rotated"))
def test_index_keys(name: str) -> None:
    generator = np.random.default_rng(5)
    for tokens, page_size in ((1, 8), (11, 4)):
        positions = chunk(3, tokens, 30, generator)
        values = generator.standard_normal((3, tokens, RANK)).astype(np.float32)
        values[positions < 0] = np.inf
        transform = key_making(positions, generator, KEYS[name])
        both(KEYS[name], transform, jnp.asarray(values), positions, page_size, generator)


def test_steps_of_a_long_chunk() -> None:
    """A chunk in several steps, of which two touch one tile."""
    generator = np.random.default_rng(1)
    positions = chunk(2, 600, 700, generator)
    values = jnp.asarray(generator.standard_normal((2, 600, RANK + ROPE)), jnp.bfloat16)
    both(LATENT["plain"], None, values, positions, 8, generator)


@pytest.mark.parametrize("tokens", [1, 17])
def test_no_races(tokens: int, racing: str) -> None:
    """Steps on two cores, of one token a sequence and of runs over several pages, past the capacity too."""
    generator = np.random.default_rng(1)
    positions = chunk(3, tokens, 20, generator)
    values = jnp.asarray(generator.standard_normal((3, tokens, RANK + ROPE)), jnp.bfloat16)
    both(LATENT["plain"], None, values, positions, 8, generator, f"{racing}:v5p", table=[[3, -1], [0, 1], [2, 9]])


@pytest.mark.parametrize(
    ("tokens", "backend"),
    quickly(
        [(tokens, backend) for tokens in (1, 6, 30) for backend in ("interpret", "races")],
        (6, "interpret"),
        (1, "races"),
    ),
)
def test_positions_without_a_slot_are_not_written(tokens: int, backend: str) -> None:
    """Pages that are none of the pool's, and positions at or past the capacity of the table, 16: a copy would go there.

    The page of rows 0 to 7 of the third sequence is the pool's last; past it are the rows of the next layer.
    """
    generator = np.random.default_rng(tokens)
    table = [[0, -1], [1, 2], [7, 8], [-5, 3]]
    for first in (0, 7, 11, 15, 16, 17, 40) if tokens == 6 else (7, 15):
        positions = np.tile(first + np.arange(tokens, dtype=np.int32), (4, 1))
        values = jnp.asarray(generator.standard_normal((4, tokens, RANK + ROPE)), jnp.bfloat16)
        both(LATENT["plain"], None, values, positions, 8, generator, backend, table=table, pool=8)


def test_pages_of_another_device_are_left_out() -> None:
    """On a mesh a device keeps some pages of a chunk: runs of columns with gaps between them."""
    generator = np.random.default_rng(2)
    page = 4
    tokens = np.arange(30)
    mine = (tokens // page) % 3 == 1
    positions = np.where(mine, tokens // page // 3 * page + tokens % page, -1)[None].astype(np.int32)
    values = jnp.asarray(generator.standard_normal((1, 30, RANK + ROPE)), jnp.bfloat16)
    both(LATENT["groups in lanes"], None, values, positions, page, generator)


@pytest.mark.parametrize("chip", quickly(CHIPS, "v5e", "tpu7x"))
def test_compiles_in_place(chip: str) -> None:
    bf16 = jnp.dtype(jnp.bfloat16)
    formats = {
        "bf16": UnquantizedFormat(576, bf16, 128),
        "groups": LanePaddedFormat(512, 64, bf16, lanes=128),
        "tensor": TensorScaledFormat(576, (1.0,) * 4, 128),
    }
    for (batch, tokens), form in (((64, 1), "bf16"), ((8, 6), "groups"), ((1, 2048), "groups"), ((8, 1), "tensor")):
        stack = jax.eval_shape(functools.partial(empty_stack, formats[form], (4, 2048, 64)))
        positions = jax.ShapeDtypeStruct((batch, tokens), jnp.int32)
        rotary = jax.eval_shape(lambda p: Rotary.at(p, 64, 1e6), positions)
        transform = LatentRowTransform(jax.ShapeDtypeStruct((512,), bf16), rotary, 1e-5, interleave=True)

        def run(stack, layer, values, table, positions, transform):
            return write_rows(stack, layer, values, table, positions, transform=transform, backend=f"tpu:{chip}")

        values = jax.ShapeDtypeStruct((batch, tokens, 576), bf16)
        table = jax.ShapeDtypeStruct((batch, 32), jnp.int32)
        layer = jax.ShapeDtypeStruct((), jnp.int32)
        step = compiled(run, (stack, layer, values, table, positions, transform), chip, donate=(0,))
        assert [kernel.name for kernel in step.program.kernels] == ["cache_write"]
        # Values may come in another layout here, where nothing made them; a layer's rows are 32 MiB and more.
        assert all(copy.bytes < 2**23 for copy in step.program.copies), form
        assert step.memory.aliased == sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(stack))
        assert step.memory.temporaries < 8 * 2**20


def test_the_cost_is_what_must_move() -> None:
    blocks = choose(CHIPS["v5e"], 64, 1, 64)
    moved = cost(64, 1, 576, 2, 1280, blocks).bytes_accessed
    assert moved == 64 * (576 * 2 + 2 * 8 * 1280)  # a tile of eight rows is read and written for each token
    blocks = choose(CHIPS["v5e"], 1, 2048, 64)
    assert cost(1, 2048, 576, 2, 1280, blocks).bytes_accessed < 1.05 * 2048 * (576 * 2 + 1280)
