"""Third section: each collective along each mesh axis: the right integers, and how fast they travel."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from infer.selftest.checks import Check, CheckFailed, CheckSkipped, Passed
from infer.selftest.machine import Machine
from sharding import collectives as ours
from sharding.compiler.chips import Chip
from sharding.exchange import ExchangeGroup, exchange, resolve_exchange, round_windows
from sharding.layout import AXES, DATA, Layout

_EVERYWHERE = PartitionSpec(AXES)
_MOST_BYTES = 256 * 2**20  # of what one collective makes on a device
_ROUNDS = 5

Values = Callable[[Any], jax.Array]
"""The array of the device with a number along the axis."""


@dataclasses.dataclass(frozen=True)
class CollectiveCheck:
    """A function of `sharding.collectives` and what it should give.

    Attributes:
        function: takes layout, array, axis.
        expected: of the arrays of all, the number of devices and the device's own number.
        sent: bytes that a device puts on links, as a part of its array's, with so many devices, by the method that
            sends least; None where nothing travels.
        made: bytes of the result, as a part of the array's.
    """

    function: Callable[[Layout, jax.Array, str], Any]
    expected: Callable[[Values, int, jax.Array], jax.Array]
    sent: Callable[[int], float] | None = None
    made: Callable[[int], float] = lambda n: 1.0


def _sum(values: Values, n: int) -> jax.Array:
    return jax.lax.fori_loop(1, n, lambda j, total: total + values(j), values(0))


def _part(x: jax.Array, n: int, i: jax.Array) -> jax.Array:
    return x.reshape(n, -1, *x.shape[1:])[i]


def _largest(values: Values, n: int, i: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(1, n, lambda j, most: jnp.maximum(most, values(j)), values(0))


def _gathered(values: Values, n: int, i: jax.Array) -> jax.Array:
    return jax.vmap(values)(jnp.arange(n)).reshape(-1, 128)


def _all_to_all(layout: Layout, x: jax.Array, axis: str) -> jax.Array:
    return ours.all_to_all(layout, x.reshape(layout.size(axis), -1, *x.shape[1:]), axis)


def _own_part(layout: Layout, x: jax.Array, axis: str) -> jax.Array:
    """Of the first device's array, which all have after a sum over what only it has."""
    alike = ours.psum(layout, jnp.where(ours.axis_index(layout, axis) == 0, x, 0), axis)
    return ours.local_shard(layout, alike, axis)


OPERATIONS: dict[str, CollectiveCheck] = {
    "axis_index": CollectiveCheck(
        lambda layout, x, axis: jnp.asarray(ours.axis_index(layout, axis)), lambda values, n, i: i
    ),
    "psum": CollectiveCheck(ours.psum, lambda values, n, i: _sum(values, n), lambda n: 2 * (n - 1) / n),
    "pmax": CollectiveCheck(ours.pmax, _largest, lambda n: 2 * (n - 1) / n),
    "all_gather": CollectiveCheck(ours.all_gather, _gathered, lambda n: n - 1, lambda n: n),
    "psum_scatter": CollectiveCheck(
        ours.psum_scatter, lambda values, n, i: _part(_sum(values, n), n, i), lambda n: (n - 1) / n
    ),
    "local_shard": CollectiveCheck(_own_part, lambda values, n, i: _part(values(0), n, i)),
    "all_to_all": CollectiveCheck(
        _all_to_all,
        lambda values, n, i: jax.vmap(lambda j: _part(values(j), n, i))(jnp.arange(n)),
        lambda n: (n - 1) / n,
    ),
}
"""By the name of the function."""


def collectives(machine: Machine) -> Iterator[Check]:
    """The checks of this section."""
    axes = machine.several_axes()
    if not axes:
        yield Check("all", _nothing)
    for axis in axes:
        n = machine.mesh.shape[axis]
        for name, operation in OPERATIONS.items():
            yield Check(f"{name} over {axis} of {n}", functools.partial(check_operation, machine, axis, operation))
        yield Check(f"ragged exchange over {axis} of {n}", functools.partial(check_ragged, machine, axis))


