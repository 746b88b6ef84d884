"""Dense sparse-MLA for TPUs beside the plain form: formats, shapes, what was never written, gradients, compiled."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm52_jax.cache.row_formats import (
    GroupScaledFormat,
    LanePaddedFormat,
    PackedStack,
    RowFormat,
    TensorScaledFormat,
    UnquantizedFormat,
    empty_stack,
    encode_rows,
    parts_of,
)
from glm52_jax.kernels import Target
from glm52_jax.kernels.lib.selection import Selection
from glm52_jax.kernels.sparse_mla import dense, dense_tile_sizes
from glm52_jax.kernels.sparse_mla.dense_tile_sizes import DenseTileSizes, choose, cost
from glm52_jax.kernels.sparse_mla.reference import sparse_mla_reference
from sharding.compiler.chips import CHIPS
from tests.kernels.compiling import compiled
from tests.kernels.quickly import quickly

RANK, WIDTH, SCALE = 6, 10, 0.3
BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
FORMATS: dict[str, RowFormat] = {
    "plain": UnquantizedFormat(WIDTH, F32),
    "lanes": UnquantizedFormat(WIDTH, BF16, 16),
    "groups": GroupScaledFormat(RANK, WIDTH - RANK, BF16, 4),
    "groups in lanes": LanePaddedFormat(RANK, WIDTH - RANK, BF16, 4, lanes=8),
    "tensor": TensorScaledFormat(WIDTH, (0.3, 0.02), 16),
}


LANE_FORMATS: dict[str, RowFormat] = {
    "bf16": UnquantizedFormat(576, BF16, 128),
    "groups": LanePaddedFormat(512, 64, BF16, lanes=128),
    "tensor": TensorScaledFormat(576, (1.0,) * 4, 128),
}


def on_a_device(form: RowFormat, batch: int, tokens: int, heads: int, pages: int) -> tuple:
    """Shapes of the operands at the widths of GLM-5.2, for sequences of so many pages of 64 rows."""
    make = jax.ShapeDtypeStruct
    return (
        make((batch, tokens, heads, 576), BF16),
        jax.eval_shape(functools.partial(empty_stack, form, (4, batch * pages, 64))),
        make((), jnp.int32),
        make((batch, pages), jnp.int32),
        make((batch, tokens), jnp.int32),
        make((batch, tokens, pages * 64), jnp.bool_),
    )


def setting(
    form: RowFormat,
    batch: int,
    tokens: int,
    page: int,
    pages: int,
    *,
    heads: int = 3,
    dtype: str = "float32",
    seed: int = 0,
) -> list:
    """The operands of `dense_mla`; slots that were never written hold NaN or infinity."""
    generator = np.random.default_rng(seed)
    count = batch * pages + 1
    table = generator.permutation(count)[: batch * pages].reshape(batch, pages).astype(np.int32)
    lengths = np.minimum(generator.integers(tokens, tokens + page * pages, batch), page * pages)
    positions = (lengths[:, None] - tokens + np.arange(tokens)).astype(np.int32)
    written = np.zeros((2, count, page), bool)
    for row in range(batch):
        for place in range(lengths[row]):
            written[1, table[row, place // page], place % page] = True
    values = jnp.asarray(generator.standard_normal((2, count, page, WIDTH)), jnp.float32)
    stack = empty_stack(form, (2, count, page))
    poison = jnp.asarray(generator.choice([np.nan, np.inf], (2, count, page, 1)))
    parts = {
        name: jnp.where(written[..., None], part, poison.astype(part.dtype))
        for name, part in encode_rows(stack, values, 1).items()
    }
    stack = PackedStack(parts, form) if isinstance(stack, PackedStack) else parts["values"]
    mask = generator.random((batch, tokens, pages * page)) < 0.4
    mask &= np.arange(pages * page) <= positions[..., None]
    mask[0, -1] = False
    mask[:, :, : min(page * 2, pages * page - 1)] &= generator.random() < 0.5  # whole blocks that nobody attends to
    queries = jnp.asarray(generator.standard_normal((batch, tokens, heads, WIDTH)), dtype)
    return [queries, stack, jnp.int32(1), jnp.asarray(table), jnp.asarray(positions), jnp.asarray(mask)]


def plain(queries, latent, layer, table, positions, mask):
    return sparse_mla_reference(queries, latent, layer, table, positions, Selection(mask=mask), SCALE, RANK)


def ours(*operands, backend: str = "interpret", blocks: DenseTileSizes | None = None):
    return dense.dense_forward(*operands, SCALE, RANK, target=Target.of(backend), blocks=blocks)


def same(got, expected, atol: float = 2e-6) -> None:
    (out, lse), (plain_out, plain_lse) = got, expected
    assert out.dtype == plain_out.dtype
    assert lse.dtype == jnp.float32
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(plain_lse))
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(plain_out, np.float32), atol=atol)
    np.testing.assert_allclose(lse, plain_lse, atol=atol, rtol=1e-5)
    assert (np.asarray(out, np.float32)[np.isneginf(lse)] == 0).all()


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", quickly(FORMATS, *list(FORMATS)[::2]))
def test_equals_the_reference_in_every_format(name: str) -> None:
    operands = setting(FORMATS[name], 2, 3, 4, 5)
    same(jax.jit(functools.partial(ours, blocks=DenseTileSizes(3, 8, 9, 8)))(*operands), plain(*operands))


@pytest.mark.slow
def test_bfloat16_queries_in_parts() -> None:
    """Several tiles, blocks, and parts of queries and of keys, whole lanes wide as on a TPU."""
    operands = setting(FORMATS["lanes"], 1, 5, 64, 6, heads=16, dtype="bfloat16")
    same(
        jax.jit(functools.partial(ours, blocks=DenseTileSizes(4, 256, 32, 128)))(*operands), plain(*operands), atol=2e-2
    )


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(st.data())
def test_odd_shapes(data: st.DataObject) -> None:
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    tokens, page = draw(1, 4), draw(1, 4)
    pages = -(-tokens // page) + draw(0, 4)
    operands = setting(FORMATS["plain"], draw(1, 3), tokens, page, pages, heads=draw(1, 3), seed=draw(0, 9))
    blocks = DenseTileSizes(draw(1, 2), draw(1, 2) * page, 2, 64)
    same(jax.jit(functools.partial(ours, blocks=blocks))(*operands), plain(*operands))


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("name", "pages", "block"),
    quickly(
        [(name, *sizes) for name in ("plain", "groups in lanes") for sizes in ((1, 2), (3, 4), (3, 2), (2, 16))],
        ("plain", 3, 4),
        ("groups in lanes", 3, 2),
    ),
)
def test_blocks_longer_than_the_sequence(monkeypatch, name: str, pages: int, block: int) -> None:
    """Whole lanes of a short or odd number of pages reach past the last page: its neighbours' rows are not read."""
    monkeypatch.setattr(dense_tile_sizes, "pages_of", lambda *_: block)
    operands = setting(FORMATS[name], 2, 2, 4, pages)
    same(jax.jit(ours)(*operands), plain(*operands))


