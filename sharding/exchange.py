"""Rows to the devices that need them and back: who sends how many rows where, and the exchange itself.

The receive buffer has a stated capacity. What does not fit comes in later rounds, so nothing is dropped and no buffer
is sized for the worst case. The arithmetic works on numpy arrays and JAX arrays alike and knows no mesh. Inside of
`shard_map` only.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from sharding.errors import InputError
from sharding.layout import DATA, Layout

Array = TypeVar("Array", jax.Array, np.ndarray)

EXCHANGE_IMPLEMENTATIONS = ("ragged", "padded")
OVERLAP_OPTIONS = {"xla_tpu_enable_async_ragged_all_to_all": True}
"""Compiler options with which a TPU computes while rows travel (libtpu 0.0.42); without them it waits."""


def resolve_exchange(name: str | None, platform: str) -> str:
    """How rows are exchanged, decided once when a step is built.

    Args:
        name: "ragged" (only the rows that are sent) or "padded" (blocks of equal size), None for the platform's best.
        platform: of the devices that will run the step; the CPU has no ragged exchange.
    """
    if name is None:
        return "padded" if platform == "cpu" else "ragged"
    if name not in EXCHANGE_IMPLEMENTATIONS:
        raise InputError(f"exchange of rows: {name!r} is not one of {', '.join(EXCHANGE_IMPLEMENTATIONS)}")
    return name


# Offset arithmetic.


class ExchangeRound(NamedTuple):
    """What one device sends and receives in one exchange, int32 `[devices]` each; see `jax.lax.ragged_all_to_all`.

    Attributes:
        input_offsets: row of the operand where the rows for each device begin.
        send_sizes: rows for each device.
        output_offsets: row of the other device's output where they go.
        recv_sizes: rows that come from each device.
    """

    input_offsets: Any
    send_sizes: Any
    output_offsets: Any
    recv_sizes: Any


def rounds_needed(counts: Array, capacity: int) -> Any:
    """Rounds until every receiver has had all of its rows.

    Args:
        counts: int32 `[sources, destinations]`, rows from each to each.
        capacity: rows of a receive buffer.
    """
    return (-(-counts.sum(0) // capacity)).max()


def round_windows(counts: Array, device: Any, capacity: int, number: Any) -> tuple[ExchangeRound, ExchangeRound]:
    """What a device exchanges in one round, there and back.

    A receiver counts its rows through, source by source; round r takes rows `r * capacity` to `(r + 1) * capacity` of
    them, so a buffer is full in every round but the last however unequal the sources are. A source keeps the rows for
    a device together, in the order of devices, and gets the results in the same rows.

    Args:
        counts: int32 `[sources, destinations]`, rows from each to each.
        device: the device's own number.
        number: of the round, from zero.
    """
    xp: Any = np if isinstance(counts, np.ndarray) else jnp
    at_source = counts.cumsum(1, dtype=counts.dtype) - counts
    at_receiver = counts.cumsum(0, dtype=counts.dtype) - counts
    low = xp.clip(number * capacity - at_receiver, 0, counts)
    high = xp.clip((number + 1) * capacity - at_receiver, 0, counts)
    sizes = high - low
    kept = at_source + low
    buffered = xp.where(sizes > 0, at_receiver + low - number * capacity, 0)
    there = ExchangeRound(kept[device], sizes[device], buffered[device], sizes[:, device])
    back = ExchangeRound(buffered[:, device], sizes[:, device], kept[:, device], sizes[device])
    return there, back


class OutgoingRows(NamedTuple):
    """The rows that a device sends, each token once to a destination, sorted by destination and then by token.

    Attributes:
        token_of: int32 `[rows]`, the token in each row; rows past the last hold any.
        row_of: int32 `[tokens, k]`, the row of each token's choice, -1 when none or when an earlier choice of the
            token has that destination.
        counts: int32 `[destinations]`, rows for each.
    """

    token_of: Any
    row_of: Any
    counts: Any


def rows_to_send(destinations: Array, count: int) -> OutgoingRows:
    """Sorts tokens by the devices that they go to.

    Args:
        destinations: int32 `[tokens, k]`, the device of each choice, -1 for none.
        count: of destinations.

    Returns:
        `tokens * min(k, count)` rows, the most that there can be.
    """
    xp: Any = np if isinstance(destinations, np.ndarray) else jnp
    tokens, k = destinations.shape
    same = destinations[:, :, None] == destinations[:, None, :]
    repeated = (same & np.tri(k, k=-1, dtype=bool)).any(-1)
    key = xp.where((destinations < 0) | repeated, count, destinations).reshape(-1)
    order = xp.argsort(key, stable=True).astype(xp.int32)
    rows = order[: tokens * min(k, count)]
    row_of = xp.where(key < count, xp.argsort(order).astype(xp.int32), -1).reshape(tokens, k)
    counts = (key[:, None] == xp.arange(count)).sum(0, dtype=xp.int32)
    return OutgoingRows(rows // k, row_of, counts)


# The devices of an exchange, and the exchange.


def split_rows(x: jax.Array) -> jax.Array:
    """`[rows, n]` as `[rows, pieces, n / pieces]`, a piece for each value that fits in 32 bits.

    A TPU exchanges rows in this form, whose tile is one row. Buffers that are made, carried and read in it are not
    copied into another layout at each exchange.
    """
    pieces = max(1, 4 // x.dtype.itemsize)
    return x.reshape(x.shape[0], pieces, -1) if x.shape[1] % pieces == 0 else x[:, None]


def join_rows(pieces: jax.Array) -> jax.Array:
    """`[rows, n]` of `split_rows`."""
    return pieces.reshape(pieces.shape[0], -1)


def uninitialized(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
    """A buffer to exchange rows into; what it holds is not defined.

    A buffer of zeros would be made once for all layers, live as long as they run, and be copied in each.
    """
    return jax.lax.empty(shape, dtype)


@dataclasses.dataclass(frozen=True)
class ExchangeGroup:
    """The devices that exchange rows: all along some mesh axes, or equal parts of them.

    Attributes:
        axes: mesh axes of more than one device, the first of them outermost.
        size: devices of one part.
        parts: the numbers along the axes of the devices of each part; None when there is one part.
    """

    axes: tuple[str, ...]
    size: int
    parts: tuple[tuple[int, ...], ...] | None = None

    @classmethod
    def along(cls, layout: Layout, axes: tuple[str, ...]) -> ExchangeGroup:
        """All devices along the axes."""
        there = tuple(axis for axis in axes if layout.size(axis) > 1)
        return cls(there, layout.size(there))

    @classmethod
    def across_slices(cls, layout: Layout) -> ExchangeGroup:
        """The devices at one place of each slice."""
        inside = layout.data // layout.slices
        parts = tuple(tuple(range(place, layout.data, inside)) for place in range(inside))
        return cls((DATA,), layout.slices, None if inside == 1 else parts)

    @classmethod
    def inside_slice(cls, layout: Layout, axes: tuple[str, ...]) -> ExchangeGroup:
        """The devices along the axes, of which `data` is the first, that are in one slice."""
        if layout.data == layout.slices:
            return cls.along(layout, axes[1:])
        size = layout.size(axes) // layout.slices
        parts = tuple(tuple(range(first, first + size)) for first in range(0, layout.size(axes), size))
        return cls(axes, size, parts)

    def place(self) -> jax.Array:
        """This device's number in its part."""
        number = jax.lax.axis_index(self.axes)
        if self.parts is None:
            return number
        return jnp.asarray(np.argsort(np.concatenate(self.parts)) % self.size, jnp.int32)[number]

    def gather(self, x: jax.Array) -> jax.Array:
        """The arrays of the part, `[size, ...]`."""
        return jax.lax.all_gather(x, self.axes, axis_index_groups=self.parts)

    def swap(self, x: jax.Array) -> jax.Array:
        """Sends `x[i]` to device i of the part; what came from device j is in `result[j]`."""
        return jax.lax.all_to_all(x, self.axes, 0, 0, axis_index_groups=self.parts, tiled=True)


