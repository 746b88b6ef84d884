"""The estimate of a kernel's time: a short schedule in the format of the compiler's dump, and a kernel end to end."""

import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.schedule.bundles import blocks, parse
from benchmarks.schedule.chips import CAL, IDEAL, TIMINGS, Core
from benchmarks.schedule.estimate import estimate_kernel
from benchmarks.schedule.execute import Schedule
from benchmarks.schedule.machine import VECTOR_TO_SCALAR, Machine, tiled_words
from benchmarks.schedule.scalar import Translator
from benchmarks.schedule.units import Results, issue, results_per_matmul
from sharding.compiler.chips import CHIPS
from tests import needs

# Reads how many blocks there are, then copies them one by one.
COPY = """
= control target key start
LB: loop body
= control target key end

     0   :  { %s100_s0 = inlined_call_operand.hbm [shape: s32[8], index: 0, kind: input] /* lengths */  ;;  \
%s101_s1 = inlined_call_operand.hbm [shape: bf16[64,128], index: 1, kind: input]  ;;  %s102_s2 = smov [#allocation2] }
   0x1   :  { %5 = dma.hbm_to_smem [thread:$0] /*hbm=*/%s100_s0, /*size_in_granules=*/1, /*smem=*/%s102_s2, \
/*dst_syncflagno=*/[#allocation3] /*
base_bounds: (1) */ }
   0x2   :  { %6 = dma.done.wait [#allocation3], 1 }
   0x3   :  { %7 = vsyncadd [#allocation3], 4294967295  ;;  %s103_s3 = sld [smem:[#allocation2 + $0x2]]  ;;  \
%s104_s4 = smov 0 }
   0x4 LB: > { %s105_s5 = sadd.s32 1, %s104_s4  ;;  %s110_s6 = smul.u32 77, %s105_s5 } /* Start region 1 */
   0x5   : > { %8 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s101_s1, /*size_in_granules=*/64, /*vmem=*/%s102_s2, \
/*dst_syncflagno=*/[#allocation4]  ;;  %p106_p0 = scmp.ge.s32.totalorder %s105_s5, %s103_s3 }
   0x6   : > { %9 = dma.done.wait [#allocation4], 64  ;;  %v1_v0 = vld [vmem:[%s110_s6] sm:$0xff] }
   0x7   : > { %10 = vsyncadd [#allocation4], 4294967232  ;;  %11 = sbr.rel (!%p106_p0) target = $region1  ;;  \
%s104_s4 = smov %s105_s5 }
   0x8   : > { %v2_v1 = vadd.f32 %v1_v0, %v1_v0 }
   0x9   : > {}
   0xa   : > {}
   0xb   : > {}
   0xc   :  { %12 = vst [vmem:[#allocation5] sm:$0xff] /*vst_source=*/%v2_v1 } /* End region 1 */
"""
LENGTHS = {0: np.array([3, 4, 5, 6, 7, 8, 9, 10])}


def test_bundles_and_blocks():
    bundles = parse(COPY)
    assert len(bundles) == 13
    assert bundles[4].label == "LB"
    assert (bundles[4].depth, bundles[4].starts) == (1, (1,))
    assert bundles[12].instructions == ("%12 = vst [vmem:[#allocation5] sm:$0xff]  vst_source=%v2_v1",)
    lines = blocks(bundles, delay_slots=4)
    assert [(line.start, line.end) for line in lines] == [(0, 4), (4, 12), (12, 13)]
    assert (lines[1].condition, lines[1].target) == ("not p0", 1)
    with pytest.raises(ValueError, match="no bundles"):
        parse("")


@pytest.mark.parametrize("chip", ["v5p", "v6e"])
def test_trips_bytes_and_cycles_are_those_of_the_kernel(chip):
    chip = CHIPS[chip]
    one = estimate_kernel(COPY, chip, LENGTHS, (IDEAL, CAL))
    run = one.runs["ideal"]
    assert run.loops[0].trips == 5  # the third of the lengths
    assert run.bundles == 4 + 5 * 8 + 1
    assert run.moved == {"hbm->smem": 32, "hbm->vmem": 5 * 64 * 32}
    assert run.copies == {"hbm->smem": 1, "hbm->vmem": 5}
    assert (run.unmatched, run.unknown, run.cut, one.cores) == (0, (), False, 1)
    # A copy is issued one bundle before its wait.
    per_cycle = chip.hbm_bytes_per_s / chip.clock_hz
    stall = max(0, 32 / per_cycle - 1) + 5 * (2048 / per_cycle - 1)
    assert run.stall == pytest.approx(stall)
    assert run.cycles == pytest.approx(run.bundles + stall)
    late = one.runs["cal"]
    assert late.cycles - late.stall == pytest.approx(run.bundles)
    assert late.stall == pytest.approx(6 * (0.45e-6 * chip.clock_hz - 1) + (32 + 5 * 2048) / per_cycle / 0.8)


def test_what_nobody_gives_reads_as_zero():
    assert estimate_kernel(COPY, CHIPS["v6e"], {}, (IDEAL,)).run.loops[0].trips == 1


