"""Reading and writing one file: what is written is read, and no damage gives anything but a sentence."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm52_jax.checkpoint.formats.safetensors_file import DTYPES, SafetensorsFile, write_safetensors
from sharding.errors import InputError

RUNS = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

NAMES = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=12)
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
KINDS = st.tuples(st.sampled_from(list(DTYPES.values())), SHAPES)


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, np.ndarray]:
    """Some arrays of random bytes, NaN and all."""
    made = {}
    for name, (dtype, shape) in draw(st.dictionaries(NAMES, KINDS, max_size=5)).items():
        size = int(np.prod(shape)) * dtype.itemsize
        raw = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
        made[name] = raw.view(dtype).reshape(shape)
    return made


def write(path: Path, values: dict[str, np.ndarray]) -> None:
    write_safetensors(path, {name: (a.dtype, a.shape) for name, a in values.items()}, reversed(values.items()))


def read_all(path: Path) -> dict[str, np.ndarray]:
    file = SafetensorsFile(path)
    return {name: file.read(name) for name in file.entries}


def header_of(data: bytes) -> bytes:
    return data[8 : 8 + int.from_bytes(data[:8], "little")]


def refusal(path: Path) -> str | None:
    try:
        read_all(path)
    except InputError as error:
        return str(error)
    return None


def assert_read_or_refused(path: Path) -> None:
    """Whatever is in the file, reading all of it works or is refused in one line that names it."""
    sentence = refusal(path)
    if sentence is not None:
        assert sentence.startswith(f"{path}: ")
        assert len(sentence.splitlines()) == 1


@RUNS
@given(values=tensors())
def test_what_is_written_is_read(tmp_path: Path, values: dict[str, np.ndarray]):
    path = tmp_path / "file"
    write(path, values)
    found = read_all(path)
    assert set(found) == set(values)
    for name, array in values.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()
        assert not found[name].flags.writeable
    for name, entry in SafetensorsFile(path).entries.items():
        assert entry.start % values[name].dtype.itemsize == 0
    assert [f.name for f in tmp_path.iterdir()] == ["file"]


@RUNS
@given(values=tensors())
def test_the_safetensors_package_agrees(tmp_path: Path, values: dict[str, np.ndarray]):
    write(tmp_path / "file", values)
    with safetensors.safe_open(tmp_path / "file", framework="np") as opened:
        assert set(opened.keys()) == set(values)
        for name, array in values.items():
            assert tuple(opened.get_slice(name).get_shape()) == array.shape


@RUNS
@given(values=tensors(), data=st.data())
def test_a_shorter_or_longer_file_is_refused(tmp_path: Path, values: dict[str, np.ndarray], data: st.DataObject):
    path = tmp_path / "file"
    write(path, values)
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(InputError):
        SafetensorsFile(path)
    path.write_bytes(whole + data.draw(st.binary(min_size=1, max_size=9)))
    with pytest.raises(InputError):
        SafetensorsFile(path)


@RUNS
@given(values=tensors(), data=st.data())
def test_flipped_bytes_of_the_header_never_crash(tmp_path: Path, values: dict[str, np.ndarray], data: st.DataObject):
    path = tmp_path / "file"
    write(path, values)
    raw = bytearray(path.read_bytes())
    end = 8 + len(header_of(bytes(raw)))
    for place in data.draw(st.lists(st.integers(0, end - 1), min_size=1, max_size=4)):
        raw[place] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    assert_read_or_refused(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
SIZES = st.integers(-3, 2**70) | JSON
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from([*DTYPES, "F4", "f32"]) | JSON,
        "shape": st.lists(SIZES, max_size=4) | JSON,
        "data_offsets": st.lists(SIZES, min_size=2, max_size=2) | JSON,
    },
)


@RUNS
@given(header=st.dictionaries(st.text(max_size=4), ENTRIES | JSON, max_size=3) | JSON, rest=st.binary(max_size=20))
def test_any_header_is_read_or_refused(tmp_path: Path, header: Any, rest: bytes):
    text = json.dumps(header).encode()
    (tmp_path / "file").write_bytes(len(text).to_bytes(8, "little") + text + rest)
    assert_read_or_refused(tmp_path / "file")


@RUNS
@given(data=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(tmp_path: Path, data: bytes):
    (tmp_path / "file").write_bytes(data)
    assert_read_or_refused(tmp_path / "file")


def test_an_empty_header_is_a_file_without_tensors(tmp_path: Path):
    (tmp_path / "file").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert read_all(tmp_path / "file") == {}


def test_a_number_of_too_many_digits_is_refused(tmp_path: Path):
    text = b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}'
    (tmp_path / "file").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(InputError, match="header is not JSON"):
        SafetensorsFile(tmp_path / "file")


def test_a_write_that_fails_leaves_the_file_before_it(tmp_path: Path):
    path = tmp_path / "file"
    write(path, {"a": np.ones(3, np.float32)})

    def fails() -> Any:
        yield "a", np.zeros(3, np.float32)
        raise RuntimeError("no more")

    kinds = {name: (np.dtype(np.float32), (3,)) for name in "ab"}
    with pytest.raises(RuntimeError, match="no more"):
        write_safetensors(path, kinds, fails())
    assert [f.name for f in tmp_path.iterdir()] == ["file"]
    np.testing.assert_array_equal(read_all(path)["a"], 1)
