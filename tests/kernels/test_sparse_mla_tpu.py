"""Sparse attention that gathers, beside the plain one: forms, formats, lists of units, interpreted and compiled."""

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
    encode_rows,
    parts_of,
)
from glm52_jax.kernels import Target
from glm52_jax.kernels.lib.selection import Selection, plan_units, single_units
from glm52_jax.kernels.sparse_mla import tile_sizes, tpu
from glm52_jax.kernels.sparse_mla.api import sparse_mla
from glm52_jax.kernels.sparse_mla.tile_sizes import IMPLEMENTATIONS, RowShape, choose_implementation, times
from glm52_jax.kernels.sparse_mla.tpu import sparse_mla as sparse_mla_tpu
from sharding.compiler.chips import CHIPS
from tests.kernels.compiling import compiled
from tests.kernels.quickly import quickly

RANK, ROPE, SCALE = 6, 4, 0.3
BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
FORMATS: dict[str, RowFormat] = {
    "float32": UnquantizedFormat(RANK + ROPE, F32),
    "bf16": UnquantizedFormat(RANK + ROPE, BF16),
    "lanes": UnquantizedFormat(RANK + ROPE, BF16, 16),
    "fp8": LanePaddedFormat(RANK, ROPE, BF16, 4, lanes=16),
    "fp8 float32": LanePaddedFormat(RANK, ROPE, F32, 4, lanes=16),
    "fp8 tensor": TensorScaledFormat(RANK + ROPE, (3.0, 0.5), 16),
    "fp8 groups": GroupScaledFormat(RANK, ROPE, F32, 4),
}
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def setting(name: str, batch: int, tokens: int, heads: int, page: int, pages: int, k: int, seed: int = 0) -> list:
    """Selections of random sizes in random order; NaN or infinity in all rows that no query of a sequence selects."""
    generator = np.random.default_rng(seed)
    form, count, room = FORMATS[name], batch * pages + 2, page * pages
    table = generator.permutation(count)[: batch * pages].reshape(batch, pages).astype(np.int32)
    positions = np.sort(np.stack([generator.permutation(room)[:tokens] for _ in range(batch)]), 1).astype(np.int32)
    indices = np.full((batch, tokens, k), -1, np.int32)
    used = np.zeros((2, count, page), bool)
    for row in range(batch):
        for token in range(tokens):
            most = min(k, positions[row, token] + 1)
            size = generator.choice([0, 1, most, max(most - 1, 0), generator.integers(0, most + 1)])
            size = min(size, most)
            chosen = generator.permutation(positions[row, token] + 1)[:size]
            indices[row, token, generator.permutation(k)[:size]] = chosen
            used[1, table[row, chosen // page], chosen % page] = True
    stack = empty_stack(form, (2, count, page))
    written = encode_rows(stack, jnp.asarray(generator.standard_normal((2, count, page, RANK + ROPE)), jnp.float32), 1)
    poison = jnp.asarray(generator.choice([np.nan, np.inf], (2, count, page, 1)))
    parts = {key: jnp.where(used[..., None], part, poison.astype(part.dtype)) for key, part in written.items()}
    stack = parts["values"] if isinstance(stack, jax.Array) else stack.replace(parts=parts)
    dtype = jnp.float32 if "float32" in name or "groups" in name else jnp.bfloat16
    queries = generator.standard_normal((batch, tokens, heads, RANK + ROPE)).astype(dtype)
    return [queries, stack, 1, table, positions, Selection(indices=jnp.asarray(indices))]


def both(arguments: list, form: str | None, backend: str = "interpret:v5p") -> tuple[np.ndarray, np.ndarray]:
    run = functools.partial(sparse_mla_tpu, scale=SCALE, kv_lora_rank=RANK, target=Target.of(backend), form=form)
    got = jax.jit(run, compiler_options=QUICK)(*arguments)
    plain = functools.partial(sparse_mla, scale=SCALE, kv_lora_rank=RANK, backend="reference")
    expected = jax.jit(plain)(*arguments)
    close = {"atol": 2e-5, "rtol": 2e-5} if arguments[0].dtype == np.float32 else {"atol": 3e-2, "rtol": 3e-2}
    for ours, other in zip(got, expected, strict=True):
        assert (ours.dtype, ours.shape) == (other.dtype, other.shape)
        np.testing.assert_allclose(np.asarray(ours, np.float32), np.asarray(other, np.float32), **close)
    capacity = np.shape(arguments[3])[1] * next(iter(parts_of(arguments[1]).values())).shape[2]
    indices = np.asarray(arguments[5].indices)
    nothing = ~((indices >= 0) & (indices < capacity)).any(-1)
    assert (np.asarray(got[0], np.float32)[nothing] == 0).all()
    assert (np.asarray(got[1])[nothing] == -np.inf).all()
    return np.asarray(got[0], np.float32), np.asarray(got[1])


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("name", "form"),
    quickly(
        [*((name, "rows") for name in FORMATS), ("bf16", "blocks"), ("fp8 float32", "blocks")],
        *((name, "rows") for name in list(FORMATS)[::2]),
        ("bf16", "blocks"),
    ),
)
def test_formats(name: str, form: str) -> None:
    both(setting(name, 2, 3, 3, 8, 5, 21), form)


@given(
    name=st.sampled_from(list(FORMATS)),
    form=st.sampled_from(["rows", "blocks"]),
    page=st.sampled_from([1, 2, 3, 4, 16]),
    pages=st.integers(2, 7),
    tokens=st.sampled_from([1, 2, 6]),
    batch=st.sampled_from([1, 3]),
    heads=st.sampled_from([1, 3, 16]),
    k=st.sampled_from([1, 7, 8, 9, 40]),
    seed=st.integers(0, 99),
)
@settings(max_examples=3, deadline=None)
def test_shapes(
    name: str, form: str, page: int, pages: int, tokens: int, batch: int, heads: int, k: int, seed: int
) -> None:
    pages = max(pages, -(-tokens // page))
    both(setting(name, batch, tokens, heads, page, pages, k, seed), form)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "planned"), [("rows", 2), ("blocks", 8), ("rows", 8)])
def test_lists_of_units_made_before(form: str, planned: int) -> None:
    """Those of another size than the form's are left aside."""
    arguments = setting("bf16", 2, 2, 3, 8, 9, 40)
    arguments[5] = arguments[5].planned(planned)
    both(arguments, form)


@pytest.mark.quick(1)
@pytest.mark.parametrize("form", IMPLEMENTATIONS)
def test_forms_agree_with_padding_queries_between(form: str) -> None:
    """Padding costs nothing, may hold anything and gives nothing, wherever it stands."""
    arguments = setting("bf16", 3, 4, 3, 8, 9, 20, seed=3)
    for row, token in ((0, 0), (0, 1), (1, 3), (2, 2), (2, 3)):
        arguments[4][row, token] = -1
        arguments[0][row, token] = np.nan
        arguments[5] = Selection(indices=arguments[5].indices.at[row, token].set(-1))
    if form == "dense":  # which reads what nobody selects, up to the last position
        arguments[1] = jnp.nan_to_num(arguments[1], nan=1.0, posinf=2.0)
    arguments[0] = np.nan_to_num(arguments[0].astype(np.float32)).astype(jnp.bfloat16)
    both(arguments, form)


@pytest.mark.quick(1)
@pytest.mark.parametrize("counts", [(0, 9, 0, 0, 40), (0, 16, 32, 8), (0,)])
def test_lengths_of_lists(counts: tuple[int, ...]) -> None:
    """Chunks of one list are copied during those of another, whichever lists have none."""
    arguments = setting("float32", len(counts), 1, 3, 8, 9, 40, seed=5)
    arguments[1] = jnp.nan_to_num(arguments[1], nan=1.0, posinf=2.0)
    generator = np.random.default_rng(0)
    indices = np.full((len(counts), 1, 40), -1, np.int32)
    for row, count in enumerate(counts):
        indices[row, 0, :count] = generator.permutation(72)[:count]
    arguments[4][:] = 71
    arguments[5] = Selection(indices=jnp.asarray(indices))
    both(arguments, "rows", "interpret:v5p" if len(counts) == 5 else "interpret:v6e")


@pytest.mark.quick(1)
@pytest.mark.parametrize("form", ["rows", "blocks"])
def test_no_races(form: str, racing: str) -> None:
    """Of rows that are copied as they are, on one core, and of those that share words, on two."""
    both(setting("float32", 2, 1, 2, 8, 3, 18, seed=2), form, f"{racing}:v6e")
    if form == "rows":
        both(setting("bf16", 2, 1, 2, 8, 3, 18, seed=2), form, f"{racing}:v5p")


@pytest.mark.parametrize(("name", "form"), quickly([("bf16", "rows"), ("fp8", "blocks")], ("bf16", "rows")))
def test_copies_in_a_straight_line(monkeypatch: pytest.MonkeyPatch, name: str, form: str) -> None:
    """As compiled kernels start them; lists of several chunks, of one, and of none."""
    monkeypatch.setattr(tpu, "straight_line", lambda target: True)
    both(setting(name, 2, 2, 3, 8, 9, 40, seed=4), form)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["rows", "blocks"])
