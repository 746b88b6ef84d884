"""The cache's rule from position to slot, and reading and writing rows by it, against plain numpy."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm52_jax.cache.pages import context_rows, gather_rows, slots_of
from glm52_jax.kernels import PORTABLE
from glm52_jax.kernels.cache_write.api import write_rows

LAYERS, BATCH, CAPACITY, WIDTH = 2, 2, 24, 3
WRITE = {b: jax.jit(lambda *a, b=b: write_rows(*a, backend=b), donate_argnums=0) for b in PORTABLE}
GATHER, CONTEXT, SLOTS = jax.jit(gather_rows), jax.jit(context_rows), jax.jit(slots_of, static_argnums=(2, 3))


@st.composite
def pools(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """A stack of pages with different numbers in every slot, and a table of pages in any order, with pages to spare.

    Some entries of the table are no pages of the pool: nothing is there, and nothing is written.
    """
    page_size = draw(st.sampled_from([1, 3, 5, 8]))
    pages = -(-CAPACITY // page_size)
    order = draw(st.permutations(range(BATCH * pages + 2)))
    table = np.array(order[: BATCH * pages], np.int32).reshape(BATCH, pages)
    for place in draw(st.lists(st.integers(0, table.size - 1), max_size=2)):
        table.flat[place] = draw(st.sampled_from([-1, -7, len(order), len(order) + 3]))
    stack = -1.0 - np.arange(LAYERS * (BATCH * pages + 2) * page_size * WIDTH, dtype=np.float32)
    return stack.reshape(LAYERS, -1, page_size, WIDTH), table


@st.composite
def runs(draw: st.DrawFn, tokens: int) -> np.ndarray:
    """Positions of a chunk: a run of consecutive ones in each row, with padding on either side, or none at all.

    A run may end past the capacity, or begin there.
    """
    positions = np.full((BATCH, tokens), -1, np.int32)
    for row in range(BATCH):
        count = draw(st.integers(0, tokens))
        first, column = draw(st.integers(0, CAPACITY + 3)), draw(st.integers(0, tokens - count))
        positions[row, column : column + count] = first + np.arange(count)
    return positions


def flat(stack: np.ndarray, layer: int) -> np.ndarray:
    return stack[layer].reshape(-1, WIDTH)


def slot(table: np.ndarray, stack: np.ndarray, row: int, position: int) -> int:
    """-1 where there is none."""
    column, page_size = position // stack.shape[2], stack.shape[2]
    page = int(table[row, column]) if 0 <= column < table.shape[1] else -1
    return page * page_size + position % page_size if 0 <= page < stack.shape[1] else -1


@pytest.mark.quick(4)
@pytest.mark.parametrize("backend", PORTABLE)
@pytest.mark.parametrize("tokens", [1, 2, 6, 11])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_rows_are_written_where_their_positions_are(backend: str, tokens: int, data: st.DataObject) -> None:
    stack, table = data.draw(pools())
    positions, layer = data.draw(runs(tokens)), data.draw(st.integers(0, LAYERS - 1))
    rows = np.arange(BATCH * tokens * WIDTH, dtype=np.float32).reshape(BATCH, tokens, WIDTH)
    rows[positions < 0] = np.nan  # what padding holds must not matter
    expected = stack.copy()
    for row, column in np.argwhere(positions >= 0):
        where = slot(table, stack, row, positions[row, column])
        if where >= 0:
            flat(expected, layer)[where] = rows[row, column]
    got = WRITE[backend](stack.copy(), layer, rows, table, positions)
    np.testing.assert_array_equal(got, expected)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_rows_are_read_where_they_were_written(data: st.DataObject) -> None:
    stack, table = data.draw(pools())
    layer = data.draw(st.integers(0, LAYERS - 1))
    wanted = data.draw(st.lists(st.integers(-1, CAPACITY + 3), min_size=2 * BATCH, max_size=2 * BATCH))
    wanted = np.array(wanted, np.int32).reshape(BATCH, 2)
    got, where = np.asarray(GATHER(stack, layer, table, wanted)), np.asarray(SLOTS(table, wanted, *stack.shape[2:0:-1]))
    for row, column in np.ndindex(wanted.shape):
        assert where[row, column] == slot(table, stack, row, wanted[row, column])
        if where[row, column] < 0:
            assert (got[row, column] == 0).all()
        else:
            np.testing.assert_array_equal(got[row, column], flat(stack, layer)[where[row, column]])


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_context_in_order_of_position(data: st.DataObject) -> None:
    stack, table = data.draw(pools())
    layer, page_size = data.draw(st.integers(0, LAYERS - 1)), stack.shape[2]
    lengths = np.array(data.draw(st.lists(st.integers(0, CAPACITY), min_size=BATCH, max_size=BATCH)), np.int32)
    got = np.asarray(CONTEXT(stack, layer, table, lengths))
    assert got.shape == (BATCH, table.shape[1] * page_size, WIDTH)
    for row, position in np.ndindex(got.shape[:2]):
        where = slot(table, stack, row, position) if position < lengths[row] else -1
        expected = flat(stack, layer)[where] if where >= 0 else np.zeros(WIDTH)
        np.testing.assert_array_equal(got[row, position], expected)


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_the_stack_is_written_in_place(tokens: int) -> None:
    """A donated cache is updated, not copied: the compiled write needs no room of its size."""
    stack = np.zeros((4, 64, 16, 128), np.float32)
    table, rows = np.arange(8, dtype=np.int32).reshape(2, 4), np.zeros((2, tokens, 128), np.float32)
    positions = np.tile(np.arange(tokens, dtype=np.int32), (2, 1))
    compiled = WRITE["cpu"].lower(stack, 1, rows, table, positions).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < stack.nbytes // 8
    assert "scatter" not in compiled.as_text()