def _nothing() -> Passed:
    raise CheckSkipped("there is one device, and nobody to talk to")


def check_operation(machine: Machine, axis: str, operation: CollectiveCheck) -> Passed:
    """One collective along one axis: every integer of every device, then the rate.

    Raises:
        Wrong: some integer is another.
    """
    layout, n = machine.layout, machine.layout.size(axis)
    rows = _rows(machine, n, operation.made(n))
    others = [other for other in AXES if other != axis]

    def wrong() -> jax.Array:
        own, place = ours.axis_index(layout, axis), jnp.asarray(ours.axis_index(layout, others), jnp.uint32)
        values = functools.partial(_values, (n * rows, 128), place)
        got = operation.function(layout, values(own), axis)
        return jnp.sum(got != operation.expected(values, n, jnp.asarray(own)), dtype=jnp.int32)[None]

    _refuse(_on_all(machine, wrong)())
    if operation.sent is None:
        return Passed("right on all devices")

    def travel() -> jax.Array:
        def once(_: Any, x: jax.Array) -> jax.Array:
            made = jax.lax.optimization_barrier(operation.function(layout, x, axis))
            return x.at[0, 0].set(made.reshape(-1)[0])  # the next one has to wait for this one

        start = jnp.ones((n * rows, 128), jnp.bfloat16) * jnp.asarray(ours.axis_index(layout, AXES), jnp.bfloat16)
        return jax.lax.fori_loop(0, _repeats(machine), once, start)[:1, 0]

    sent = operation.sent(n) * n * rows * 128 * jnp.bfloat16.dtype.itemsize
    return _rate(machine, axis, sent, _seconds(machine, travel))


