"""Presets are mesh sizes; a layout from text or a file is refused in one sentence that helps."""

import pytest

from sharding.errors import InputError
from sharding.presets import PRESETS, read_layouts


def sizes(layouts):
    return [(layout.data, layout.expert, layout.tensor) for layout in layouts]


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("devices", "slices"), [(1, 1), (4, 1), (64, 1), (512, 2), (96, 1), (12, 3)])
@pytest.mark.parametrize("experts", [None, 256, 6])
def test_every_candidate_uses_every_device(preset, devices, slices, experts):
    found = read_layouts(preset, devices, slices, experts=experts)
    assert found
    for layout in found:
        assert (layout.devices, layout.slices, layout.name) == (devices, slices, preset)
        assert layout.data % slices == 0
        if experts is not None:
            assert experts % layout.parts("experts") == 0


def test_what_comes_first():
    assert sizes(read_layouts("throughput", 64))[:3] == [(1, 64, 1), (1, 32, 2), (1, 16, 4)]
    assert [layout.tensor for layout in read_layouts("latency", 64)][:2] == [8, 16]
    assert sizes(read_layouts("long_context", 128))[0] == (1, 2, 64)
    assert sizes(read_layouts("long_context", 8))[0] == (1, 1, 8)
    assert sizes(read_layouts("train", 512, 2, experts=256))[0] == (2, 256, 1)
    assert sizes(read_layouts("throughput", 1024, experts=256))[0] == (4, 256, 1)


def test_experts_are_whole_above_eight():
    eight, sixteen = read_layouts("latency", 64)[:2]
    assert eight.axes_of("experts") == ("expert",)
    assert eight.axes_of("expert_mlp") == ("tensor",)
    assert sixteen.axes_of("experts") == ("expert", "tensor")
    assert sixteen.axes_of("expert_mlp") == ()


def test_sizes_in_text():
    (layout,) = read_layouts("data=2, expert=16,tensor=4", 128)
    assert sizes([layout]) == [(2, 16, 4)]
    (layout,) = read_layouts("expert=16,tensor=4", 128, 2)
    assert sizes([layout]) == [(2, 16, 4)]


def test_a_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'data = 2\nexpert = 4\ntensor = 2\n[rules]\nexperts = ["data", "expert"]\nvocab = []\nheads = "tensor"\n'
    )
    (layout,) = read_layouts(str(path), 16)
    assert (sizes([layout]), layout.name) == ([(2, 4, 2)], "mine")
    assert layout.axes_of("experts") == ("data", "expert")
    assert layout.axes_of("vocab") == ()
    assert layout.axes_of("mlp") == ("tensor",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("thruput", ("'thruput'", "did you mean throughput?")),
        ("data=1,exprt=16", ("'exprt'", "did you mean expert?")),
        ("data=1,data=2", ("data twice",)),
        ("tensor=four", ("tensor is 'four'", "positive")),
        ("tensor=0", ("tensor is '0'",)),
        ("expert=16,tensor=8", ("1 x 16 x 8 = 128 devices", "expected 64", "expert=8")),
        ("expert=5,tensor=5", ("25 devices", "data=1,expert=64,tensor=1")),
        ("slices=2,data=2,expert=32", ("2 slices", "expected 1")),
        ("nowhere.toml", ("nowhere.toml", "cannot be read")),
    ],
)
def test_refused_text(text, words):
    with pytest.raises(InputError) as error:
        read_layouts(text, 64)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("expert = ", ("no TOML",)),
        ("experts = 4", ("'experts'", "did you mean expert?")),
        ("expert = '4'", ("expert is '4'",)),
        ("rules = 3", ("rules is 3",)),
        ("[rules]\nhead = 'tensor'", ("'head'", "did you mean heads?")),
        ("[rules]\nheads = 'model'", ("heads is over", "'model'", "data, expert, tensor")),
    ],
)
def test_refused_files(tmp_path, content, words):
    path = tmp_path / "mine.toml"
    path.write_text(content)
    with pytest.raises(InputError) as error:
        read_layouts(str(path), 64)
    assert all(word in str(error.value) for word in ("mine.toml", *words)), str(error.value)


def test_slices_that_do_not_divide():
    with pytest.raises(InputError, match="5 devices in 2 slices"):
        read_layouts("train", 5, 2)
