"""Lower bounds of a step by hand: links by placement, what shares them, rows of padding."""

import dataclasses
from typing import Any

import pytest

from glm52_jax.config import load_config
from infer.planning.lower_bounds import collectives, lower_bounds
from infer.planning.request import PlanRequest, plan_request
from sharding.compiler import chips
from sharding.compiler.hlo.collectives import Collective
from sharding.compiler.hlo.program import Program
from sharding.compiler.links import Route

RING_Z = Route(8, 1, {"z": 2.0}, "z 8 ring")
PLANE = Route(16, 1, {"x": 2.0, "y": 2.0}, "x 4 ring, y 4 ring")
LINE_Z = Route(2, 1, {"z": 1.0}, "z 2 of 8")


def sent(axis: str, route: Route | None, size: float, network: str = "ici", executed: float = 1.0) -> Collective:
    return Collective(
        kind="all-reduce",
        axes=(axis,),
        whole=True,
        group=8,
        network=network,
        payload_bytes=0,
        sent_bytes=size,
        executed=executed,
        overlapped=False,
        overlap_flops=0,
        overlap_hbm_bytes=0,
        op_name="",
        name="",
        leaving_bytes=size,
        route=route,
    )


def program(*found: Collective) -> Program:
    return Program({"bf16": 459e9}, 2765e6, 0.0, found, (), (), (), ())


def asked(**options: Any) -> PlanRequest:
    sizes: dict[str, Any] = {"batch": 64, "context": 32 * 1024} | options
    return plan_request(load_config("glm-5.2"), "v5p:4x4x8", sizes.pop("layout", "expert=16,tensor=8"), **sizes)


@pytest.mark.parametrize(
    ("found", "milliseconds"),
    [
        # Eight along one dimension have two links of 100 GB/s, not the six of a chip (1.44 ms).
        ([sent("tensor", RING_Z, 810e6), sent("expert", PLANE, 54e6)], 4.05),
        ([sent("tensor", RING_Z, 200e6)], 1.0),
        ([sent("expert", PLANE, 200e6)], 0.5),
        ([sent("tensor", LINE_Z, 200e6)], 2.0),
        ([sent("tensor", RING_Z, 2e6, executed=100.0)], 1.0),
        # Two along the same dimension wait for each other.
        ([sent("tensor", RING_Z, 200e6), sent("data", LINE_Z, 100e6)], 2.0),
        # Where no placement is known all six links count.
        ([sent("tensor", None, 600e6)], 1.0),
    ],
)
def test_the_links_of_a_placement_bound_what_is_sent(found: list[Collective], milliseconds: float) -> None:
    (ici,) = [floor for floor in lower_bounds(asked(), program(*found)) if floor.resource == "ICI"]
    assert ici.seconds * 1e3 == pytest.approx(milliseconds)


def test_the_floor_says_axes_links_and_dimension() -> None:
    made = lower_bounds(asked(), program(sent("tensor", RING_Z, 810e6), sent("expert", PLANE, 54e6)))
    assert made[0].of == "along z: 0.81 GB over tensor on 2 links, 100 GB/s each"
    (ici,) = [floor for floor in lower_bounds(asked(), program(sent("expert", PLANE, 54e6))) if floor.resource == "ICI"]
    assert ici.of == "along x, y: 0.054 GB over expert on 4 links, 100 GB/s each"


def test_the_table_has_collectives_of_one_axis_and_placement_together() -> None:
    found = program(
        sent("tensor", RING_Z, 10e6),
        sent("tensor", RING_Z, 20e6, executed=2.0),
        sent("tensor", LINE_Z, 5e6),
        sent("data", None, 25e6, network="dcn"),
    )
    rows = collectives(found, chips.V5P)
    table = [(r["axes"], r["placement"], r["links"], r["bytes"], round(r["seconds"] * 1e3, 6)) for r in rows]
    assert table == [
        (["tensor"], "z 8 ring", 2.0, 50e6, 0.25),
        (["data"], None, None, 25e6, 4.0),
        (["tensor"], "z 2 of 8", 1.0, 5e6, 0.05),
    ]


def test_a_device_of_half_a_chip_has_half_of_each_link() -> None:
    assert collectives(program(sent("tensor", RING_Z, 100e6)), chips.TPU7X)[0]["seconds"] == pytest.approx(1e-3)


def test_rows_are_those_of_the_devices_that_have_sequences() -> None:
    """One sequence on 16 devices costs the device that has it as much as sixteen cost each."""
    rows = {
        batch: next(floor for floor in lower_bounds(asked(batch=batch), program()) if floor.resource == "row copies").of
        for batch in (1, 16)
    }
    assert rows[1] == rows[16]
    assert f"{78 * 2048 / 8:,.0f} rows" in rows[1]


def test_every_row_of_a_prefill_step_is_divided_as_its_tokens_are() -> None:
    whole = asked(step="prefill", batch=16, chunk=1024)
    divided = dataclasses.replace(whole, layout=whole.layout.with_rules(tokens=("data",)))
    assert lower_bounds(whole, program()) == lower_bounds(divided, program())
