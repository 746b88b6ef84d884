"""The selection for TPUs beside a stable sort: ties, zeros, NaN, clusters, candidates that miss, few to choose from."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from glm52_jax.kernels.topk.api import compact, kth_best, topk, topk_mask
from glm52_jax.kernels.topk.tile_sizes import choose, cost
from tests.kernels.compiling import compiled
from tests.kernels.quickly import quickly

VALUES = st.sampled_from([-np.inf, -3.5, -1.0, -1e-30, -1e-40, -0.0, 0.0, 1e-45, 1e-38, 0.25, 3e38, np.inf, np.nan])


@functools.cache
def lists(k: int, backend: str = "interpret"):
    return jax.jit(lambda scores: topk(scores, k, backend=backend))


@functools.cache
def last(k: int):
    """The mask, and the last one by a list of positions."""
    return jax.jit(
        lambda scores, positions: (
            topk_mask(scores, k, backend="interpret"),
            *kth_best(scores, positions, k, backend="interpret"),
        )
    )


def plain(scores: np.ndarray) -> np.ndarray:
    """The scores by which is chosen, bit for bit but for the sign of zero."""
    return np.where(np.isnan(scores), np.float32(-np.inf), np.where(np.abs(scores) == 0, np.float32(0), scores))


def order(scores: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Higher score first, then lower position; compared as float64, to which no float32 is zero but zero."""
    return np.lexsort((positions, -plain(scores).astype(np.float64)), axis=-1)


def chosen(scores: np.ndarray, k: int) -> np.ndarray:
    mask = np.zeros(scores.shape, bool)
    np.put_along_axis(
        mask, order(scores, np.broadcast_to(np.arange(scores.shape[-1]), scores.shape))[..., :k], True, -1
    )
    return mask & (plain(scores) > -np.inf)


def check_lists(scores: np.ndarray, k: int, backend: str = "interpret") -> None:
    indices, values = (np.asarray(part) for part in lists(k, backend)(scores))
    assert indices.shape == values.shape == (*scores.shape[:-1], k)
    expected = chosen(scores, k).reshape(-1, scores.shape[-1])
    for row, mask, found, value in zip(
        plain(scores).reshape(expected.shape), expected, indices.reshape(-1, k), values.reshape(-1, k), strict=True
    ):
        places = np.flatnonzero(mask)
        np.testing.assert_array_equal(found, np.pad(places, (0, k - len(places)), constant_values=-1))
        bits = np.pad(row[places], (0, k - len(places)), constant_values=-np.inf).view(np.int32)
        np.testing.assert_array_equal(value.view(np.int32), bits)


def check_last(scores: np.ndarray, k: int) -> None:
    generator = np.random.default_rng(1)
    positions = generator.permuted(np.broadcast_to(np.arange(scores.shape[-1]) * 5, scores.shape), axis=-1)
    positions = positions.astype(np.int32)
    mask, score, position = (np.asarray(part) for part in last(k)(scores, positions))
    np.testing.assert_array_equal(mask, chosen(scores, k))
    at = order(scores, positions)[..., k - 1 : k]
    expected = np.take_along_axis(plain(scores), at, -1)[..., 0]
    np.testing.assert_array_equal(score.view(np.int32), expected.view(np.int32))
    real = expected > -np.inf
    np.testing.assert_array_equal(position[real], np.take_along_axis(positions, at, -1)[..., 0][real])


@pytest.mark.slow
@given(arrays(np.float32, (3, 300), elements=VALUES))
@settings(max_examples=15, deadline=None)
def test_many_equal_scores(scores: np.ndarray) -> None:
    check_lists(scores, 70)
    check_last(scores, 70)


def kinds(shape: tuple[int, ...], k: int) -> dict[str, np.ndarray]:
    """Scores of each kind that the kernel treats differently."""
    generator = np.random.default_rng(0)
    clear = generator.standard_normal(shape).astype(np.float32)
    place = np.arange(shape[-1])
    few = np.full(shape, np.nan, np.float32)
    return {
        "clear": clear,
        "tied": np.round(clear * 2) / 2,
        "all equal": np.zeros(shape, np.float32),
        "nothing": few,
        "one fewer": np.where(place % 7 < 1, clear, few) if shape[-1] // 7 < k else np.where(place < k - 1, clear, few),
        "exactly": np.where(place[::-1] < k, clear, -np.inf),
        "one more": np.where(place[::-1] < k + 1, clear, -np.inf),
        "side by side": np.where((place >= 1000) & (place < 1000 + k), clear + 100, clear),
        # More of one place in a register than are kept as candidates.
        "one place": np.where(place % 1024 == 5, clear + 100, clear),
    }


