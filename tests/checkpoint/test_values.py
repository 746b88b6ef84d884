"""Values that are not finite are said, casts that overflow and scales that are none are refused, by all that read."""

import dataclasses
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from glm52_jax.checkpoint import commands
from glm52_jax.checkpoint.export.write import write_checkpoint
from glm52_jax.checkpoint.formats.manifest import Manifest
from glm52_jax.checkpoint.load.loader import load_params, load_with_report
from glm52_jax.checkpoint.sources.open_source import open_checkpoint
from glm52_jax.checkpoint.value_checks import BadValueCounts, cast, not_finite
from glm52_jax.config import ModelConfig
from glm52_jax.params.quantization import BlockQuantized
from glm52_jax.verification import command
from glm52_jax.verification.verify import verify
from sharding.errors import InputError
from tests.checkpoint.builders import Folder
from tests.checkpoint.conversions import contents, run_convert, run_export, tensors
from tests.checkpoint.test_user_data import stopped

NORM, O_PROJ = "model.norm.weight", "model.layers.1.self_attn.o_proj.weight"
Q_A = "model.layers.2.self_attn.q_a_proj.weight"
TYPES = [np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)]


def put(folder: Folder, name: str, *values: float) -> None:
    """Sets the first values of a tensor."""
    tensor = folder.tensors()[name]
    tensor.reshape(-1)[: len(values)] = values
    folder.put({name: tensor})


# Arithmetic.


@given(data=st.data(), dtype=st.sampled_from(TYPES))
@settings(max_examples=60, deadline=None)
def test_counts_are_those_of_numpy(data: st.DataObject, dtype: np.dtype):
    values = data.draw(arrays.arrays(np.uint16, st.integers(0, 40))).view(np.uint8)
    values = values[: values.size - values.size % dtype.itemsize].view(dtype)
    plain = values.astype(np.float32)
    assert not_finite(values) == BadValueCounts(int(np.isnan(plain).sum()), int(np.isinf(plain).sum()))


@given(
    values=arrays.arrays(np.float32, st.integers(0, 30), elements=st.floats(width=32)),
    dtype=st.sampled_from(TYPES[:3]),
)
@settings(max_examples=100, deadline=None)
def test_a_cast_counts_what_it_changes(values: np.ndarray, dtype: np.dtype):
    made, counts = cast(values, dtype)
    with np.errstate(all="ignore"):
        expected = values.astype(dtype)
    assert np.array_equal(made.view(np.uint8), expected.view(np.uint8))
    wide = expected.astype(np.float32)
    assert counts.nan == np.isnan(values).sum()
    assert counts.infinite == np.isinf(values).sum()
    assert counts.beyond == (np.isinf(wide) & np.isfinite(values)).sum()
    assert counts.zeroed == ((wide == 0) & (values != 0)).sum()


# Not finite.


@pytest.fixture
def bad(plain: Folder) -> Folder:
    put(plain, NORM, np.nan, np.inf, -np.inf, np.nan)
    put(plain, O_PROJ, np.nan)
    return plain


def test_values_that_are_not_finite_are_said_by_every_command(bad: Folder, tmp_path: Path):
    """And stay as they are: what was asked for is a copy."""
    runner = CliRunner()
    for function, arguments in (
        (commands.convert, [bad.path, tmp_path / "c"]),
        (commands.convert, [bad.path, tmp_path / "c"]),  # finished already
        (commands.convert, [bad.path, tmp_path / "d", "--dtype", "bfloat16"]),
        (command.verify, [tmp_path / "c", "--against", bad.path]),
        (command.verify, [tmp_path / "c", "--against", bad.path, "--quick"]),
        (commands.export, [tmp_path / "c", tmp_path / "out"]),
        (command.verify, [tmp_path / "out", "--against", bad.path]),
    ):
        result = runner.invoke(function, [str(a) for a in arguments])
        assert result.exit_code == 0, result.output
        assert "2 tensors hold values that are not finite" in result.output, (function, arguments)
        assert f"{O_PROJ} (1 NaN), {NORM} (2 NaN, 2 infinite)" in result.output
    assert tensors(tmp_path / "c") == tensors(bad.path)
    assert Manifest.read(tmp_path / "c").tensors[NORM].counts == BadValueCounts(2, 2)
    for folder in (bad.path, tmp_path / "c"):
        (note,) = [note for note in load_with_report(folder)[1].notes if "not finite" in note]
        assert f"{NORM} (2 NaN, 2 infinite)" in note


def test_nothing_is_said_of_finite_ones(plain: Folder, tmp_path: Path):
    put(plain, NORM, 0.0, -0.0, 3.4e38, -1e-40)
    assert run_convert(plain.path, tmp_path / "c").notes == ()
    assert verify(open_checkpoint(tmp_path / "c"), open_checkpoint(plain.path)).notes == []
    assert load_with_report(plain.path)[1].notes == ()


def test_codes_can_be_no_numbers_too(fp8: Folder, tmp_path: Path):
    put(fp8, Q_A, np.nan)
    assert f"{Q_A} (1 NaN)" in run_convert(fp8.path, tmp_path / "c").notes[0]
    assert f"{Q_A} (1 NaN)" in run_convert(fp8.path, tmp_path / "d", dtype="bfloat16").notes[0]
    for form in ("keep", "dequantize"):
        assert any(f"{Q_A} (1 NaN)" in note for note in load_with_report(fp8.path, fp8=form)[1].notes)