@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_the_sizes_of_a_device(monkeypatch: pytest.MonkeyPatch, name: str, form: str) -> None:
    """Chunks of whole lanes in a straight line, for 2,048 of 4,096 positions and 64 heads of the released widths."""
    monkeypatch.setattr(tpu, "straight_line", lambda target: True)
    monkeypatch.setattr(tpu, "_INTERPRETED_LANES", 128)
    generator = np.random.default_rng(0)
    rows, batch, tokens, pages, k = REAL[name], 1, 2, 64, 2048
    table = generator.permutation(batch * pages).reshape(batch, pages).astype(np.int32)
    values = jnp.asarray(generator.standard_normal((2, batch * pages, 64, 576)), jnp.float32)
    stack = empty_stack(rows, (2, batch * pages, 64)).replace(parts=rows.encode(values, 1))
    queries = jnp.asarray(generator.standard_normal((batch, tokens, 64, 576)), jnp.bfloat16)
    positions = np.tile(np.array([[3000, 4095]], np.int32), (batch, 1))
    indices = np.full((batch, tokens, k), -1, np.int32)
    indices[:, 0, :1500] = generator.permutation(3001)[:1500]
    indices[:, 1] = generator.permutation(4096)[:k]
    arguments = queries, stack, 1, table, positions, Selection(indices=jnp.asarray(indices))
    got, expected = (
        jax.jit(functools.partial(run, scale=576**-0.5, kv_lora_rank=512, **options))(*arguments)
        for run, options in (
            (sparse_mla_tpu, {"target": Target.of("interpret:v5p"), "form": form}),
            (sparse_mla, {"backend": "reference"}),
        )
    )
    np.testing.assert_allclose(*(np.asarray(out[0], np.float32) for out in (got, expected)), atol=1e-2)
    np.testing.assert_allclose(got[1], expected[1], atol=1e-2)


