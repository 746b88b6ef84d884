"""Links of a torus that collectives can use, by hand; what leaves a chip; what shares links."""

import itertools
import math

import pytest

from sharding.compiler import chips
from sharding.compiler.hlo.collectives import MeshAxes
from sharding.compiler.hlo.program import analyse
from sharding.compiler.links import Torus, leaving_bytes, seconds_by_dimension


def torus(shape: tuple[int, ...], rings: tuple[bool, ...] | bool = True, per_chip: int = 1) -> Torus:
    """Devices in the order of their coordinates, the last dimension innermost, those of a chip beside each other."""
    closed = (rings,) * len(shape) if isinstance(rings, bool) else rings
    places = [place for place in itertools.product(*map(range, shape)) for _ in range(per_chip)]
    return Torus(shape, closed, tuple(places))


def groups(devices: int, size: int, stride: int = 1) -> list[list[int]]:
    """All groups of `size` devices that are `stride` apart."""
    block = size * stride
    return [[b + o + stride * n for n in range(size)] for b in range(0, devices, block) for o in range(stride)]


@pytest.mark.parametrize(
    ("place", "size", "stride", "links", "words"),
    [
        # A whole dimension that closes: both links of a chip, none of the other dimensions.
        (torus((4, 4, 8)), 8, 1, {"z": 2}, "z 8 ring"),
        (torus((4, 4, 8)), 4, 8, {"y": 2}, "y 4 ring"),
        (torus((4, 4, 8)), 16, 8, {"x": 2, "y": 2}, "x 4 ring, y 4 ring"),
        (torus((4, 4, 8)), 128, 1, {"x": 2, "y": 2, "z": 2}, "x 4 ring, y 4 ring, z 8 ring"),
        # One that does not: the chips at its ends have one.
        (torus((8, 8), rings=False), 8, 1, {"y": 1}, "y 8 line"),
        (torus((2, 2, 4), rings=False), 2, 8, {"x": 1}, "x 2 line"),
        (torus((8, 16), rings=(False, True)), 16, 1, {"y": 2}, "y 16 ring"),
        # Neighbours in a part of a dimension are a line.
        (torus((4, 4, 4)), 2, 1, {"z": 1}, "z 2 of 4"),
        (torus((4, 4, 4)), 8, 1, {"y": 1, "z": 2}, "y 2 of 4, z 4 ring"),
        # Every second chip: two groups share the links between them.
        (torus((4, 4, 8)), 4, 2, {"z": 1}, "z 4 of 8, every 2nd"),
        (torus((8, 8), rings=False), 4, 2, {"y": 0.5}, "y 4 of 8, every 2nd"),
        (torus((4, 4, 8)), 2, 4, {"z": 0.5}, "z 2 of 8, every 4th"),
        (torus((4, 4, 4)), 1, 1, {}, "on one chip"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_links_of_groups(place: Torus, size: int, stride: int, links: dict, words: str) -> None:
    route = place.route(groups(math.prod(place.shape), size, stride))
    assert dict(route.links) == links
    assert route.words == words
    assert (route.chips, route.devices_per_chip) == (size, 1)


def test_neighbours_round_the_end_of_a_ring_are_neighbours() -> None:
    ring, line = (torus((1, 1, 8), rings=closed) for closed in (True, False))
    assert ring.route([[7, 0]]).all_links == 1
    assert ring.route([[6, 7, 0, 1]]).words == "z 4 of 8"
    assert line.route([[7, 0]]).all_links == pytest.approx(1 / 7)


def test_the_group_with_the_fewest_links_decides() -> None:
    place = torus((4, 4))
    route = place.route([[0, 1, 2, 3], [4, 5], [8]])
    assert route.words == "y 2 of 4"


def test_devices_in_no_order_of_the_torus_have_no_more_than_all_links() -> None:
    route = torus((4, 4)).route([[0, 5, 10, 15]])
    assert route.all_links == 4
    assert "scattered" in route.words


def test_a_permute_goes_over_one_link_of_a_dimension() -> None:
    place = torus((4, 4))
    assert place.route([[n, (n + 4) % 16] for n in range(16)], permute=True).links == {"x": 1.0}


def test_two_devices_of_a_chip_take_no_link() -> None:
    """TPU7x: what stays on the chip, and what its two devices share of the rest."""
    place = torus((4, 4, 4), per_chip=2)
    inside = place.route(groups(128, 2))
    assert (inside.chips, inside.words) == (1, "on one chip")
    assert leaving_bytes("all-reduce", 100, inside) == 0
    both = place.route(groups(128, 8))
    assert (both.chips, both.devices_per_chip, both.words) == (4, 2, "z 4 ring")
    alone = place.route(groups(128, 4, 2))
    assert (alone.chips, alone.devices_per_chip) == (4, 1)
    # A chip receives what six other devices have; each of its two devices half of that.
    assert leaving_bytes("all-gather", 100, both) == 300
    assert leaving_bytes("reduce-scatter", 800, both) == 300
    assert leaving_bytes("all-reduce", 800, both) == 600
    assert leaving_bytes("all-to-all", 800, both) == 600
    assert leaving_bytes("all-gather", 100, alone) == 300
    assert leaving_bytes("all-reduce", 800, alone) == 1200


@pytest.mark.parametrize("kind", ["all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"])
def test_all_that_is_sent_leaves_where_each_device_has_a_chip(kind: str) -> None:
    from sharding.compiler.hlo.collectives import _sent

    route = torus((4, 4, 8)).route(groups(128, 8))
    assert leaving_bytes(kind, 1000, route) == _sent(kind, 1000, 8)


def test_what_shares_links_adds_up_and_what_does_not_may_run_at_once() -> None:
    z, xy, xz = {"z": 2.0}, {"x": 2.0, "y": 2.0}, {"x": 2.0, "z": 2.0}
    assert seconds_by_dimension([(z, 3.0), (xy, 2.0), (z, 1.0)]) == {"z": 4.0, "x": 2.0, "y": 2.0}
    assert seconds_by_dimension([(z, 3.0), (xz, 2.0)]) == {"z": 5.0, "x": 2.0}


@pytest.mark.parametrize(
    ("chip", "shape", "rings"),
    [
        ("v5p", (4, 4, 4), (True,) * 3),
        ("v5p", (4, 8, 8), (True,) * 3),
        ("v5p", (2, 4, 4), (False,) * 3),
        ("tpu7x", (2, 2, 1), (False,) * 3),
        ("v5e", (16, 16), (True, True)),
        ("v6e", (8, 16), (False, True)),
        ("v6e", (8, 8), (False, False)),
    ],
)
def test_which_dimensions_close(chip: str, shape: tuple[int, ...], rings: tuple[bool, ...]) -> None:
    assert chips.chip(chip).rings(shape) == rings


PROGRAM = """HloModule jit_step, is_scheduled=true

ENTRY %main (x: f32[8192]) -> f32[8192] {
  %x = f32[8192]{0} parameter(0)
  %first = f32[8192]{0} all-reduce(%x), replica_groups=[16,8]<=[128], to_apply=%add
  ROOT %second = f32[8192]{0} all-reduce(%first), replica_groups=[8,16]<=[16,8]T(1,0), to_apply=%add
}
"""


def test_collectives_of_a_program_know_their_links() -> None:
    mesh = MeshAxes((("data", 1), ("expert", 16), ("tensor", 8)))
    found = analyse(PROGRAM, mesh, torus=torus((4, 4, 8))).collectives
    assert [(one.axes, one.route and one.route.words) for one in found] == [
        (("tensor",), "z 8 ring"),
        (("expert",), "x 4 ring, y 4 ring"),
    ]
    assert all(one.leaving_bytes == one.sent_bytes for one in found)
    assert [one.route for one in analyse(PROGRAM, mesh).collectives] == [None, None]