def test_positions_past_the_capacity_read_nothing_past_the_table() -> None:
    operands = setting(FORMATS["plain"], 2, 2, 4, 3)
    operands[1] = jnp.nan_to_num(operands[1], nan=1.0, posinf=2.0)
    operands[4] = operands[4].at[:, -1].set(4 * 3 + 5)
    operands[5] = operands[5].at[:, -1].set(True)
    same(jax.jit(functools.partial(ours, blocks=DenseTileSizes(2, 8, 9, 8)))(*operands), plain(*operands))


def test_nothing_to_attend_to() -> None:
    """A query of padding may hold anything; sequences without any block do not stop the copies of others."""
    operands = setting(FORMATS["plain"], 4, 2, 2, 3)
    operands[0] = operands[0].at[1:3].set(jnp.nan)
    operands[4] = operands[4].at[1:3].set(-1)
    operands[5] = operands[5].at[1:3].set(False).at[0].set(False)
    out, lse = jax.jit(ours)(*operands)
    assert (np.asarray(out[:3]) == 0).all()
    assert np.isneginf(lse[:3]).all()
    clean = [jnp.nan_to_num(operands[0]), *operands[1:]]
    same((out, lse), plain(*clean))


def test_no_races(racing: str) -> None:
    operands = setting(FORMATS["groups in lanes"], 2, 2, 4, 5)
    same(ours(*operands, backend=racing, blocks=DenseTileSizes(1, 8, 3, 8)), plain(*operands))


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["plain", "groups in lanes"])
def test_gradient(name: str) -> None:
    """Of outputs and log-sum-exps, by queries and rows; a query of padding holds NaN, slots never written too."""
    operands = setting(FORMATS[name], 2, 3, 4, 3)
    operands[4] = operands[4].at[1, 0].set(-1)
    operands[5] = operands[5].at[1, 0].set(False)

    def loss(function, queries, stack):
        out, lse = function(queries, stack, *operands[2:])
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0) ** 2)

    kernel = functools.partial(dense.dense_mla, scale=SCALE, kv_lora_rank=RANK, target=Target.of("interpret"))
    got = jax.jit(jax.grad(functools.partial(loss, kernel), argnums=(0, 1)))(
        operands[0].at[1, 0].set(jnp.nan), operands[1]
    )
    expected = jax.grad(functools.partial(loss, plain), argnums=(0, 1))(*operands[:2])
    chex.assert_trees_all_equal_shapes_and_dtypes(got, expected)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(mine, np.float32), np.asarray(theirs, np.float32), atol=2e-5, rtol=1e-2)
    if name == "plain":  # scales of slots never written are not numbers, and so is what the codes there would change
        assert all(np.isfinite(part).all() for part in parts_of(got[1]).values())