@pytest.mark.parametrize("form", quickly(IMPLEMENTATIONS, "dense", "rows"))
def test_selected_positions_past_the_capacity_are_skipped(form: str) -> None:
    """In lists, in units made before, and in the mask made of a list: there is no page to read them from."""
    arguments = setting("bf16", 2, 2, 3, 8, 5, 12, seed=6)
    arguments[1] = jnp.nan_to_num(arguments[1], nan=1.0, posinf=2.0)
    indices = np.asarray(arguments[5].indices).copy()
    indices[:, :, :4] = [40, 41, 47, 1 << 20]
    arguments[5] = Selection(indices=jnp.asarray(indices))
    kept = np.where(indices < 40, indices, -1)
    both(arguments, form)
    if form == "blocks":
        both([*arguments[:5], arguments[5].planned(8)], form)
    plain = jax.jit(functools.partial(sparse_mla, scale=SCALE, kv_lora_rank=RANK, backend="reference"))
    without = plain(*arguments[:5], Selection(indices=jnp.asarray(kept)))
    for ours, other in zip(plain(*arguments), without, strict=True):
        np.testing.assert_array_equal(ours, other)


@pytest.mark.parametrize("ascending", [False, True])
@pytest.mark.parametrize("unit", [2, 8])
def test_units(unit: int, ascending: bool) -> None:
    generator = np.random.default_rng(unit)
    for k in (1, 7, 33):
        indices = np.full((2, 3, k), -1, np.int32)
        for row in indices.reshape(-1, k):
            count = generator.integers(0, k + 1)
            values = generator.permutation(3 * k)[:count]
            row[np.sort(generator.permutation(k)[:count])] = np.sort(values) if ascending else values
        got = np.asarray(plan_units(jnp.asarray(indices), unit, ascending=ascending))
        for listed, entries in zip(indices.reshape(-1, k), got.reshape(-1, k), strict=True):
            bits: dict[int, int] = {}
            for position in sorted(listed[listed >= 0]):
                bits[position // unit] = bits.get(position // unit, 0) | 1 << position % unit
            expected = [number << 8 | rows for number, rows in sorted(bits.items())]
            np.testing.assert_array_equal(entries, expected + [0] * (k - len(expected)))


def test_units_of_one_row_each() -> None:
    got = single_units(jnp.asarray([5, -1, 0, 4]), 2)
    np.testing.assert_array_equal(got, [2 << 8 | 2, 0, 1, 2 << 8 | 1])


def test_a_list_as_a_mask() -> None:
    indices = jnp.asarray([[[300, -1, 0, 127], [-1, 128, 3, 299]]], jnp.int32)
    mask = np.asarray(Selection(indices=indices).as_mask(301))
    assert mask.shape == (1, 2, 301)
    assert [set(np.flatnonzero(row)) for row in mask[0]] == [{0, 127, 300}, {3, 128, 299}]


def test_a_selection_with_units_is_a_branch_of_a_conditional() -> None:
    def chosen(new: jax.Array) -> Selection:
        made = Selection(indices=jnp.asarray([[[3, 2, -1]]], jnp.int32)).planned(2)
        empty = Selection.empty(1, 1, k=3, unit=2)
        return jax.lax.cond(new, lambda: made, lambda: empty)

    got = jax.jit(chosen)(jnp.asarray(True))
    assert got.unit == 2
    np.testing.assert_array_equal(got.units[0, 0], [1 << 8 | 3, 0, 0])
    assert (jax.jit(chosen)(jnp.asarray(False)).units == 0).all()


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("row", [RowShape(1280, 2, 1), RowShape(768, 4, 2), RowShape(640, 4, 1)])
@pytest.mark.parametrize("tokens", [1, 6, 2048])
def test_short_contexts_are_read_and_long_ones_gathered(chip: str, row: RowShape, tokens: int) -> None:
    """The form changes once, where the times of two are equal."""
    capacities = [1 << bits for bits in range(11, 21)]
    found = [choose_implementation(CHIPS[chip], tokens, min(2048, size), size, row) for size in capacities]
    assert found[0] == "dense"
    assert found[-1] == "rows"
    first = next(number for number, form in enumerate(found) if form != "dense")
    assert "dense" not in found[first:]
    for size, form in zip(capacities, found, strict=True):
        taken = times(CHIPS[chip], tokens, min(2048, size), size, row)
        assert taken[form] == min(taken["dense"], taken["rows"])
        # Blocks are left out for what their lists cost to make; they could not have saved much.
        assert taken["blocks"] > 0.75 * taken[form]


def test_blocks_where_selected_rows_are_neighbours() -> None:
    row = RowShape(1280, 2, 1)
    assert choose_implementation(CHIPS["v6e"], 1, 2048, 131072, row, per_block=8) == "blocks"
    assert choose_implementation(CHIPS["v6e"], 1, 2048, 131072, row, per_block=1) == "rows"


@pytest.mark.slow
def test_both_sides_of_a_crossover(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context of one page is read, one of 16 is gathered from."""
    seen = []
    choose = tile_sizes.choose_implementation
    monkeypatch.setattr(tile_sizes, "choose_implementation", lambda *a: seen.append(choose(*a)) or seen[-1])
    for pages in (1, 16):
        arguments = setting("lanes", 2, 1, 3, 8, pages, 4)
        finite = {name: jnp.nan_to_num(part, nan=1.0, posinf=2.0) for name, part in parts_of(arguments[1]).items()}
        arguments[1] = arguments[1].replace(parts=finite)
        both(arguments, None)
    assert seen == ["dense", "rows"]


def test_cost() -> None:
    found = tile_sizes.cost(3, 64, 2048, 576, 512, 1280, 2)
    assert found.flops == 2 * 3 * 64 * 2048 * (576 + 512)
    assert found.transcendentals == 3 * 64 * 2048
    assert found.bytes_accessed == 3 * (2048 * 1280 + 64 * (576 + 512) * 2 + 64 * 4)


REAL: dict[str, RowFormat] = {"bf16": UnquantizedFormat(576, BF16, 128), "fp8": LanePaddedFormat(512, 64, BF16)}


@pytest.mark.parametrize(
    ("chip", "name", "form", "batch", "tokens"),
    [
        ("v5e", "bf16", "rows", 8, 1),
        ("v5p", "bf16", "rows", 1, 1),
        ("v6e", "fp8", "blocks", 8, 6),
        ("tpu7x", "fp8", "rows", 8, 1),
    ],
)
def test_compiles_without_a_copy_of_the_cache(chip: str, name: str, form: str, batch: int, tokens: int) -> None:
    pages = 131072 // 64
    latent = jax.eval_shape(lambda: empty_stack(REAL[name], (2, batch * pages, 64)))
    integers = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    selection = Selection(indices=integers((batch, tokens, 2048)))
    run = functools.partial(
        sparse_mla_tpu, scale=576**-0.5, kv_lora_rank=512, target=Target.of(f"tpu:{chip}"), form=form
    )
    queries = jax.ShapeDtypeStruct((batch, tokens, 64, 576), jnp.bfloat16)
    step = compiled(
        run, (queries, latent, integers(()), integers((batch, pages)), integers((batch, tokens)), selection), chip
    )
    assert any(f"sparse_mla_{form}" in kernel.name for kernel in step.program.kernels)
    assert not step.program.copies
    assert step.memory.temporaries < 64 * 2**20


@pytest.mark.parametrize("row", [RowShape(768, 4, 2), RowShape(640, 4, 1)], ids=["groups", "tensor"])
@pytest.mark.parametrize("chip", ["v5p", "v6e"])
def test_float8_rows_are_gathered_where_decoding_all_of_them_takes_longer(chip: str, row: RowShape) -> None:
    """One query at 32K: by the schedules of both forms, reading densely takes 1.7 to 2.8 times as long as gathering."""
    assert choose_implementation(CHIPS[chip], 1, 2048, 32 * 1024, row) == "rows"
    found = times(CHIPS[chip], 1, 2048, 32 * 1024, row)
    assert 1.4 < found["dense"] / found["rows"] < 3