def check_ragged(machine: Machine, axis: str) -> Passed:
    """The exchange of rows that experts need: uneven counts, some of them zero, there and back.

    Raises:
        Wrong: a row is not where it should be.
    """
    layout, n = machine.layout, machine.layout.size(axis)
    group, transport = ExchangeGroup.along(layout, (axis,)), resolve_exchange(None, machine.platform)
    unit = max(1, _rows(machine, n, 1.0) // 8)
    counts = unit * ((3 * np.arange(n)[:, None] + 5 * np.arange(n)) % 4).astype(np.int32)
    capacity, most, width = int(counts.sum(0).max()), int(counts.sum(1).max()), 128
    # Rows as the receivers should have them: source and row of its send buffer as one number, in order of sources.
    arriving = np.full((n, capacity), -1, np.int32)
    begins = np.cumsum(counts, axis=1) - counts
    for device in range(n):
        came = [j * most + begins[j, device] + np.arange(counts[j, device]) for j in range(n)]
        arriving[device, : counts[:, device].sum()] = np.concatenate(came)

    def both_ways() -> tuple[jax.Array, jax.Array, jax.Array]:
        own = group.place()
        rows = jnp.broadcast_to((own * most + jnp.arange(most))[:, None, None], (most, 1, width)).astype(jnp.int32)
        there, back = round_windows(jnp.asarray(counts), own, capacity, 0)
        arrived = exchange(group, rows, jnp.full((capacity, 1, width), -1, jnp.int32), there, transport)
        home = exchange(group, arrived, jnp.full((most, 1, width), -1, jnp.int32), back, transport)
        return rows, arrived, home

    def wrong() -> jax.Array:
        rows, arrived, home = both_ways()
        sent = jnp.arange(most)[:, None, None] < jnp.asarray(counts.sum(1))[group.place()]
        expected = jnp.asarray(arriving)[group.place()][:, None, None]
        differ = jnp.sum(arrived != expected) + jnp.sum(home != jnp.where(sent, rows, -1))
        return differ.astype(jnp.int32)[None]

    _refuse(_on_all(machine, wrong)())

    def travel() -> jax.Array:
        def once(_: Any, total: jax.Array) -> jax.Array:
            # Depends on the last round, or all rounds would be one.
            _, _, home = jax.lax.optimization_barrier(both_ways())
            return total + home[:1, 0, 0]

        return jax.lax.fori_loop(0, _repeats(machine), once, jnp.zeros(1, jnp.int32))

    busiest = int((counts.sum(1) - counts.diagonal()).max())
    found = _rate(machine, axis, 2.0 * busiest * width * 4, _seconds(machine, travel))
    return Passed(f"{found.figure} ({transport})", found.values | {"transport": transport})


def _rows(machine: Machine, n: int, made: float) -> int:
    """Rows of 128 values in each of a device's `n` parts: a few MB of bfloat16 in all, fewer where the result grows."""
    size = 2**18 if machine.platform == "cpu" else 2**22
    return max(8, int(min(size, _MOST_BYTES / max(made, 1.0)) // (n * 128 * 2)))


def _values(shape: tuple[int, int], place: jax.Array, number: Any) -> jax.Array:
    """int32 values that differ from device to device."""
    rows, columns = (jax.lax.broadcasted_iota(jnp.uint32, shape, dimension) for dimension in (0, 1))
    mixed = (rows * 128 + columns) * 7919 + jnp.asarray(number, jnp.uint32) * 104729 + place * 15485863
    return (mixed % 10007).astype(jnp.int32)


def _on_all(machine: Machine, function: Callable[[], jax.Array]) -> Callable[[], jax.Array]:
    """A function without inputs on every device, their results one after another."""
    run = jax.shard_map(function, mesh=machine.mesh, in_specs=(), out_specs=_EVERYWHERE, check_vma=False)
    return jax.jit(run)


def _refuse(wrong: jax.Array) -> None:
    """Raises Wrong where a device of this process counted values that are not as expected."""
    counts = {shard.device.id: int(np.asarray(shard.data).sum()) for shard in wrong.addressable_shards}
    bad = {device: count for device, count in counts.items() if count}
    if bad:
        device, count = next(iter(bad.items()))
        raise CheckFailed(
            f"{count} wrong values on device {device}, and wrong ones on {len(bad)} of {len(counts)}", wrong=bad
        )


def _repeats(machine: Machine) -> int:
    return 2 if machine.platform == "cpu" else 32


def _seconds(machine: Machine, travel: Callable[[], jax.Array]) -> float:
    """Median seconds of one of the collectives of `travel`, which makes `_repeats` of them."""
    run = _on_all(machine, travel)
    jax.block_until_ready(run())
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times) / _repeats(machine)


def _rate(machine: Machine, axis: str, sent: float, seconds: float) -> Passed:
    rate, chip = sent / seconds, machine.chip
    values = {"sent bytes": sent, "seconds": seconds, "bytes per second": rate}
    figure = f"right; {sent / 1e6:.2f} MB sent a device in {seconds * 1e6:,.0f} us, {rate / 1e9:.2f} GB/s"
    if chip is None:
        return Passed(figure, values)
    stated, what = _stated(machine, chip, axis)
    if not stated:
        return Passed(f"{figure} ({what})", values)
    return Passed(f"{figure} ({what}: {stated / 1e9:.0f})", values | {"stated bytes per second": stated})


def _stated(machine: Machine, chip: Chip, axis: str) -> tuple[float, str]:
    """Bytes a second that a device can send along an axis by the chip's figures, 0 where no link is taken; in words."""
    if axis == DATA and machine.layout.slices > 1:
        return chip.dcn_bytes_per_s, f"DCN of {chip.name}"
    topology = machine.topology
    if topology is None:
        return chip.ici_bytes_per_s, f"ICI of {chip.name} over all links"
    sizes = [machine.mesh.shape[name] // (machine.layout.slices if name == DATA else 1) for name in AXES]
    numbers = np.arange(topology.devices_per_slice).reshape(sizes)
    groups = np.moveaxis(numbers, AXES.index(axis), -1).reshape(-1, sizes[AXES.index(axis)])
    route = topology.torus(machine.mesh).route(groups.tolist())
    if route.chips == 1:
        return 0.0, "on one chip, over no link"
    return route.all_links * chip.link_bytes_per_s, f"ICI of {chip.name}, {route.words}"
