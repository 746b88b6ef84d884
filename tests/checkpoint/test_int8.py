"""Weights in int8 blocks: made from plain or FP8 weights, stored, loaded, computed with, exported and refused."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import glm52_jax as glm
from glm52_jax.checkpoint.export.write import write_checkpoint
from glm52_jax.checkpoint.load.loader import load_params, load_with_report
from glm52_jax.checkpoint.sources.open_source import open_checkpoint
from glm52_jax.config import ModelConfig, QuantizationConfig
from glm52_jax.params.quantization import BlockQuantized, dequantize_blocks, quantize_blocks
from glm52_jax.verification.verify import verify
from sharding.errors import InputError
from tests.checkpoint.builders import Folder
from tests.checkpoint.conversions import run_convert, run_export
from tests.trees import assert_same


@given(
    weights=arrays.arrays(np.float32, (5, 7), elements=st.floats(-1e6, 1e6, width=32)),
    block=st.tuples(st.integers(1, 6), st.integers(1, 8)),
)
@settings(max_examples=60, deadline=None)
def test_values_are_within_half_a_step(weights: np.ndarray, block: tuple[int, int]) -> None:
    codes, scales = quantize_blocks(weights, block, np.int8)
    assert codes.dtype == np.int8
    assert codes.min() >= -127
    step = dequantize_blocks(np.ones_like(codes), scales, block)
    assert (np.abs(dequantize_blocks(codes, scales, block) - weights) <= step * 0.5001).all()


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory, plain_folder: Folder) -> Path:
    """The plain checkpoint, converted to int8."""
    place = tmp_path_factory.mktemp("int8") / "converted"
    run_convert(plain_folder.path, place, quantize="int8")
    return place


def test_the_config_has_the_name_that_readers_know(int8: Path) -> None:
    raw = json.loads((int8 / "config.json").read_text())["quantization_config"]
    assert raw["quant_method"] == "blockwise_int8"
    assert raw["weight_block_size"] == [128, 128]
    assert "lm_head" in raw["modules_to_not_convert"]
    assert ModelConfig.from_folder(int8).quantization.codes == "I8"


def test_codes_stay_codes_from_file_to_device(int8: Path) -> None:
    params = load_params(int8)
    assert isinstance(params["moe"]["down"], BlockQuantized)
    assert params["moe"]["down"].codes.dtype == jnp.int8
    assert params["moe"]["router_bias" if "router_bias" in params["moe"] else "bias"].dtype == jnp.float32


@pytest.mark.slow
def test_kept_and_dequantised_give_the_same_logits(int8: Path, config: ModelConfig) -> None:
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 20))
    kept, plain = (
        np.asarray(glm.forward(load_params(int8, dtype="float32", fp8=form), ModelConfig.from_folder(int8), tokens))
        for form in ("keep", "dequantize")
    )
    np.testing.assert_array_equal(kept, plain)


def test_it_verifies_and_tells_a_changed_code(tmp_path: Path, plain_folder: Folder, int8: Path) -> None:
    report = verify(open_checkpoint(int8), open_checkpoint(plain_folder.path))
    assert not report.differences
    assert any("F32 became I8: quantised, which rounds them" in sentence for sentence in report.changed)
    run_convert(plain_folder.path, tmp_path / "c", quantize="int8")
    chunk = next(p for p in sorted((tmp_path / "c" / "params").rglob("c/*")) if "down_proj.weight/" in str(p))
    chunk = next(p for p in [chunk, *sorted(chunk.rglob("*"))] if p.is_file())
    data = bytearray(chunk.read_bytes())
    data[3] ^= 1
    chunk.write_bytes(data)
    assert verify(open_checkpoint(tmp_path / "c"), open_checkpoint(plain_folder.path)).differences


def test_fp8_becomes_int8_by_way_of_its_values(tmp_path: Path, fp8_folder: Folder, config: ModelConfig) -> None:
    run_convert(fp8_folder.path, tmp_path / "c", quantize="int8")
    report = verify(open_checkpoint(tmp_path / "c"), open_checkpoint(fp8_folder.path))
    assert not report.differences
    assert any("F8_E4M3 became I8: quantised again" in sentence for sentence in report.changed)
    # The same as from the dequantised weights.
    plain = load_params(fp8_folder.path, dtype="float32", fp8="dequantize")
    stored = dataclasses.replace(
        config, dtype="float32", quantization=QuantizationConfig((128, 128), (), "blockwise_int8")
    )
    write_checkpoint(tmp_path / "written", stored, plain)
    one, two = load_params(tmp_path / "c", dtype="float32"), load_params(tmp_path / "written", dtype="float32")
    assert_same(one, two)


def test_the_published_layout_and_back(tmp_path: Path, int8: Path) -> None:
    run_export(int8, tmp_path / "out")
    report = verify(open_checkpoint(tmp_path / "out"), open_checkpoint(int8))
    assert not report.differences
    one, two = load_params(tmp_path / "out"), load_params(int8)
    assert_same(one, two)
    params, report = load_with_report(tmp_path / "out", fp8="dequantize")
    assert not isinstance(params["moe"]["down"], BlockQuantized)
    assert report.notes == ()
    with pytest.raises(InputError, match="cannot be one tensor of all experts in I8"):
        run_export(int8, tmp_path / "fused", fused=True)
    run_export(int8, tmp_path / "plain", dtype="float32")
    assert ModelConfig.from_folder(tmp_path / "plain").quantization is None


@pytest.mark.parametrize("again", ["fp8", "int8"])
def test_int8_is_not_quantised_again(tmp_path: Path, int8: Path, again: str) -> None:
    run_export(int8, tmp_path / "published")
    with pytest.raises(InputError, match=r"holds I8 codes already \(quant_method blockwise_int8\)"):
        run_convert(tmp_path / "published", tmp_path / "out", quantize=again)


def test_codes_of_another_type_than_the_config_says_are_refused(tmp_path: Path, int8: Path) -> None:
    run_export(int8, tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    raw = json.loads(path.read_text())
    raw["quantization_config"]["quant_method"] = "fp8"
    path.write_text(json.dumps(raw))
    with pytest.raises(InputError, match=r"is I8, expected F8_E4M3"):
        load_params(tmp_path / "out")
