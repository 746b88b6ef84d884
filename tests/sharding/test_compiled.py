"""Functions compiled for TPUs that are not there: counts by hand, the compiler's memory plan, what does not fit."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sharding.compiler import chips
from sharding.compiler.compile import compile_for
from sharding.compiler.topology import Topology
from sharding.layout import Layout
from tests.needs import needs_libtpu

pytestmark = needs_libtpu
BF16 = jnp.bfloat16
LAYERS, WIDTH, ROWS = 6, 2048, 256


@pytest.fixture(scope="module", params=["v5p:2x2x2", "tpu7x:2x2x1"])
def eight(request):
    return Topology.parse(request.param).mesh(Layout(data=2, expert=2, tensor=2))


@pytest.fixture(scope="module")
def one():
    return Topology.parse("v5e:1x1").mesh(Layout())


def array(device_put_args, shape, dtype=BF16, *spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(device_put_args.mesh, P(*spec)))


def layer(x, w):
    return jax.nn.relu(x @ w)


def scanned(ws, x):
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0]


def unrolled(ws, x):
    for number in range(LAYERS):
        x = layer(x, ws[number])
    return x


def test_scanned_and_unrolled_are_counted_alike(eight):
    """By the shard: each device gathers its rows and multiplies by its columns."""
    ws = array(eight, (LAYERS, WIDTH, WIDTH), BF16, None, None, "tensor")
    x = array(eight, (ROWS, WIDTH), BF16, ("data", "expert"), "tensor")

    def on_shards(function):
        def gathered(x, w):
            return layer(jax.lax.all_gather(x, "tensor", axis=1, tiled=True), w)

        def loop(ws, x):
            if function is scanned:
                return jax.lax.scan(lambda x, w: (gathered(x, w), None), x, ws)[0]
            for number in range(LAYERS):
                x = gathered(x, ws[number])
            return x

        specs = (P(None, None, "tensor"), P(("data", "expert"), "tensor"))
        return jax.shard_map(loop, mesh=eight.mesh, in_specs=specs, out_specs=specs[1], check_vma=False)

    rolled, flat = (compile_for(on_shards(function), (ws, x), eight) for function in (scanned, unrolled))
    by_hand = LAYERS * 2 * (ROWS // 4) * WIDTH * (WIDTH // 2)
    assert [loop.trips for loop in rolled.program.loops] == [LAYERS]
    assert not flat.program.loops
    for step in (rolled, flat):
        assert step.program.flops["bf16"] == pytest.approx(by_hand, rel=0.02)
        sent = LAYERS * (ROWS // 4) * (WIDTH // 2) * 2
        assert step.program.sent_bytes() == {("all-gather", ("tensor",), "ici"): sent}
    assert rolled.program.hbm_bytes == pytest.approx(flat.program.hbm_bytes, rel=0.10)
    assert flat.program.hbm_read >= LAYERS * WIDTH * WIDTH


def test_scanned_and_unrolled_on_one_device(one):
    arguments = (array(one, (LAYERS, WIDTH, WIDTH)), array(one, (ROWS, WIDTH)))
    rolled, flat = (compile_for(function, arguments, one).program for function in (scanned, unrolled))
    by_hand = LAYERS * 2 * ROWS * WIDTH * WIDTH
    assert rolled.flops["bf16"] == pytest.approx(by_hand, rel=0.02)
    assert flat.flops["bf16"] == pytest.approx(by_hand, rel=0.02)
    assert rolled.hbm_bytes == pytest.approx(flat.hbm_bytes, rel=0.10)
    assert rolled.hbm_bytes == pytest.approx(LAYERS * WIDTH * WIDTH * 2, rel=0.25)


@pytest.mark.parametrize(("dtype", "kind"), [(jnp.float8_e4m3fn, "fp8"), (jnp.int8, "int8"), (BF16, "bf16")])
def test_a_product_by_hand(one, dtype, kind):
    def product(x, w):
        wide = jnp.int32 if dtype == jnp.int8 else jnp.float32
        return jnp.einsum("bd,df->bf", x, w, preferred_element_type=wide)

    step = compile_for(product, (array(one, (512, 4096), dtype), array(one, (4096, 2048), dtype)), one)
    size = jnp.dtype(dtype).itemsize
    assert step.program.flops == {kind: 2 * 512 * 4096 * 2048}
    moved = (512 * 4096 + 4096 * 2048) * size + 512 * 2048 * 4
    assert step.program.hbm_bytes == pytest.approx(moved, rel=0.02)
    assert step.memory.arguments == (512 * 4096 + 4096 * 2048) * size
    assert step.memory.outputs == 512 * 2048 * 4


def test_batched_heads_by_hand(one):
    def heads(x, w):
        return jnp.einsum("bhd,hdf->bhf", x, w, precision="highest")

    arguments = (array(one, (128, 8, 256), jnp.float32), array(one, (8, 256, 512), jnp.float32))
    assert compile_for(heads, arguments, one).program.flops == {"f32x6": 2 * 128 * 8 * 256 * 512}


def test_a_gather_reads_its_rows(one):
    """4 of 4096 MiB: nothing in the table is read that is not asked for."""
    arguments = (array(one, (2**20, 512), jnp.float32), array(one, (2048,), jnp.int32))
    step = compile_for(lambda table, rows: table.at[rows].get(mode="promise_in_bounds"), arguments, one)
    assert step.program.hbm_bytes == pytest.approx(2 * 2048 * 512 * 4, rel=0.1)


def test_an_all_to_all_and_a_sum(eight):
    def exchange(x):
        x = jax.lax.all_to_all(x, ("data", "expert"), 0, 0, tiled=True)
        return jax.lax.psum(x * 2, "tensor")

    mapped = jax.shard_map(
        exchange,
        mesh=eight.mesh,
        in_specs=P(("data", "expert", "tensor")),
        out_specs=P(("data", "expert")),
        check_vma=False,
    )
    step = compile_for(mapped, (array(eight, (8192, 1024), BF16, ("data", "expert", "tensor")),), eight)
    mine = 1024 * 1024 * 2
    assert step.program.sent_bytes() == {
        ("all-to-all", ("data", "expert"), "ici"): mine * 3 / 4,
        ("all-reduce", ("tensor",), "ici"): mine,
    }


def test_two_slices():
    device_put_args = Topology.parse("2xv6e:2x2").mesh(Layout(data=2, expert=2, tensor=2, slices=2))
    mapped = jax.shard_map(
        lambda x: jax.lax.psum(x, ("data", "expert")),
        mesh=device_put_args.mesh,
        in_specs=P(("data", "expert"), "tensor"),
        out_specs=P(None, "tensor"),
    )
    found = compile_for(
        mapped, (array(device_put_args, (4096, 1024), BF16, ("data", "expert"), "tensor"),), device_put_args
    ).program
    assert {one.network for one in found.collectives} == {"ici", "dcn"}
    (slow,) = [one for one in found.collectives if one.network == "dcn"]
    assert (slow.kind, slow.axes) == ("all-reduce", ("data",))


def cache_step(write):
    def step(cache, ws, x, at):
        def body(carry, number):
            x, cache = carry
            x = layer(x, ws[number])
            cache = write(cache, x, number, at)
            return (x, cache), None

        return jax.lax.scan(body, (x, cache), jnp.arange(LAYERS))[0]

    return step


@pytest.fixture(scope="module")
def cache_arguments(one):
    return (
        array(one, (LAYERS, 8192, WIDTH)),
        array(one, (LAYERS, WIDTH, WIDTH)),
        array(one, (16, WIDTH)),
        array(one, (), jnp.int32),
    )


def test_a_donated_cache_is_written_in_place(one, cache_arguments):
    def write(cache, x, number, at):
        return jax.lax.dynamic_update_slice(cache, x[None], (number, at, 0))

    names = ("cache", "weights", "x", "at")
    step = compile_for(cache_step(write), cache_arguments, one, donate=[0], names=names)
    cache, weights = LAYERS * 8192 * WIDTH * 2, LAYERS * WIDTH * WIDTH * 2
    assert step.fits
    assert step.memory.aliased == cache
    assert step.memory.temporaries < 2**20
    assert [(buffer.label, buffer.bytes) for buffer in step.arguments[:2]] == [("cache", cache), ("weights", weights)]
    assert not step.program.copies
    assert step.program.hbm_bytes == pytest.approx(weights, rel=0.05)


def test_copies_of_a_cache_are_found(one, cache_arguments):
    """A cache that is not donated has to be copied."""

    def write(cache, x, number, at):
        return jax.lax.dynamic_update_slice(cache, x[None], (number, at, 0))

    step = compile_for(cache_step(write), cache_arguments, one)
    cache = LAYERS * 8192 * WIDTH * 2
    assert step.memory.aliased == 0
    assert max(copy.bytes for copy in step.program.copies) == cache


def test_arguments_of_trees_and_unused_ones_are_there(one):
    arguments = ({"a": array(one, (256, 256)), "b": [array(one, (128, 128))]}, array(one, (512, 128)))
    step = compile_for(lambda tree, unused: tree["a"] * 2, arguments, one, names=("params", "spare"))
    assert [buffer.label for buffer in step.arguments] == ["params['a']", "params['b'][0]", "spare"]
    assert step.memory.arguments == 2 * (256 * 256 + 128 * 128 + 512 * 128)


def test_a_jitted_function_is_taken_apart(one):
    jitted = jax.jit(lambda x, y: x + y, donate_argnums=1)
    step = compile_for(jitted, (array(one, (512, 512)), array(one, (512, 512))), one, donate=[0])
    assert step.memory.aliased == 512 * 512 * 2
    assert step.memory.outputs == 0


def test_a_slice_into_a_kernel_is_a_copy(one):
    """What a kernel states about itself counts; the slice of a stack that it is given is materialised."""

    def double(w_ref, out_ref):
        out_ref[...] = w_ref[...] * 2

    def body(x, w):
        block = pl.BlockSpec((128, 4096), lambda row: (row, 0))
        doubled = pl.pallas_call(
            double,
            out_shape=jax.ShapeDtypeStruct((16384, 4096), BF16),
            grid=(128,),
            in_specs=[block],
            out_specs=block,
            name="double",
            cost_estimate=pl.CostEstimate(flops=1000, bytes_accessed=2000, transcendentals=0),
        )(w)
        return x + doubled[:16], None

    arguments = (array(one, (5, 16384, 4096)), array(one, (16, 4096)))
    found = compile_for(lambda ws, x: jax.lax.scan(body, x, ws)[0], arguments, one).program
    (kernel,) = [kernel for kernel in found.kernels if kernel.target == "tpu_custom_call"]
    assert (kernel.name, kernel.executed, kernel.flops, kernel.hbm_bytes) == ("double", 5, 5000, 10000)
    assert found.flops == {"kernel": 5000}
    assert [(copy.kind, copy.bytes, copy.executed) for copy in found.copies] == [("dynamic-slice", 16384 * 4096 * 2, 5)]


def test_what_does_not_fit_is_described_all_the_same(one):
    def big(x, w):
        return jnp.tanh(x @ w) @ w.T, (x @ w).sum()

    arguments = (array(one, (2**17, 2**14)), array(one, (2**14, 2**15)))
    step = compile_for(big, arguments, one, names=("x", "w"))
    assert not step.fits
    assert step.executable is None
    assert "RESOURCE_EXHAUSTED" in step.refusal
    assert step.memory.limit == one.topology.chip.hbm_bytes
    assert step.memory.total > step.memory.limit
    assert step.memory.free < 0
    assert step.memory.arguments == (2**31 + 2**29) * 2
    assert any("dot_general" in buffer.label and buffer.bytes >= 2**32 for buffer in step.temporaries[:2])
    assert step.program.flops["bf16"] >= 2 * 2 * 2**46


@pytest.mark.parametrize("name", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_memory_that_the_compiler_offers(name):
    """The table of chips says what the compiler says."""
    topology = Topology.parse(name)
    device_put_args = topology.mesh(Layout(expert=topology.device_count))
    step = compile_for(lambda x: x * 2, (array(device_put_args, (2**40,)),), device_put_args)
    assert not step.fits
    assert step.memory.limit == pytest.approx(topology.chip.hbm_bytes, rel=1e-4)


def test_parts_add_up_to_the_compilers_peak(one, cache_arguments):
    def write(cache, x, number, at):
        return cache.at[number, at].set(x[0])

    step = compile_for(cache_step(write), cache_arguments, one, donate=[0])
    peak = step.executable.runtime_executable().get_compiled_memory_stats().peak_memory_in_bytes
    assert step.memory.total == pytest.approx(peak, rel=0.02)


def test_a_failure_of_another_kind_is_raised(one):
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_flag"):
        compile_for(lambda x: x * 2, (array(one, (8, 128)),), one, options={"xla_no_such_flag": "1"})


def test_a_chip_with_less_memory_than_the_compilers_does_not_fit():
    """Figures of one's own count, not those of libtpu's chip of the same name."""
    for less, fits in ((0, True), (2**24, False)):
        device_put_args = Topology(dataclasses.replace(chips.V5E, hbm_bytes=chips.V5E.hbm_bytes - less), (1, 1)).mesh(
            Layout()
        )
        x = array(device_put_args, (chips.V5E.hbm_bytes // 4096 - 2000, 2048))
        step = compile_for(lambda x: x[0] * 2, (x,), device_put_args)
        assert step.executable is not None
        assert step.fits is fits
        assert (step.memory.free >= 0) is fits
        assert step.memory.limit == chips.V5E.hbm_bytes - less