def test_both_cores_share_the_memory_where_both_work():
    asks = COPY.replace("%s102_s2 = smov [#allocation2] }", "%s102_s2 = smov [#allocation2]  ;;  "
                        "%s120_s9 = sld [smem:[#allocation0]] /* core id */ }")  # fmt: skip
    both = estimate_kernel(asks, CHIPS["v5p"], LENGTHS, (IDEAL,))
    alone = estimate_kernel(COPY, CHIPS["v5p"], LENGTHS, (IDEAL,))
    assert both.cores == 2
    assert both.run.stall > 1.9 * alone.run.stall
    first = asks.replace("%p106_p0 = scmp", "%p107_p1 = scmp.eq.s32.totalorder %s120_s9, 0  ;;  %p106_p0 = scmp")
    first = first.replace("dma.hbm_to_vmem [thread:$0]  ", "dma.hbm_to_vmem [thread:$0] (%p107_p1), ")
    first = first.replace("dma.done.wait [#allocation4]", "dma.done.wait (%p107_p1), [#allocation4]")
    first = first.replace("{ %s105_s5 =", "{ %p107_p1 = scmp.eq.s32.totalorder %s120_s9, 0  ;;  %s105_s5 =")
    first = first.replace("vsyncadd [#allocation4]", "vsyncadd (%p107_p1), [#allocation4]")
    only = estimate_kernel(first, CHIPS["v5p"], LENGTHS, (IDEAL,))
    assert only.cores == 1
    assert only.run.cycles == pytest.approx(alone.run.cycles)


def test_values_from_vectors_are_guesses_where_they_decide_something():
    timing = TIMINGS["v6e"]
    unused = COPY.replace("%s110_s6 = smul.u32 77, %s105_s5", "%s110_s6 = spop %v1_v0")
    assert Schedule(parse(unused), timing).unknown == ()
    used = COPY.replace("%s103_s3 = sld [smem:[#allocation2 + $0x2]]", "%s103_s3 = spop %v1_v0")
    schedule = Schedule(parse(used), timing)
    assert schedule.unknown == ("spop",)
    run = schedule.run(Core(CHIPS["v6e"], IDEAL), {VECTOR_TO_SCALAR: np.array([7])})
    assert (run.loops[0].trips, run.unknown, run.assumed) == (7, (), True)
    run = schedule.run(Core(CHIPS["v6e"], IDEAL), {})
    assert (run.loops[0].trips, run.unknown, run.assumed) == (1, ("spop",), False)


def test_a_run_that_takes_too_long_is_cut():
    endless = COPY.replace("%p106_p0 = scmp.ge.s32.totalorder %s105_s5, %s103_s3", "%p106_p0 = pmov 0")
    assert Schedule(parse(endless), TIMINGS["v6e"]).run(Core(CHIPS["v6e"], IDEAL), LENGTHS, seconds=0.1).cut


