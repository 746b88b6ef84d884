"""Layouts and axis rules: sizes of meshes, and one sentence for whatever cannot be."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from sharding.errors import InputError
from sharding.layout import SINGLE, Layout
from sharding.partition import partition

LAYOUT = Layout(data=2, expert=4, tensor=8, name="test")


def test_sizes():
    assert LAYOUT.devices == 64
    assert LAYOUT.size(("data", "tensor")) == 16
    assert LAYOUT.parts("batch") == 8
    assert LAYOUT.parts("embed") == 1
    assert SINGLE.devices == 1
    assert SINGLE.axes_of("batch") == ()
    assert Layout(expert=4).axes_of("batch") == ("expert",)
    assert hash(LAYOUT) == hash(Layout(data=2, expert=4, tensor=8, name="test"))


def test_mesh_of_one_device():
    assert dict(SINGLE.mesh(jax.devices()[:1]).shape) == {"data": 1, "expert": 1, "tensor": 1}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tensor": 0}, ("tensor is 0", "positive")),
        ({"tensor": True}, ("tensor is True", "positive")),
        ({"data": 3, "slices": 2}, ("data is 3", "multiple of 2")),
        ({"rules": (("heads", ("tensor",)), ("heads", ()))}, ("heads has two rules",)),
        ({"rules": (("heads", ("model",)),)}, ("heads", "'model'", "data, expert, tensor")),
        ({"rules": (("heads", ("tensor", "tensor")),)}, ("heads is over tensor twice",)),
    ],
)
def test_refused_layouts(fields, words):
    with pytest.raises(InputError) as error:
        Layout(name="mine", **fields)
    assert all(word in str(error.value) for word in ("mine", *words))


def test_other_number_of_devices():
    with pytest.raises(InputError, match=r"2 x 4 x 8 .*needs 64 devices, found 3"):
        LAYOUT.mesh([object()] * 3)


def test_partition():
    assert partition(LAYOUT, ("batch", "embed")) == P(("data", "expert"), None)
    assert partition(LAYOUT, ("layers", "experts", None, "expert_mlp"), (75, 256, 2, 2048)) == P(
        None, "expert", None, "tensor"
    )
    assert partition(SINGLE, ("experts", "expert_mlp"), (3, 5)) == P(None, None)
    both = LAYOUT.with_rules(experts=("expert", "tensor"), expert_mlp=())
    assert partition(both, ("experts", "expert_mlp"), (64, 5)) == P(("expert", "tensor"), None)


@pytest.mark.parametrize(
    ("axes", "shape", "blocks", "words"),
    [
        (("heads", "mlp"), None, None, ("heads and mlp", "axis tensor", "each axis once")),
        (("batch", "experts"), None, None, ("batch and experts", "axis expert")),
        (("heads",), (12,), None, ("heads is 12", "tensor of 8")),
        (("batch",), (12,), None, ("batch is 12", "data and expert of 8")),
        (("mlp",), (512,), (128,), ("512 of mlp", "64 each", "multiple of 128")),
    ],
)
def test_refused_arrays(axes, shape, blocks, words):
    """The sentence names the array, the dimensions, the mesh axis and the sizes."""
    with pytest.raises(InputError) as error:
        partition(LAYOUT, axes, shape, what="w_up", blocks=blocks)
    assert all(word in str(error.value) for word in ("w_up", "test", *words))


def test_unknown_name():
    with pytest.raises(InputError, match=r"layout test: no rule for 'head', expected one of .*heads"):
        partition(LAYOUT, ("head",))


def test_blocks_that_stay_whole_are_fine():
    assert partition(LAYOUT, ("mlp", "embed"), (2048, 100), blocks=(128, 128)) == P("tensor", None)
