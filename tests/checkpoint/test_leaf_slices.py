"""Index arithmetic between leaves and published tensors: boxes of a leaf, put together from tensors, are the leaf."""

import itertools
import math
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from glm52_jax.checkpoint.load import leaf_arrays
from glm52_jax.checkpoint.load.leaf_slices import Box, LeafLayout, box_shape, reads

SIZES = st.integers(1, 4)


@st.composite
def forms(draw: st.DrawFn) -> LeafLayout:
    """Vectors, matrices, matrices whose rows or columns are heads, and a part of each head's rows."""
    lead = tuple(draw(st.lists(SIZES, max_size=3)))
    kind = draw(st.sampled_from(["vector", "matrix", "rows", "columns", "part"]))
    a, b, c = draw(SIZES), draw(SIZES), draw(SIZES)
    if kind == "vector":
        return LeafLayout(lead, (a,), (a,))
    if kind == "matrix":
        return LeafLayout(lead, (a, b), (a, b))
    if kind == "columns":
        return LeafLayout(lead, (a, b * c), (a, b, c))
    start = draw(st.integers(0, b - 1))
    rows = (start, draw(st.integers(start + 1, b))) if kind == "part" else None
    return LeafLayout(lead, (a * b, c), (a, b, c), rows)


def leaf_of(form: LeafLayout, tensors: np.ndarray) -> np.ndarray:
    """The whole leaf, by reshaping."""
    values = tensors.reshape(*form.lead, *form.logical_shape)
    rows = slice(*form.rows) if form.rows else slice(None)
    return values[(slice(None),) * (len(form.lead) + 1) + (rows,)] if len(form.logical_shape) > 1 else values


def cuts(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """A dimension in parts, equal or not."""
    inner = draw(st.sets(st.integers(1, size - 1), max_size=3)) if size > 1 else set()
    ends = [0, *sorted(inner), size]
    return list(itertools.pairwise(ends))


@st.composite
def grids(draw: st.DrawFn) -> tuple[LeafLayout, list[Box]]:
    """A leaf and the boxes of a grid over it, as a sharding gives them, some of them left out."""
    form = draw(forms())
    boxes: list[Box] = [()]
    for size in form.shape:
        boxes = [(*box, part) for box in boxes for part in cuts(draw, size)]
    return form, draw(st.lists(st.sampled_from(boxes), unique=True, min_size=1))


def numbered(form: LeafLayout) -> np.ndarray:
    """Tensors whose values are all different."""
    count = math.prod(form.lead)
    return np.arange(count * math.prod(form.tensor)).reshape(count, *form.tensor)


def put_together(form: LeafLayout, boxes: list[Box], most_rows: int) -> tuple[list[np.ndarray], Counter]:
    """The boxes, and how often each row of each tensor was read."""
    tensors, counts = numbered(form), Counter()
    outs = [np.full(box_shape(box), -1) for box in boxes]
    for read in reads(form, boxes, most_rows):
        assert read.rows[1] - read.rows[0] <= max(most_rows, form.group)
        counts.update((read.number, row) for row in range(*read.rows))
        values = tensors[read.number, slice(*read.rows)].reshape(-1, *form.logical_shape[1:])
        for share in read.shares:
            assert share.whole == (values[share.take].shape == values.shape)
            assert (outs[share.box][share.put] == -1).all()  # each value once
            outs[share.box][share.put] = values[share.take]
    return outs, counts


@given(grids(), st.integers(1, 9))
@settings(max_examples=300, deadline=None)
def test_boxes_put_together_are_the_leaf(grid: tuple[LeafLayout, list[Box]], most_rows: int):
    form, boxes = grid
    whole = leaf_of(form, numbered(form))
    assert whole.shape == form.shape
    outs, counts = put_together(form, boxes, most_rows)
    for box, out in zip(boxes, outs, strict=True):
        np.testing.assert_array_equal(out, whole[tuple(slice(*across) for across in box)])
    # Rows that no box has a value of are not read, and none is read twice, however its columns are dealt.
    asked = numbered(form)[:0].reshape(-1)
    for out in outs:
        asked = np.union1d(asked, out)
    needed = {int(value) // math.prod(form.tensor[1:]) for value in asked}
    groups = {row // form.group for row in needed}
    assert set(counts.values()) == {1}
    assert {(number * form.tensor[0] + row) // form.group for number, row in counts} == groups


@given(grids(), st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_boxes_that_overlap_are_filled_too(grid: tuple[LeafLayout, list[Box]], most_rows: int):
    form, boxes = grid
    joined = tuple((min(a for a, _ in across), max(b for _, b in across)) for across in zip(*boxes, strict=True))
    whole = leaf_of(form, numbered(form))
    outs, _ = put_together(form, [*boxes, joined], most_rows)
    np.testing.assert_array_equal(outs[-1], whole[tuple(slice(*across) for across in joined)])


@given(st.lists(SIZES.map(lambda n: n * 3 - 2), max_size=4), st.integers(0, 200))
@settings(max_examples=200, deadline=None)
def test_stages_of_one_shape_cover_an_array(shape: list[int], most: int):
    stages = list(leaf_arrays._stages(tuple(shape), most))
    counts = np.zeros(shape, int)
    for stage in stages:
        assert box_shape(stage) == box_shape(stages[0])
        counts[tuple(slice(*across) for across in stage)] += 1
    assert math.prod(box_shape(stages[0])) <= max(1, most)
    assert counts.min() == 1
