"""`Selection`: which cached positions each query attends to."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Selection:
    """The positions of its own sequence that each query attends to, in one of two forms that are equal as sets.

    Attributes:
        indices: int32 `[batch, queries, k]` positions in any order, -1 for "none"; or None.
        mask: bool `[batch, queries, positions]`, true for a position that is attended to; or None.
    """

    indices: jax.Array | None = None
    mask: jax.Array | None = None

    @classmethod
    def empty(cls, batch: int, queries: int, *, k: int | None = None, positions: int | None = None) -> Selection:
        """Nothing selected, in list form for `k` and in mask form for `positions`."""
        if k is not None:
            return cls(indices=jnp.full((batch, queries, k), -1, jnp.int32))
        return cls(mask=jnp.zeros((batch, queries, positions or 0), jnp.bool_))

    def rows(self, row: jax.Array) -> Selection:
        """The selection of query number `row[b]` of each sequence, as a selection with one query."""

        def pick(array: jax.Array) -> jax.Array:
            return jnp.take_along_axis(array, row[:, None, None], axis=1)

        return jax.tree.map(pick, self)

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
