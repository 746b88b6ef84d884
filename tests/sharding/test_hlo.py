"""Counts from stored pieces of compiled programs, against figures made by hand.

The pieces are what the TPU compiler wrote (libtpu 0.0.42), shortened, so that these tests need no compiler.
"""

from pathlib import Path

import pytest

from sharding.compiler.compile import out_of_hbm
from sharding.compiler.hlo.collectives import MeshAxes, axes_of_groups, read_groups
from sharding.compiler.hlo.executions import executions
from sharding.compiler.hlo.memory import read_assignment
from sharding.compiler.hlo.program import analyse
from sharding.compiler.hlo.text import Array, Module, parse_type

SAMPLES = {path.stem: path.read_text() for path in (Path(__file__).parent / "samples").iterdir()}
EIGHT = MeshAxes((("data", 2), ("expert", 2), ("tensor", 2)))
FOUR = MeshAxes((("data", 1), ("expert", 2), ("tensor", 2)))


@pytest.mark.parametrize(
    ("text", "packed", "padded", "space"),
    [
        ("bf16[32,2048]{1,0:T(8,128)(2,1)}", 131072, 131072, 0),
        ("bf16[16,2048]{1,0:T(8,128)(2,1)S(1)}", 65536, 65536, 1),
        ("f32[512,16]{1,0:T(8,128)}", 32768, 262144, 0),
        ("bf16[100,1,640]{2,1,0:T(2,128)(2,1)}", 128000, 256000, 0),
        ("s32[]{:T(128)}", 4, 4, 0),
        ("s32[2]{0:T(128)}", 8, 512, 0),
        ("f8e4m3fn[8,128]{1,0:T(8,128)(4,1)}", 1024, 1024, 0),
        ("pred[300]{0:T(512)(128)(4,1)}", 300, 512, 0),
        ("s4[8,8]", 32, 32, 0),
        ("token[]", 0, 0, 0),
    ],
)
def test_sizes_of_arrays(text, packed, padded, space):
    array = parse_type(text)
    assert isinstance(array, Array)
    assert (array.packed_bytes, array.bytes, array.space) == (packed, padded, space)


def test_types_of_tuples():
    nested = parse_type("((bf16[8]{0:T(256)}, token[]), /*index=1*/f32[2,3]{1,0:T(2,128)}, u32[]{:S(2)})")
    assert [str(item) for item in nested[0]] == ["bf16[8]", "token[]"]
    assert (str(nested[1]), nested[2].space) == ("f32[2,3]", 2)


def test_text_that_is_no_module():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        Module.parse("hello")


@pytest.mark.parametrize(
    ("text", "axes", "whole"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ("tensor",), True),
        ("[4,2]<=[8]", ("tensor",), True),
        ("[4,2]<=[2,2,2]T(0,2,1)", ("expert",), True),
        ("[2,4]<=[4,2]T(1,0)", ("data", "expert"), True),
        ("{{0,2,4,6},{1,3,5,7}}", ("data", "expert"), True),
        ("[2,4]<=[8]", ("expert", "tensor"), True),
        ("[1,8]<=[8]", ("data", "expert", "tensor"), True),
        ("{}", ("data", "expert", "tensor"), True),
        ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_0'}", ("data", "expert"), True),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", ("tensor",), True),
        ("mesh['a'=8] {'a':(2)2}", ("expert",), True),
        ("{{0,3},{1,2},{4,7},{5,6}}", ("expert", "tensor"), False),
    ],
)
def test_axes_of_groups(text, axes, whole):
    groups = read_groups(text, 8)
    assert groups is not None
    assert axes_of_groups(groups, EIGHT) == (axes, whole)


def test_groups_in_a_form_that_is_not_known():
    assert read_groups("V3<something>", 8) is None