def test_the_cost_is_what_the_reference_counts() -> None:
    batch, tokens, heads, context = 1, 8, 16, 512
    stack = jax.ShapeDtypeStruct((1, 8, 64, WIDTH * 64), jnp.float32)
    shapes = [((batch, tokens, heads, WIDTH * 64), F32), ((), jnp.int32), ((batch, 8), jnp.int32)]
    queries, layer, table = (jax.ShapeDtypeStruct(*shape) for shape in shapes)
    positions = jax.ShapeDtypeStruct((batch, tokens), jnp.int32)
    mask = jax.ShapeDtypeStruct((batch, tokens, context), jnp.bool_)
    run = jax.jit(lambda q, s, n, t, p, m: sparse_mla_reference(q, s, n, t, p, Selection(mask=m), SCALE, RANK * 64))
    counted = run.lower(queries, stack, layer, table, positions, mask).compile().cost_analysis()
    mine = cost(batch, tokens, heads, context, WIDTH * 64, RANK * 64, 4 * WIDTH * 64, 4)
    assert math.isclose(mine.flops, counted["flops"], rel_tol=0.02)
    rows = context * WIDTH * 64 * 4
    assert mine.bytes_accessed == rows + tokens * heads * ((WIDTH + RANK) * 64 * 4 + 4) + tokens * context


@pytest.mark.parametrize("tokens", [1, 5, 8, 9, 2048])
def test_tiles_are_even(tokens: int) -> None:
    for chip in CHIPS.values():
        blocks = choose(Target(chip), tokens, 64)
        assert blocks.queries * 64 <= 512
        assert -(-tokens // blocks.queries) * blocks.queries - tokens < blocks.queries


@pytest.mark.parametrize(
    ("chip", "batch", "tokens", "heads", "pages", "name"),
    [
        ("v5e", 1, 1, 64, 1, "bf16"),
        ("v5p", 3, 4, 16, 3, "groups"),
        ("v6e", 1, 960, 16, 15, "bf16"),
        ("tpu7x", 2, 1, 64, 7, "tensor"),
    ],
)
def test_compiles_for_odd_numbers_of_pages(
    chip: str, batch: int, tokens: int, heads: int, pages: int, name: str
) -> None:
    """What `generate -n 24` and prompts of up to 960 tokens ask for; the grid has the others."""
    run = functools.partial(dense.dense_mla, scale=0.0625, kv_lora_rank=512, target=Target.of(f"tpu:{chip}"))
    step = compiled(run, on_a_device(LANE_FORMATS[name], batch, tokens, heads, pages), chip)
    assert [kernel.name for kernel in step.program.kernels] == ["dense_mla"]


@pytest.mark.parametrize("chip", quickly(CHIPS, "v5e", "v5p"))
def test_compiles_without_copies(chip: str) -> None:
    for batch, tokens, context, name in ((8, 1, 32768, "groups"), (1, 16, 8192, "bf16")):
        operands = on_a_device(LANE_FORMATS[name], batch, tokens, 64, context // 64)
        run = functools.partial(dense.dense_mla, scale=0.0625, kv_lora_rank=512, target=Target.of(f"tpu:{chip}"))
        step = compiled(run, operands, chip)
        assert any("dense_mla" in kernel.name for kernel in step.program.kernels)
        assert all(copy.bytes < 4 * 2**20 for copy in step.program.copies)  # the mask of a decode step at most
        assert step.memory.temporaries < 16 * 2**20
