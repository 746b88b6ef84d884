"""Which links of a torus a collective can use, from where the devices of its groups are. Needs no compiler.

A chip has two links in each dimension of the torus, one to each neighbour. A collective goes over the links of the
dimensions in which its groups extend, and over no others:

* a whole dimension that closes to a ring: both links of a chip;
* a whole dimension that does not close, or neighbours in a part of one: a line, whose ends have one link;
* every s-th chip of a dimension: s groups share its links, each has 1/s of them.

What the devices of one chip tell each other takes no link.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

DIMENSIONS = "xyz"
Groups = Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Route:
    """How the groups of a collective lie on the torus.

    Attributes:
        chips: chips that a group is on; 1 where nothing leaves a chip.
        devices_per_chip: devices of a group on each of them.
        links: links of a chip that the group has, by dimension; 0 in those that it does not extend in.
        words: the same for people, such as `x 4 ring, z 2 of 8`.
    """

    chips: int
    devices_per_chip: int
    links: Mapping[str, float] = dataclasses.field(hash=False)
    words: str

    @property
    def all_links(self) -> float:
        return sum(self.links.values())


@dataclasses.dataclass(frozen=True)
class Torus:
    """The chips of one slice, and which of them each device of a mesh is on.

    Attributes:
        shape: chips along each dimension.
        rings: which dimensions close.
        places: coordinates of the chip of each device, in the order of the mesh; of one slice.
    """

    shape: tuple[int, ...]
    rings: tuple[bool, ...]
    places: tuple[tuple[int, ...], ...]

    def route(self, groups: Groups, *, permute: bool = False) -> Route:
        """The route of groups of devices; of groups that lie differently, that with the fewest links.

        Args:
            groups: numbers of devices in the order of the mesh.
            permute: each group is a sender and its receiver: what one device sends takes one link of each dimension
                in which they differ.
        """
        places = np.array(self.places).reshape(len(self.places), len(self.shape))
        shapes = {self._shape_of(places[list(group)]): len(group) for group in groups}
        routes = [self._route(shape, size, permute=permute) for shape, size in shapes.items()]
        # A group that stays on one chip waits for those that do not.
        return min(routes, key=lambda route: (route.chips == 1, route.all_links, -route.chips))

    def everywhere(self) -> Route:
        """That of a collective whose groups are not known: it may use all links."""
        return self.route([range(len(self.places))])

    def _shape_of(self, places: np.ndarray) -> tuple[tuple[tuple[int, ...], ...], int]:
        """Coordinates along each dimension from the least on, and how many chips the group is on."""
        along = tuple(tuple(int(c) for c in np.unique(column)) for column in places.T)
        # Where a group begins matters to no line or ring; steps round the end of a ring do.
        begun = tuple(tuple(c - one[0] for c in one) for one in along)
        return begun, len({tuple(row) for row in places.tolist()})

    def _route(self, shape: tuple[tuple[tuple[int, ...], ...], int], size: int, *, permute: bool) -> Route:
        along, chips = shape
        whole_box = math.prod(len(one) for one in along) == chips
        links, words = {}, []
        for dimension, places in enumerate(along):
            count, length = len(places), self.shape[dimension]
            if count == 1:
                continue
            name = DIMENSIONS[dimension]
            if permute:
                links[name], form = 1.0, "step"
            elif not whole_box:
                # Devices in no order that the torus has: no more than all links of the dimension.
                links[name], form = 2.0 if length > 2 else 1.0, f"of {length}, scattered"
            else:
                links[name], form = self._line(places, dimension)
            words.append(f"{name} {form}" if permute else f"{name} {count} {form}")
        return Route(chips, size // chips, links, ", ".join(words) or "on one chip")

    def _line(self, places: tuple[int, ...], dimension: int) -> tuple[float, str]:
        """Links of a chip that a group at these places of a dimension has, and in words."""
        count, length, ring = len(places), self.shape[dimension], self.rings[dimension]
        if count == length:
            return (2.0, "ring") if ring else (1.0, "line")
        steps = {after - before for before, after in itertools.pairwise(places)}
        if ring:
            # Round the end: the largest gap is outside of the group.
            gaps = [*(b - a for a, b in itertools.pairwise(places)), length - places[-1] + places[0]]
            inner = sorted(gaps)[:-1]
            steps = set(inner)
            if len(set(gaps)) == 1:
                return 2.0 / gaps[0], f"of {length}, every {_ordinal(gaps[0])}"
        if steps == {1}:
            return 1.0, f"of {length}"
        if len(steps) == 1:
            (step,) = steps
            return 1.0 / step, f"of {length}, every {_ordinal(step)}"
        return 2.0 if ring else 1.0, f"of {length}, scattered"


def _ordinal(number: int) -> str:
    return {2: "2nd", 3: "3rd"}.get(number, f"{number}th")


def leaving_bytes(kind: str, payload: int, route: Route) -> float:
    """Bytes that a device sends off its chip for one execution, by the method that sends least.

    As `Collective.sent_bytes` counts, where each chip holds one device of a group. Where it holds several, they share
    what the chip receives, and add up before they send.
    """
    chips = route.chips
    if chips == 1:
        return 0.0
    if kind in ("collective-permute", "collective-broadcast"):
        return float(payload)
    if kind == "all-gather":
        return float(payload * (chips - 1))
    part = payload * (chips - 1) / chips
    if kind in ("all-to-all", "ragged-all-to-all"):
        return part
    return (2 if kind == "all-reduce" else 1) * part / route.devices_per_chip


def seconds_by_dimension(used: Iterable[tuple[Mapping[str, float], float]]) -> dict[str, float]:
    """Seconds that the links of each dimension are in use.

    Collectives that have a dimension in common share its links or wait for each other, so their times add up; those
    without one may run at the same time. The largest of the sums is a lower bound for all of them together.

    Args:
        used: for each collective its links by dimension and its time alone, in which it uses all of them evenly.
    """
    found: dict[str, float] = {}
    for links, seconds in used:
        for dimension in links:
            found[dimension] = found.get(dimension, 0.0) + seconds
    return found