def test_a_scan_is_counted_by_its_iterations():
    found = analyse(SAMPLES["scan"], FOUR)
    layer, row = 4096 * 2048 * 2, 32 * 2048 * 2
    assert [(loop.trips, loop.executed) for loop in found.loops] == [(6, 1)]
    assert not found.endless
    assert found.flops == {"bf16": 6 * 2 * 32 * 4096 * 2048}
    # Each iteration reads its layer, not the stack; the gathered rows are written and read.
    assert found.hbm_read == pytest.approx(6 * (layer + 2 * row + row) + row, rel=1e-3)
    assert found.hbm_written == pytest.approx(6 * (2 * row + row) + row, rel=1e-3)
    (gather,) = found.collectives
    assert (gather.kind, gather.axes, gather.whole, gather.executed) == ("all-gather", ("tensor",), True, 6)
    assert gather.sent_bytes == gather.payload_bytes == row
    assert not gather.overlapped
    assert found.sent_bytes() == {("all-gather", ("tensor",), "ici"): 6 * row}


@pytest.mark.parametrize(
    ("changes", "trips"),
    [
        ((("direction=LT", "direction=LE"),), 7),
        ((("direction=LT", "direction=NE"),), 6),
        ((("constant.1 = s32[]{:T(128)} constant(1)", "constant.1 = s32[]{:T(128)} constant(4)"),), 2),
        ((("constant.8 = s32[]{:T(128)} constant(0)", "constant.8 = s32[]{:T(128)} constant(9)"),), 0),
        ((("add(%copy.2", "multiply(%copy.2"),), None),
        (
            (
                (
                    'op_name="jit(f)/while" stack_frame_id=3}',
                    'op_name="w"}, backend_config={"known_trip_count":{"n":"9"}}',
                ),
            ),
            9,
        ),
    ],
)
def test_iterations(changes, trips):
    text = SAMPLES["scan"]
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    found = analyse(text, FOUR)
    assert [loop.trips for loop in found.loops] == [trips]
    assert found.flops.get("bf16", 0) == (1 if trips is None else trips) * 2 * 32 * 4096 * 2048
    assert len(found.endless) == (trips is None)


def test_the_dearest_branch_counts_unless_shares_are_given():
    dear = 2 * 16 * 2048 * 2048
    found = analyse(SAMPLES["branches"], MeshAxes(()))
    (choice,) = found.conditionals
    assert (choice.flops, choice.shares, found.flops) == ((0, dear), (0, 1), {"bf16": dear})
    found = analyse(SAMPLES["branches"], MeshAxes(()), shares={"/cond": (0.75, 0.25), "unrelated": (1, 0)})
    assert found.flops == {"bf16": dear / 4}
    with pytest.raises(ValueError, match=r"3 shares .*cond, expected 2 branches"):
        executions(Module.parse(SAMPLES["branches"]), {"/cond": (1, 0, 0)})


def test_an_update_in_place_moves_the_rows_and_a_copy_moves_everything():
    rows, cache = 8 * 384 * 4, 18 * 4096 * 384 * 4
    found = analyse(SAMPLES["update"], MeshAxes(()))
    assert found.hbm_written == 2 * rows + cache
    assert found.hbm_read == pytest.approx(rows + cache, abs=16)
    (copy,) = found.copies
    assert (copy.kind, copy.op_name, copy.shape, copy.bytes) == ("copy", "jit(f)/scatter", "u32[18,4096,384]", cache)
    assert analyse(SAMPLES["update"], MeshAxes(()), copies_from=cache + 1).copies == ()


def test_a_slice_behind_other_steps_of_a_fusion_is_still_a_slice():
    """TPU7x relabels a stack by a fusion in a fusion before the layer is cut out of it."""
    found = analyse(SAMPLES["nested"], MeshAxes(()))
    layer = 256 * 6144 * 2
    assert found.hbm_read == pytest.approx(layer + 64 * 6144 * 2, rel=1e-3)
    # A gather whose rows are only numbered anew afterwards is no copy.
    assert found.copies == ()


