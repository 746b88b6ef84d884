"""The way back: what was published, or what it says that it has become."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from glm52_jax import load_config, load_params
from glm52_jax.checkpoint import commands
from glm52_jax.checkpoint.convert.options import ConversionOptions
from glm52_jax.checkpoint.export.export import plan
from glm52_jax.checkpoint.export.write import write_checkpoint
from glm52_jax.checkpoint.load.loader import load_with_report
from glm52_jax.checkpoint.sources.published import INDEX_FILE
from glm52_jax.inputs.sizes import parse_size, short_size
from sharding.errors import InputError
from tests import needs
from tests.checkpoint.builders import EXPERTS, MTP_LAYER, Folder, random_params, small_config
from tests.checkpoint.conversions import contents, run_convert, run_export, tensors
from tests.trees import assert_same


@pytest.fixture(scope="module")
def bf16_folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    path = tmp_path_factory.mktemp("bf16") / "checkpoint"
    config = small_config(dtype="bfloat16")
    write_checkpoint(path, config, random_params(config), shard_bytes=200_000)
    return Folder(path)


@pytest.mark.parametrize("name", ["fp8_folder", "bf16_folder", "plain_folder"])
def test_the_round_trip_is_the_identity(name: str, request: pytest.FixtureRequest, tmp_path: Path):
    source = request.getfixturevalue(name).path
    run_convert(source, tmp_path / "c")
    run_export(tmp_path / "c", tmp_path / "out")
    assert tensors(tmp_path / "out") == tensors(source)
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    index = json.loads((tmp_path / "out" / INDEX_FILE).read_text())
    assert set(index["weight_map"]) == set(tensors(source))
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in tensors(source).values())
    if (source / INDEX_FILE).exists():
        assert index["metadata"] == json.loads((source / INDEX_FILE).read_text())["metadata"]
    assert load_with_report(tmp_path / "out")[1].notes == ()
    run_export(tmp_path / "c", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "out")


def test_widening_and_narrowing_again_is_the_identity(bf16_folder: Folder, tmp_path: Path):
    run_convert(bf16_folder.path, tmp_path / "wide", dtype="float32")
    run_export(tmp_path / "wide", tmp_path / "out", dtype="bfloat16")
    assert tensors(tmp_path / "out") == tensors(bf16_folder.path)
    assert load_config(tmp_path / "out") == load_config(bf16_folder.path)


def test_it_says_where_values_changed(fp8_folder: Folder, bf16_folder: Folder, tmp_path: Path):
    run_convert(fp8_folder.path, tmp_path / "c", dtype="bfloat16")
    notes = plan(tmp_path / "c", tmp_path / "out", ConversionOptions()).notes
    assert "in the conversion: 176 tensors of F8_E4M3 became BF16: dequantised, codes times scales" in notes
    run_convert(fp8_folder.path, tmp_path / "keep")
    notes = plan(tmp_path / "keep", tmp_path / "out", ConversionOptions("float32")).notes
    assert notes == ("176 tensors of F8_E4M3 became F32: dequantised, codes times scales",)
    run_convert(bf16_folder.path, tmp_path / "bf16")
    assert plan(tmp_path / "bf16", tmp_path / "out", ConversionOptions()).notes == ()
    (note,) = plan(tmp_path / "bf16", tmp_path / "out", ConversionOptions("float32")).notes
    assert note.endswith("of BF16 became F32: widened, which changes no value")


def test_shards_are_no_larger_than_asked(fp8_folder: Folder, tmp_path: Path):
    run_convert(fp8_folder.path, tmp_path / "c")
    planned = plan(tmp_path / "c", tmp_path / "out", ConversionOptions(), shard_bytes=30_000)
    assert all(shard.bytes <= 30_000 or len(shard.groups) == 1 for shard in planned.shards)
    for shard in planned.shards:  # a weight and its scale in one file
        weights = [name for name in shard.tensors if name.endswith("_scale_inv")]
        assert all(name.removesuffix("_scale_inv") in shard.tensors for name in weights)
    run_export(tmp_path / "c", tmp_path / "one", shard_bytes=10**9)
    assert sorted(f.name for f in (tmp_path / "one").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors"
    ]  # fmt: skip


def test_experts_can_be_fused(bf16_folder: Folder, fp8_folder: Folder, tmp_path: Path):
    config = load_config(bf16_folder.path)
    run_convert(bf16_folder.path, tmp_path / "c")
    run_export(tmp_path / "c", tmp_path / "out", fused=True)
    write_checkpoint(tmp_path / "written", config, load_params(bf16_folder.path), fused_experts=True)
    assert tensors(tmp_path / "out") == tensors(tmp_path / "written")
    run_convert(fp8_folder.path, tmp_path / "fp8")
    with pytest.raises(InputError, match=r"experts.\w+_proj cannot be one tensor of all experts in F8_E4M3"):
        run_export(tmp_path / "fp8", tmp_path / "no", fused=True)
    run_export(tmp_path / "fp8", tmp_path / "yes", fused=True, dtype="bfloat16")
    expected = load_params(fp8_folder.path, dtype="bfloat16", fp8="dequantize")
    assert_same(load_params(tmp_path / "yes"), expected)


def test_a_published_folder_can_be_written_anew(plain_folder: Folder, tmp_path: Path):
    run_export(plain_folder.path, tmp_path / "out")
    assert tensors(tmp_path / "out") == tensors(plain_folder.path)


def test_destinations_in_use_are_refused(plain_folder: Folder, tmp_path: Path):
    run_convert(plain_folder.path, tmp_path / "c")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    for destination, sentence in {
        tmp_path / "full": r"is not empty \(notes.txt\)",
        tmp_path / "c" / "out": "lies inside the source",
        tmp_path / "c": "is the source itself",
    }.items():
        with pytest.raises(InputError, match=sentence):
            run_export(tmp_path / "c", destination)


def test_the_command(fp8_folder: Folder, tmp_path: Path):
    run_convert(fp8_folder.path, tmp_path / "c")
    arguments = [str(tmp_path / "c"), str(tmp_path / "out"), "--shard-size", "150kB"]
    result = CliRunner().invoke(commands.export, arguments)
    assert result.exit_code == 0, result.output
    assert "405 tensors, 643 kB, 5 files; at most" in result.output
    assert tensors(tmp_path / "out") == tensors(fp8_folder.path)


def test_sizes_are_read_and_written():
    assert [parse_size(t) for t in ("5GB", "64MiB", "1.5 kB", "7", 8)] == [5 * 10**9, 2**26, 1500, 7, 8]
    assert [short_size(n) for n in (340, 1510, 20_400_000, 1_506_659_919_872)] == [
        "340 B",
        "1.51 kB",
        "20.4 MB",
        "1.51 TB",
    ]
    for text in ("", "0", "-1GB", "5 apples", "GB"):
        with pytest.raises(InputError, match=r"expected a size such as 5GB"):
            parse_size(text)


# `transformers`.


@pytest.fixture(scope="module")
def transformers() -> Any:
    needs.package("torch")
    return needs.package("transformers")


@pytest.mark.parametrize("fused", [False, True])
def test_transformers_reads_what_was_exported(bf16_folder: Folder, tmp_path: Path, transformers: Any, fused: bool):
    run_convert(bf16_folder.path, tmp_path / "c")
    run_export(tmp_path / "c", tmp_path / "out", fused=fused)
    model, info = transformers.GlmMoeDsaForCausalLM.from_pretrained(
        tmp_path / "out", dtype="auto", attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert {".".join(name.split(".")[:3]) for name in info["unexpected_keys"]} == {f"model.layers.{MTP_LAYER}"}
    theirs = model.state_dict()
    params = load_params(bf16_folder.path)
    experts = theirs["model.layers.2.mlp.experts.gate_up_proj"].float().numpy().reshape(EXPERTS, 2, 32, 64)
    np.testing.assert_array_equal(experts, np.asarray(params["moe"]["gate_up"][1], np.float32))
    np.testing.assert_array_equal(theirs["lm_head.weight"].float().numpy(), np.asarray(params["head"], np.float32))


def test_what_transformers_writes_is_converted(bf16_folder: Folder, tmp_path: Path, transformers: Any):
    """It knows no MTP layer, and so writes none."""
    model = transformers.GlmMoeDsaForCausalLM.from_pretrained(
        bf16_folder.path, dtype="auto", attn_implementation="eager"
    )
    model.save_pretrained(tmp_path / "theirs", max_shard_size="200kB")
    run_convert(tmp_path / "theirs", tmp_path / "c", without_mtp=True)
    run_export(tmp_path / "c", tmp_path / "out")
    found, expected = tensors(tmp_path / "out"), tensors(bf16_folder.path)
    kept = {name: value for name, value in expected.items() if not name.startswith(f"model.layers.{MTP_LAYER}.")}
    assert set(found) == set(kept)
    assert all(found[name][2] == kept[name][2] for name in kept if found[name][0] == kept[name][0])