def test_what_an_earlier_run_found_is_said_too(bad: Folder, tmp_path: Path):
    put(bad, "model.embed_tokens.weight", np.nan)  # the first that is done
    stopped(run_convert, bad.path, tmp_path / "c")
    assert "model.embed_tokens.weight (1 NaN)" in run_convert(bad.path, tmp_path / "c").notes[0]
    stopped(run_export, bad.path, tmp_path / "out")
    run_export(bad.path, tmp_path / "out")


# Casts.


def test_a_value_beyond_the_type_is_refused(plain: Folder, tmp_path: Path):
    put(plain, NORM, 1e5, -7e4, np.inf, 65504)
    sentence = rf"{NORM} has 2 values that float16 does not hold, 100000 the largest, expected at most 65504"
    for make in (
        lambda: run_convert(plain.path, tmp_path / "c", dtype="float16"),
        lambda: run_export(plain.path, tmp_path / "e", dtype="float16"),
        lambda: load_params(plain.path, dtype="float16"),
    ):
        with pytest.raises(InputError, match=sentence):
            make()
    assert not (tmp_path / "c" / "manifest.json").exists()
    put(plain, NORM, 1, 1, 1, 1)
    put(plain, O_PROJ, 3.4e38)
    with pytest.raises(InputError, match=rf"{O_PROJ} has 1 value that bfloat16 does not hold, 3.4e\+38 the largest"):
        run_convert(plain.path, tmp_path / "d", dtype="bfloat16")


def test_products_of_codes_and_scales_are_held_to_the_same(fp8: Folder, tmp_path: Path):
    scale = f"{Q_A}_scale_inv"
    for value, dtype in ((1e5, "float16"), (3e38, "float32"), (3e38, "bfloat16")):
        fp8.put({scale: np.full_like(fp8.tensors()[scale], value)})
        for make in (
            lambda dtype=dtype: run_convert(fp8.path, tmp_path / dtype, dtype=dtype),
            lambda dtype=dtype: load_params(fp8.path, dtype=dtype, fp8="dequantize"),
        ):
            with pytest.raises(InputError, match=rf"{Q_A} has [0-9,]+ values that {dtype} does not hold"):
                make()


def test_small_values_that_become_zero_are_said(plain: Folder, tmp_path: Path):
    put(plain, NORM, 1e-9, -1e-12, 6e-8)
    (note,) = run_convert(plain.path, tmp_path / "c", dtype="float16").notes
    assert "too small for their new type, which became 0" in note
    assert f"{NORM} (2)" in note
    assert verify(open_checkpoint(tmp_path / "c"), open_checkpoint(plain.path)).notes[-1] == note
    assert note in load_with_report(plain.path, dtype="float16")[1].notes


def test_written_parameters_are_held_to_the_same(config: ModelConfig, params: dict[str, Any], tmp_path: Path):

    large = params | {"norm": np.full_like(params["norm"], 1e5)}
    with pytest.raises(InputError, match=f"params: {NORM} has 64 values that float16 does not hold"):
        write_checkpoint(tmp_path / "c", dataclasses.replace(config, dtype="float16"), large)


# Scales.


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1.0])
def test_scales_that_are_none_are_refused_alike(value: float, fp8: Folder, tmp_path: Path):
    scale = f"{Q_A}_scale_inv"
    put(fp8, scale, value)
    sentence = rf"{scale} holds {value}, expected finite scales of at least 0"
    for make in (
        lambda: run_convert(fp8.path, tmp_path / "copy"),
        lambda: run_convert(fp8.path, tmp_path / "plain", dtype="bfloat16"),
        lambda: run_convert(fp8.path, tmp_path / "int8", quantize="int8"),
        lambda: run_export(fp8.path, tmp_path / "out"),
        lambda: verify(open_checkpoint(fp8.path), open_checkpoint(fp8.path)),
        lambda: load_params(fp8.path),
        lambda: load_params(fp8.path, fp8="dequantize"),
    ):
        with pytest.raises(InputError, match=sentence):
            make()
    assert not [name for name in contents(tmp_path / "copy") if f"{Q_A}/" in name]  # found before a value is written


def test_written_scales_are_held_to_the_same(fp8: Folder, fp8_config: ModelConfig, tmp_path: Path):
    params = load_params(fp8.path)
    leaf = params["moe"]["down"]
    assert isinstance(leaf, BlockQuantized)
    params["moe"]["down"] = dataclasses.replace(leaf, scales=np.array(leaf.scales) * np.nan)
    with pytest.raises(InputError, match=r"params: .*down_proj.weight_scale_inv holds nan, expected finite scales"):
        write_checkpoint(tmp_path / "c", fp8_config, params)


def test_a_scale_of_zero_is_that_of_a_block_of_zeros(fp8: Folder, tmp_path: Path):
    put(fp8, f"{Q_A}_scale_inv", 0.0)
    run_convert(fp8.path, tmp_path / "c")
    load_params(tmp_path / "c")