def test_collectives_in_calls_and_fusions():
    found = {one.kind: one for one in analyse(SAMPLES["mixed"], EIGHT).collectives}
    whole = 4096 * 4096 * 2
    # TPU7x runs this one on its SparseCores, beside the product of heads.
    reduce = found["all-reduce"]
    assert (reduce.axes, reduce.sent_bytes, reduce.overlapped) == (("expert",), whole, True)
    assert reduce.overlap_flops == 2 * 256 * 8 * 128 * 1024
    # An all-reduce in a fusion of this name is a reduce-scatter of what goes into the fusion.
    scatter = found["reduce-scatter"]
    assert (scatter.axes, scatter.sent_bytes, scatter.overlapped) == (("tensor",), whole / 2, False)
    permute = found["collective-permute"]
    assert (permute.axes, permute.sent_bytes, permute.overlapped) == (("tensor",), 2128 * 4096 * 2, False)
    assert len(found) == 3


def test_flops_by_type():
    found = analyse(SAMPLES["mixed"], EIGHT).flops
    # A batched product is a convolution with holes: only the diagonal of heads is computed. A kernel is as stated.
    assert found == {"bf16": 2 * 256 * 8 * 128 * 1024, "kernel": 123456, "f32x6": 2 * 256 * 256 * 128}


def test_kernels():
    found = {kernel.name: kernel for kernel in analyse(SAMPLES["mixed"], EIGHT).kernels}
    assert (found["gmm"].calls, found["gmm"].flops, found["gmm"].hbm_bytes) == (1, 123456, 7890)
    assert (found["silent"].target, found["silent"].flops) == ("tpu_custom_call", None)


def test_exchanges_between_slices():
    mesh = MeshAxes((("data", 2), ("expert", 2), ("tensor", 2)), slices=2)
    found = analyse(SAMPLES["slices"], mesh).collectives
    whole = 4 * 256 * 2048 * 2
    assert [(one.kind, one.axes, one.network, one.sent_bytes) for one in found] == [
        ("all-to-all", ("data", "expert"), "dcn", whole * 3 / 4),
        ("reduce-scatter", ("expert", "tensor"), "ici", whole * 3 / 4),
        ("all-reduce", ("data",), "dcn", whole / 4),
        ("all-gather", ("expert", "tensor"), "ici", whole * 3 / 4),
    ]


def test_memory_plan():
    plan = read_assignment(SAMPLES["assignment"], Module.parse(SAMPLES["scan"]), 2**30)
    memory = plan.memory
    assert (memory.arguments, memory.outputs, memory.aliased) == (50331648 + 131072, 2048, 131072)
    assert (memory.temporaries, memory.constants, memory.host) == (394240, 512, 4096)
    assert memory.total == 50331648 + 131072 + 2048 + 394240 + 512
    assert memory.free == 2**30 - memory.total
    assert [(buffer.label, buffer.bytes) for buffer in plan.temporaries[:3]] == [
        ("jit(f)/while/body/dot_general", 262144),
        ("copy.9", 131072),
        ("add.4", 512),
    ]
    assert plan.arguments[1].shape == "bf16[32,2048]"


def test_refusals():
    first = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (2.00T) exceeds "
        "available HBM (15.75G)."
    )
    second = "RESOURCE_EXHAUSTED: 1. Ran out of memory in memory space hbm. Used 16.50G of 15.75G hbm. Exceeded hbm by"
    assert out_of_hbm(first) == (2 * 2**40, int(15.75 * 2**30))
    assert out_of_hbm(second) == (int(16.5 * 2**30), int(15.75 * 2**30))
    assert out_of_hbm("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 1M of 0M vmem.") is None
    assert out_of_hbm("INVALID_ARGUMENT") is None


@pytest.mark.parametrize(
    ("needed", "size"),
    [("512", 512), ("512B", 512), ("1.5K", 1536), ("54.70G", round(54.7 * 2**30)), ("9.58P", round(9.58 * 2**50))],
)
def test_sizes_of_any_magnitude_are_read_from_a_refusal(needed, size):
    said = f"RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used {needed} of 95.74G hbm. Exceeded hbm."
    assert out_of_hbm(said) == (size, round(95.74 * 2**30))
    assert out_of_hbm(said.replace("RESOURCE_EXHAUSTED", "INTERNAL")) is None
