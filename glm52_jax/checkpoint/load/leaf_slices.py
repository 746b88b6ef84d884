"""Which rows of which published tensors a part of a leaf is made of: index arithmetic, without files or devices.

A leaf of the parameter tree stacks what its published tensors give: `[layers, experts, gate and up, *piece]`, where the
first dimensions, some or none, run over tensors. A piece is a published `[out, in]` tensor, or a reshape of it, or some
rows of that reshape. A part of a leaf is a box: a range of each dimension.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

Range = tuple[int, int]
"""Start and stop."""
Box = tuple[Range, ...]
"""A range of each dimension of a leaf."""


def box_shape(box: Box) -> tuple[int, ...]:
    """Sizes of a box."""
    return tuple(stop - start for start, stop in box)


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """The box of an index of slices of step 1, such as a sharding gives for each device."""
    return tuple(
        (cut.start or 0, size if cut.stop is None else cut.stop) for cut, size in zip(index, shape, strict=True)
    )


@dataclasses.dataclass(frozen=True)
class LeafLayout:
    """How a leaf is made of published tensors.

    Attributes:
        lead: dimensions that run over tensors, the last one fastest; () for a leaf of one tensor.
        tensor: shape of each published tensor.
        view: what a tensor is reshaped to; its first dimension divides the tensor's rows into equal groups.
        rows: what is taken of the second dimension of `logical_shape`; None for all of it.
    """

    lead: tuple[int, ...]
    tensor: tuple[int, ...]
    logical_shape: tuple[int, ...]
    rows: Range | None = None

    def __post_init__(self) -> None:
        assert math.prod(self.logical_shape) == math.prod(self.tensor)
        assert self.tensor[0] % self.logical_shape[0] == 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the leaf."""
        if self.rows is None:
            return (*self.lead, *self.logical_shape)
        return (*self.lead, self.logical_shape[0], self.rows[1] - self.rows[0], *self.logical_shape[2:])

    @property
    def group(self) -> int:
        """Rows of a tensor in one index of `logical_shape`'s first dimension."""
        return self.tensor[0] // self.logical_shape[0]


class TensorShare(NamedTuple):
    """What one box gets of the rows that are read: `box[put] = rows.reshape(-1, *logical_shape[1:])[take]`."""

    box: int
    put: tuple[int | slice, ...]
    take: tuple[slice, ...]
    whole: bool  # whether it takes all of them


class TensorRead(NamedTuple):
    """Rows of a published tensor, by its number in the order of `LeafLayout.lead`, and who gets what of them."""

    number: int
    rows: Range
    shares: tuple[TensorShare, ...]


def reads(form: LeafLayout, boxes: Sequence[Box], most_rows: int) -> Iterator[TensorRead]:
    """What to read to fill some boxes of a leaf: every value of theirs once, tensor by tensor, whole rows at a time.

    Boxes that differ only in columns, as the shards of a matrix that is cut along them, share what is read. Boxes of
    which some overlap in rows without being equal there are read one after another.

    Args:
        most_rows: of a tensor in one read; more where one group of `form` has more.
    """
    depth = len(form.lead)
    together: dict[Box, list[int]] = {}
    for number, box in enumerate(boxes):
        together.setdefault(box[: depth + 1], []).append(number)
    step = max(1, most_rows // form.group)
    for (*lead, (first, last)), members in together.items():
        for place in itertools.product(*(range(*across) for across in lead)):
            number = 0
            for index, size in zip(place, form.lead, strict=True):
                number = number * size + index
            within = tuple(index - start for index, (start, _) in zip(place, lead, strict=True))
            for start in range(first, last, step):
                stop = min(start + step, last)
                put = (*within, slice(start - first, stop - first))
                shares = tuple(
                    _share(form, member, boxes[member][depth + 1 :], put, stop - start) for member in members
                )
                yield TensorRead(number, (start * form.group, stop * form.group), shares)


def _share(form: LeafLayout, number: int, columns: Box, put: tuple[int | slice, ...], count: int) -> TensorShare:
    """`columns`: ranges of the dimensions of a piece after its first."""
    offset = form.rows[0] if form.rows else 0
    shifted = [(start + offset, stop + offset) if i == 0 else (start, stop) for i, (start, stop) in enumerate(columns)]
    whole = all(across == (0, size) for across, size in zip(shifted, form.logical_shape[1:], strict=True))
    return TensorShare(number, put, (slice(count), *(slice(*across) for across in shifted)), whole)