@pytest.mark.parametrize("kind", kinds((1,), 1))
def test_one_long_row(kind: str) -> None:
    """Each row for itself; candidates of segments, and more than one chunk."""
    sizes = choose(1, 140_000, 300, interpret=True)
    assert sizes.segment
    assert sizes.positions > sizes.chunk
    check_lists(kinds((2, 1, 140_000), 300)[kind], 300)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", kinds((1,), 1))
def test_rows_together(kind: str) -> None:
    """Eight rows at a time, of which the last ones are not there."""
    assert choose(8, 9000, 130, interpret=True).segment
    scores = kinds((9, 9000), 130)[kind]
    check_lists(scores, 130)
    check_last(scores, 130)


@pytest.mark.parametrize(
    ("shape", "k"), quickly([((1,), 1), ((2, 3, 130), 130), ((1, 1, 129), 128)], ((2, 3, 130), 130))
)
def test_small_shapes(shape: tuple[int, ...], k: int) -> None:
    check_lists(kinds(shape, k)["clear"], k)


def test_fewer_candidates_than_asked_for() -> None:
    score, _ = jax.jit(functools.partial(kth_best, k=9, backend="interpret"))(jnp.ones(8), jnp.zeros(8, jnp.int32))
    assert score == -np.inf


@pytest.mark.slow
def test_no_races(racing: str) -> None:
    check_lists(kinds((10, 300), 20)["tied"], 20, racing)


@pytest.mark.parametrize(
    ("chip", "shape", "what"),
    [
        ("v5e", (1, 1, 1 << 20), topk),
        ("v5p", (64, 1, 1 << 17), topk),
        ("v6e", (1, 6, 1 << 17), topk),
        ("tpu7x", (16, 1 << 17), topk_mask),
        ("v5p", (4, 64 * 2048), kth_best),
    ],
)
def test_compiles(chip: str, shape: tuple[int, ...], what) -> None:
    """Without a sort, and without a copy of the scores."""
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32)]
    if what is kth_best:
        arguments.append(jax.ShapeDtypeStruct(shape, jnp.int32))
    step = compiled(lambda *a: what(*a, 2048, backend=f"tpu:{chip}"), arguments, chip)
    assert [kernel.name.split(".")[0] for kernel in step.program.kernels] == ["topk" if what is topk else "topk_last"]
    assert not [copy for copy in step.program.copies if copy.bytes > 4 << 20]
    assert step.memory.temporaries < 8 << 20


def test_cost_and_sizes() -> None:
    """The least that must be moved, and blocks that fill a row."""
    assert cost(8, 1 << 17, 2048).bytes_accessed == 8 * (4 * (1 << 17) + 8 * 2048)
    for rows in (1, 2, 4, 8):
        for positions in (1, 1000, 5000, 20_000, 1 << 15, 200_000, 1 << 20):
            for k in (1, 100, 2048):
                sizes = choose(rows, positions, k)
                assert sizes.positions >= positions
                assert sizes.positions % sizes.chunk == sizes.chunk % (128 * sizes.group) == 0
                assert not sizes.segment or sizes.chunk_registers % sizes.segment == 0
                assert dataclasses.replace(sizes, segment=0).candidates == 0


def test_lists_with_gaps_are_closed_up() -> None:
    """Position 0, gaps anywhere, a list of nothing, a full one, and numbers that only just fit."""
    lists = np.full((4, 40), -1, np.int32)
    lists[0, [3, 4, 17, 39]] = [0, 2, 7, 2**24 - 1]
    lists[2] = np.arange(40) * 3
    lists[3, 38:] = [5, 6]
    got = np.asarray(compact(jnp.asarray(lists), backend="interpret"))
    for row, found in zip(lists, got, strict=True):
        there = row[row >= 0]
        np.testing.assert_array_equal(found, np.pad(there, (0, 40 - len(there)), constant_values=-1))
    np.testing.assert_array_equal(compact(jnp.asarray(lists), backend="reference"), lists)
