"""Names of slices and what their chips offer; a mesh of the compiler's devices."""

import subprocess
import sys
import time

import numpy as np
import pytest

from sharding.compiler import chips, topology
from sharding.compiler.topology import Topology
from sharding.errors import InputError
from sharding.layout import Layout
from tests.needs import needs_libtpu


@pytest.mark.parametrize(
    ("name", "devices", "slices", "hosts"),
    [
        ("v5e:1x1", 1, 1, 1),
        ("v5p:4x4x4", 64, 1, 16),
        ("2xv6e:16x16", 512, 2, 128),
        ("tpu7x:2x2x4", 32, 1, 4),
        ("V5E:16x16 ", 256, 1, 64),
        ("v5p:16x16x24", 6144, 1, 1536),
    ],
)
def test_names(name, devices, slices, hosts):
    found = Topology.parse(name)
    assert (found.device_count, found.slices, found.hosts) == (devices, slices, hosts)
    assert found.devices_per_slice * slices == devices
    assert Topology.parse(found.name) == found


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("v5p:8x4x4", "v5p:4x4x8"),
        ("v6e:16x8", "v6e:8x16"),
        ("v5p:4x4", "v5p:2x2x4"),
        ("2xv5p:5x5x5", "2xv5p:4x4x8"),
        ("v6e:32x32", "v6e:16x16"),
        ("v5q:4x4x4", "v5p"),
        ("tpu7:2x2x1", "tpu7x"),
        ("4x4x4", "v5p:4x4x4"),
        ("v5p", "v5p:"),
        ("0xv5e:2x2", "at least 1"),
        ("1000000xv5p:4x4x4", "64,000,000 devices, expected at most 65,536"),
    ],
)
def test_wrong_names_come_with_the_nearest(name, suggestion):
    start = time.process_time()
    with pytest.raises(InputError) as error:
        Topology.parse(name)
    assert time.process_time() - start < 0.1
    assert suggestion in str(error.value)


def test_names_are_checked_without_the_compiler():
    code = (
        "import sys; from sharding.compiler.topology import Topology; Topology.parse('v5p:4x4x4');"
        "assert 'jax.experimental.topologies' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("chip", chips.CHIPS.values(), ids=lambda chip: chip.name)
def test_chips_have_sources_and_fall_back_to_bf16(chip):
    for number in ("hbm_bytes", "hbm_bytes_per_s", "peak_flops", "ici_link_bytes_per_s", "dcn_bytes_per_s", "clock_hz"):
        assert chip.sources[number]
        assert getattr(chip, number)
    assert chip.sources["row_copy_ns"]
    bf16 = chip.peak("bf16")
    assert chip.peak("fp8") == bf16 * (2 if chip.name == "tpu7x" else 1)
    assert chip.peak("f32x6") == bf16 / 6
    assert 3 < chip.row_copy_ns < 6
    with pytest.raises(InputError, match="int4"):
        chip.peak("int4")
    assert all(np.prod(shape) <= chip.largest_slice for shape in chips.slice_shapes(chip.name))


def test_two_devices_share_a_tpu7x_chip():
    assert chips.V5P.ici_bytes_per_s == 600e9
    assert chips.TPU7X.ici_bytes_per_s == 300e9
    assert chips.TPU7X.peak("fp8") == 2307e12


def test_layouts_of_another_size():
    with pytest.raises(InputError, match=r"has 32 devices .* has 64: for example data=1,expert=32,tensor=2"):
        Topology.parse("v5p:4x4x4").mesh(Layout(expert=16, tensor=2))
    with pytest.raises(InputError, match="for 1 slices, 2xv6e:4x4 has 2"):
        Topology.parse("2xv6e:4x4").mesh(Layout(data=2, expert=16))


def test_without_the_compiler(monkeypatch):
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install libtpu"):
        Topology.parse("v5p:4x8x8").mesh(Layout(expert=256))


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "layout", "placement"),
    [
        ("v5e:1x1", Layout(), "torus"),
        ("v5p:4x4x4", Layout(expert=16, tensor=4), "torus"),
        ("v5p:4x4x4", Layout(expert=8, tensor=8), "split torus"),
        ("tpu7x:2x2x4", Layout(expert=4, tensor=8), "torus"),
        ("2xv6e:4x4", Layout(data=4, expert=2, tensor=4, slices=2), "split torus"),
    ],
)
def test_meshes(name, layout, placement):
    found = Topology.parse(name).mesh(layout)
    devices = found.mesh.devices
    assert found.placement == placement
    assert devices.shape == (layout.data, layout.expert, layout.tensor)
    assert len(set(devices.flat)) == layout.devices
    if layout.slices > 1:
        numbers = [{device.slice_index for device in row.flat} for row in np.split(devices, layout.slices)]
        assert numbers == [{0}, {1}]


@needs_libtpu
def test_neighbours_along_tensor_are_neighbours_on_the_torus():
    devices = Topology.parse("v5p:4x4x4").mesh(Layout(expert=16, tensor=4)).mesh.devices
    for row in devices.reshape(-1, 4):
        coordinates = np.array([device.coords for device in row])
        assert (np.ptp(coordinates, axis=0) > 0).sum() == 1