@pytest.mark.parametrize(
    ("instruction", "value"),
    [
        ("%s9_s1 = sadd.s32 4294967295, %s8_s0", 41),
        ("%s9_s1 = smul.u32 2147483647, %s8_s0", -42),
        ("%s9_s1 = sshll.u32 %s8_s0, 3", 336),
        ("%s9_s1 = sshrl.u32 4294967288, 1", (2**32 - 8) // 2),
        ("%s9_s1 = sshra.s32 4294967288, 1", -4),
        ("%s9_s1 = smin.u32 4294967295, %s8_s0", 42),
        ("%s9_s1 = smax.s32 4294967295, %s8_s0", 42),
        ("%s9_s1 = scalar_select  predicate=%p7_p3,  on_true=1,  on_false=%s8_s0", 42),
        ("%s9_s1 = smov (%p7_p3, %s8_s0), 5", 42),
        ("%s9_s1 = smov (!%p7_p3), 5", 5),
        ("%s9_s1 = sclz %s8_s0", 26),
        ("%p9_p1 = pnand %p7_p3, %p7_p3", True),
        ("%p9_p1 = scmp.lt.u32.totalorder 4294967295, %s8_s0", False),
    ],
)
def test_scalar_instructions(instruction, value):
    step = Translator().step(instruction)
    assert step.unknown == ""
    from benchmarks.schedule.scalar import NAMES

    assert eval(step.text, dict(NAMES, s0=42, s1=0, p1=False, p3=False)) == value


def test_vector_instructions_are_nothing_and_unknown_ones_are_told():
    translator = Translator()
    assert translator.step("%v3_v1 = vadd.f32 %v1_v0, %v2_v2") is None
    assert translator.step("%22 = shalt.err (!%p3_p1)") is None
    assert translator.step("%s9_s1 = snovel.s32 %s8_s0").unknown == "snovel.s32"


def test_results_of_matrix_units_are_waited_for():
    bundles = parse(
        "  0   :  { %v1_v0 = vmatmul.mubr.bf16.gmra.mxu0 %v9_v9 }\n"
        "0x1   :  { %v2_v1 = vmatmul.mubr.bf16.gmra.mxu0 %v9_v9 }\n"
        "0x2   :  { %v3_v2 = vpop.f32.mrf.mxu0 }\n"
        "0x3   :  { %v4_v3 = vpop.f32.mrf.mxu0 }\n"
    )
    results = results_per_matmul(bundles)
    assert results == Results(1, 1, 1)
    line = issue(bundles, TIMINGS["v5p"], results)
    assert line.times == (0, 16, 90 + 16, 16 + 90 + 16)
    assert line.mxu_busy == 32


def test_a_kernel_that_mixes_types_takes_the_results_of_its_own_products():
    """Two products of bfloat16 with two results each and one of float32 with one: the last result is its own."""
    bundles = parse(
        "  0   :  { %v1_v0 = vmatmul.mubr.bf16.gmra.mxu0 %v9_v9 }\n"
        "0x1   :  { %v2_v1 = vmatmul.mubr.bf16.gmra.mxu0 %v9_v9 }\n"
        "0x2   :  { %v3_v2 = vmatmul.mubr.f32.gmra.mxu0 %v9_v9 }\n"
        + "".join(f"0x{n}   :  {{ %v{n}_v3 = vpop.f32.mrf.mxu0 }}\n" for n in range(3, 8))
    )
    results = results_per_matmul(bundles)
    assert [results.of(f"vmatmul.mubr.{kind}") for kind in ("bf16", "f32", "f8e4m3")] == [2, 1, 4]
    line = issue(bundles, TIMINGS["v5p"], results)
    assert line.times[:3] == (0, 16, 32)
    assert line.times[3:] == (8 + 90, 16 + 90, 24 + 90, 32 + 90, 32 + 8 + 90)
    assert results_per_matmul([]) == Results(1, 2, 4)


def test_copies_under_way_share_the_bandwidth():
    chip = CHIPS["v6e"]
    machine = Machine(Core(chip, IDEAL), {})
    for semaphore in (1, 2):
        machine.copy("hbm", "vmem", 32, semaphore, 0, 0, 0.0)
    cycles = 1024 / (chip.hbm_bytes_per_s / chip.clock_hz)
    assert machine.wait(1, 32, 0.0) == pytest.approx(2 * cycles)
    assert machine.wait(2, 32, 0.0) == pytest.approx(2 * cycles)
    assert machine.wait(3, 1, 5.0) == 5.0
    assert machine.unmatched == 1
    machine.copy("hbm", "hbm", 32, 4, 0, 0, 1000.0)
    assert machine.finish(0.0) == pytest.approx(1000 + 2 * cycles)
    assert machine.hbm_bytes == 4 * 1024


def test_words_lie_in_tiles():
    assert tiled_words(np.arange(3)).tolist() == [0, 1, 2]
    words = tiled_words(np.arange(2 * 130).reshape(2, 130))
    assert words.shape == (512,)
    assert words[[0, 127, 128, 256, 257, 384]].tolist() == [0, 127, 130, 128, 129, 258]


_END_TO_END = """
import json, sys
from pathlib import Path
from benchmarks.schedule import dump
folder = Path(sys.argv[1])
dump.use_compiler_alone()
dump.write_schedules(folder)
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from benchmarks.schedule.estimate import estimate

def kernel(lengths, rows, out, block, semaphore):
    out[...] = jnp.zeros_like(out)
    @pl.loop(0, lengths[1])
    def _(number):
        copy = pltpu.make_async_copy(rows.at[pl.ds(number * 512, 512)], block, semaphore)
        copy.start()
        copy.wait()
        out[...] += jnp.max(block[...], axis=0, keepdims=True)

def sizes(lengths, rows):
    return pl.pallas_call(
        kernel, name="sizes", out_shape=jax.ShapeDtypeStruct((1, 128), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(1,), in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec((1, 128), lambda *_: (0, 0)),
            scratch_shapes=[pltpu.VMEM((512, 128), jnp.float32), pltpu.SemaphoreType.DMA],
        ),
    )(lengths, rows)

shapes = jax.ShapeDtypeStruct((4,), jnp.int32), jax.ShapeDtypeStruct((1 << 20, 128), jnp.float32)
for chip in ("v5e", "v6e"):
    made = estimate(sizes, shapes, chip, folder, scalars={("sizes", 0): np.array([1, 9, 1, 1])})
    run = made.kernels[0].run
    print(json.dumps([made.kernels[0].name, run.loops[0].trips, run.hbm_bytes, run.unmatched, list(run.unknown)]))
"""


def test_a_kernel_from_its_source_to_its_trips(tmp_path):
    needs.package("libtpu")
    ended = subprocess.run([sys.executable, "-c", _END_TO_END, tmp_path], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    for name, trips, moved, unmatched, unknown in found:
        assert name.startswith("sizes")
        assert trips == 9
        assert 9 * 512 * 128 * 4 <= moved < 1.01 * 9 * 512 * 128 * 4
        assert (unmatched, unknown) == (0, [])
    assert len(found) == 2
