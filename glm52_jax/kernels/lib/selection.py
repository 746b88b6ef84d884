"""`Selection`: which cached positions each query attends to, and the units of rows that a kernel copies for them."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

UNIT_BITS = 8
"""Low bits of an entry of a list of units: which rows of the unit are selected."""


@flax.struct.dataclass
class Selection:
    """The positions of its own sequence that each query attends to, in one of two forms that are equal as sets.

    Attributes:
        indices: int32 `[batch, queries, k]` positions in any order, each at most once, -1 for "none"; or None.
        mask: bool `[batch, queries, positions]`, true for a position that is attended to; or None.
        units: int32 `[batch, queries, n]`, what `plan_units` makes of the indices; or None. Made once, it serves all
            layers that share the selection.
        unit: neighbouring positions that a unit has; which units a kernel wants depends on the rows' format.
    """

    indices: jax.Array | None = None
    mask: jax.Array | None = None
    units: jax.Array | None = None
    unit: int = flax.struct.field(pytree_node=False, default=0)

    @classmethod
    def empty(
        cls, batch: int, queries: int, *, k: int | None = None, positions: int | None = None, unit: int = 0
    ) -> Selection:
        """Nothing selected, in list form for `k` (with units for a `unit`), in mask form for `positions`."""
        if k is not None:
            units = jnp.zeros((batch, queries, k), jnp.int32) if unit else None
            return cls(indices=jnp.full((batch, queries, k), -1, jnp.int32), units=units, unit=unit)
        return cls(mask=jnp.zeros((batch, queries, positions or 0), jnp.bool_))

    def planned(self, unit: int, *, ascending: bool = False) -> Selection:
        """The same selection with its units, for kernels that copy `unit` rows at a time."""
        assert self.indices is not None
        units = plan_units(self.indices, unit, ascending=ascending)
        return Selection(self.indices, self.mask, units, unit)

    def rows(self, row: jax.Array) -> Selection:
        """The selection of query number `row[b]` of each sequence, as a selection with one query."""

        def pick(array: jax.Array) -> jax.Array:
            return jnp.take_along_axis(array, row[:, None, None], axis=1)

        return jax.tree.map(pick, self)

    def as_mask(self, positions: int) -> jax.Array:
        """bool `[batch, queries, positions]`, whichever form it has.

        A position is a row and a place in it, and products of the two mark them all at once: a scatter would mark them
        one after another.
        """
        if self.mask is not None:
            return self.mask
        assert self.indices is not None
        rows = -(-positions // _ROW)
        row = jax.nn.one_hot(jnp.where(self.indices < 0, -1, self.indices // _ROW), rows, dtype=jnp.bfloat16)
        place = jax.nn.one_hot(jnp.where(self.indices < 0, -1, self.indices % _ROW), _ROW, dtype=jnp.bfloat16)
        marked = jnp.einsum("bqkr,bqkp->bqrp", row, place, preferred_element_type=jnp.float32) > 0
        return marked.reshape(*marked.shape[:2], rows * _ROW)[..., :positions]

    def sorted_indices(self, k: int) -> jax.Array:
        """int32 `[batch, queries, k]`: the `k` lowest positions in ascending order, then -1."""
        if self.mask is not None:
            positions = jnp.where(self.mask, jnp.arange(self.mask.shape[-1], dtype=jnp.int32), _LAST)
        else:
            assert self.indices is not None
            positions = jnp.where(self.indices < 0, _LAST, self.indices)
        positions = jnp.sort(positions, axis=-1)[..., :k]
        return jnp.where(positions == _LAST, -1, positions)


_LAST = jnp.iinfo(jnp.int32).max
_ROW = 128  # positions that a mask made of a list has side by side


def single_units(indices: jax.Array, unit: int) -> jax.Array:
    """int32 like `indices`: for each position the unit that it is in and the bit of its own row; 0 for -1.

    An entry is the unit's number above `UNIT_BITS` bits for its rows, 0 where there is none. Units of neighbours are
    not joined, so this takes no sort.
    """
    entry = (indices // unit << UNIT_BITS) | (1 << indices % unit)
    return jnp.where(indices < 0, 0, entry)


def plan_units(indices: jax.Array, unit: int, *, ascending: bool = False) -> jax.Array:
    """Lists of the units that hold the positions, each unit once, in ascending order, zeros behind them.

    Args:
        indices: int32 `[..., k]`, -1 for none.
        unit: at most `UNIT_BITS` positions.
        ascending: whether the positions are in ascending order already, wherever -1 may be.

    Returns:
        int32 `[..., k]`, entries as `single_units` has them, with a bit for each position of the unit that is listed.
    """
    assert 0 < unit <= UNIT_BITS
    entries = single_units(indices, unit)
    if ascending:
        entries = _closed_up(entries)
    else:
        entries = jnp.sort(jnp.where(entries > 0, entries, _LAST), axis=-1)
        entries = jnp.where(entries == _LAST, 0, entries)
    number = entries >> UNIT_BITS
    joined = entries
    for distance in range(1, min(unit, entries.shape[-1])):
        later = _from_right(entries, distance)
        joined |= jnp.where((later > 0) & (later >> UNIT_BITS == number), later, 0)
    before = jnp.pad(number[..., :-1], [*[(0, 0)] * (number.ndim - 1), (1, 0)], constant_values=-1)
    return _closed_up(jnp.where(number == before, 0, joined))


def _closed_up(entries: jax.Array) -> jax.Array:
    """The entries that are not 0, in their order, then zeros.

    Each moves to the left by the number of zeros before it, a power of two at a time, lowest first: two of them never
    meet. A sort would do the same with seven times the steps.
    """
    zeros = (entries == 0).astype(jnp.int32)
    distance = jnp.where(entries == 0, 0, jnp.cumsum(zeros, axis=-1))
    for bit in range((entries.shape[-1] - 1).bit_length()):
        moves = (distance >> bit) & 1 == 1
        came = _from_right(jnp.where(moves, entries, 0), 1 << bit)
        came_distance = _from_right(jnp.where(moves, distance, 0), 1 << bit)
        entries = jnp.where(moves, 0, entries) | came
        distance = jnp.where(moves, 0, distance) | came_distance
    return entries


def _from_right(array: jax.Array, distance: int) -> jax.Array:
    """What stands so many places to the right, zeros past the end."""
    return jnp.pad(array[..., distance:], [*[(0, 0)] * (array.ndim - 1), (0, min(distance, array.shape[-1]))])