def exchange(
    group: ExchangeGroup, operand: jax.Array, output: jax.Array, window: ExchangeRound, implementation: str
) -> jax.Array:
    """`output` with the rows that the devices of the group send each other; the others keep what they hold.

    Args:
        operand: `[rows, ...]`, what this device sends.
        output: `[rows, ...]`, of the same number of rows on all devices.
        window: which rows go where.
        transport: see `resolve_exchange`; both give the same rows.
    """
    if implementation == "ragged":
        return jax.lax.ragged_all_to_all(operand, output, *window, axis_name=group.axes, axis_index_groups=group.parts)
    return _padded_exchange(group, operand, output, window)


def _padded_exchange(group: ExchangeGroup, operand: jax.Array, output: jax.Array, window: ExchangeRound) -> jax.Array:
    """`jax.lax.ragged_all_to_all` by an exchange of blocks, each as large as the most that may go to one device."""
    most = min(operand.shape[0], output.shape[0])
    rows = jnp.clip(window.input_offsets[:, None] + jnp.arange(most), 0, operand.shape[0] - 1)
    came, begins = group.swap(operand[rows]), group.swap(window.output_offsets)
    within = jnp.arange(output.shape[0]) - begins[:, None]
    written = (within >= 0) & (within < window.recv_sizes[:, None])
    source = jnp.argmax(written, axis=0)
    row = jnp.clip(jnp.take_along_axis(within, source[None], axis=0)[0], 0, most - 1)
    hit = jnp.any(written, axis=0).reshape(-1, *[1] * (output.ndim - 1))
    return jnp.where(hit, came[source, row], output)
