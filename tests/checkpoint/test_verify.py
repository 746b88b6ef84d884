"""`glm52 verify` finds any value, name, type or file that is not what the source makes of it, and nothing else."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner, Result

from glm52_jax.checkpoint.sources.open_source import open_checkpoint
from glm52_jax.io.unfinished import MANIFEST
from glm52_jax.verification import command
from glm52_jax.verification.verify import verify
from sharding.errors import InputError
from tests.checkpoint.builders import MTP_LAYER, Folder
from tests.checkpoint.conversions import run_convert

WEIGHT = "model.layers.3.mlp.experts.5.down_proj.weight"
CHUNK = "params/model.layers.3.mlp.experts.down_proj.weight/c/5/0/0"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, fp8_folder: Folder) -> Path:
    """Not to be changed."""
    path = tmp_path_factory.mktemp("made") / "c"
    run_convert(fp8_folder.path, path)
    return path


@pytest.fixture
def target(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(made, tmp_path / "target"))


def differences(target: Path, source: Path, **keywords: Any) -> list[str]:
    return verify(open_checkpoint(target), open_checkpoint(source), **keywords).differences


def invoke(*arguments: Any) -> Result:
    return CliRunner().invoke(command.verify, [str(a) for a in arguments])


def test_notes_on_a_config_are_no_difference(plain: Folder, tmp_path: Path) -> None:
    """They name its file, which is another one."""
    plain.edit_json(lambda config: config | {"head_dim": 5, "moe_router_dtype": "bfloat16"})
    run_convert(plain.path, tmp_path / "c")
    assert differences(tmp_path / "c", plain.path) == []


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": "bfloat16"},
        {"dtype": "float32"},
        {"layers": (0, MTP_LAYER)},
        {"layers": (0, 1, 3)},
        {"without_mtp": True},
    ],
)
@pytest.mark.parametrize("name", ["fp8_folder", "plain_folder"])
def test_what_was_converted_is_equal(
    name: str, settings: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path
):
    source = request.getfixturevalue(name).path
    run_convert(source, tmp_path / "c", **settings)
    assert differences(tmp_path / "c", source) == []
    assert differences(tmp_path / "c", source, quick=True) == []


def test_quantised_weights_are_equal_to_what_quantising_gives(tmp_path: Path, plain_folder: Folder):
    run_convert(plain_folder.path, tmp_path / "c", quantize="fp8")
    report = verify(open_checkpoint(tmp_path / "c"), open_checkpoint(plain_folder.path))
    assert report.differences == []
    assert report.changed == ["176 tensors of F32 became F8_E4M3: quantised, which rounds them"]


def test_it_says_so_and_the_exit_code_too(made: Path, target: Path, fp8_folder: Folder):
    result = invoke(made, "--against", fp8_folder.path)
    assert result.exit_code == 0
    assert "405 tensors, 643 kB: every value is as" in result.output
    data = bytearray((target / CHUNK).read_bytes())
    data[100] ^= 1
    (target / CHUNK).write_bytes(data)
    result = invoke(target, "--against", fp8_folder.path)
    assert result.exit_code == 1
    assert re.search(rf"^{WEIGHT} differs from \[3, 4\] on: .*, expected ", result.output, re.MULTILINE)
    assert invoke(target, "--against", fp8_folder.path, "--quick").exit_code == 0  # no value is read
    assert isinstance(invoke(target, "--against", fp8_folder.path / "nowhere").exception, InputError)


def test_one_bit_anywhere_is_found(made: Path, target: Path, fp8_folder: Folder):
    rng = np.random.default_rng(0)
    chunks = sorted(f for f in (target / "params").rglob("*") if f.is_file() and "/c/" in str(f))
    for file in rng.choice(np.array(chunks, object), 12, replace=False):
        whole = file.read_bytes()
        data = bytearray(whole)
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        file.write_bytes(data)
        (found,) = differences(target, fp8_folder.path)
        name = file.relative_to(target / "params").parts[0]
        assert name.split(".")[-2] in found
        file.write_bytes(whole)


def test_an_exchange_of_two_experts_is_found(target: Path, fp8_folder: Folder):
    other = target / CHUNK.replace("/c/5/", "/c/6/")
    one, two = (target / CHUNK).read_bytes(), other.read_bytes()
    (target / CHUNK).write_bytes(two)
    other.write_bytes(one)
    assert [d.split(" ")[0] for d in differences(target, fp8_folder.path)] == [WEIGHT, WEIGHT.replace(".5.", ".6.")]


def test_a_source_that_changed_since_is_found(target: Path, fp8: Folder):
    fp8.put({"model.norm.weight": fp8.tensors()["model.norm.weight"] + 1})
    (found,) = differences(target, fp8.path)
    assert found.startswith("model.norm.weight differs from [0] on")


def test_an_expected_value_that_is_stored_too_is_not_enough(target: Path, fp8_folder: Folder):
    """Values equal to the source's, but the manifest has another checksum."""
    edit(target / MANIFEST, lambda m: m["tensors"][WEIGHT].update(crc32="00000000"))
    (found,) = differences(target, fp8_folder.path)
    assert re.fullmatch(rf"{WEIGHT} has checksum [0-9a-f]{{8}}, but the manifest has 00000000", found)


def test_another_dtype_or_shape_in_the_source_is_found(target: Path, plain_folder: Folder):
    found = differences(target, plain_folder.path, quick=True)
    assert (
        "model.layers.0.self_attn.q_a_proj.weight was F8_E4M3 in the source of the conversion, and is F32" in found[0]
    )


def test_another_config_is_found(target: Path, fp8_folder: Folder):
    edit(target / "config.json", lambda c: c.update(rms_norm_eps=1e-3, latent_norm_eps=1e-5))
    (found,) = differences(target, fp8_folder.path, quick=True)
    assert "rms_norm_eps is 0.001, expected 1e-05" in found


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


# What is damaged in itself is refused by whoever opens it.

DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a_chunk_is_missing": (lambda c: (c / CHUNK).unlink(), f"{CHUNK}: cannot be read .* values of {WEIGHT}"),
    "a_chunk_is_cut": (lambda c: os.truncate(c / CHUNK, 100), f"{CHUNK}: 100 bytes, expected 2048 of {WEIGHT}"),
    "a_chunk_is_empty": (lambda c: os.truncate(c / CHUNK, 0), f"{CHUNK}: 0 bytes, expected 2048"),
    "a_leaf_is_missing": (
        lambda c: shutil.rmtree(c / "params" / "model.norm.weight"),
        "model.norm.weight/zarr.json: no such file",
    ),
    "a_leaf_has_another_type": (
        lambda c: edit(c / "params" / "model.norm.weight" / "zarr.json", lambda z: z.update(data_type="bfloat16")),
        "model.norm.weight/zarr.json: data_type is bfloat16, but manifest.json has float32",
    ),
    "the_tree_is_missing": (lambda c: (c / "params" / "_METADATA").unlink(), "_METADATA: no such file"),
    "the_manifest_is_missing": (lambda c: (c / MANIFEST).unlink(), "target: is not finished"),
    "the_manifest_is_cut": (lambda c: os.truncate(c / MANIFEST, 2000), "manifest.json: not valid JSON"),
    "the_manifest_is_of_another_format": (
        lambda c: edit(c / MANIFEST, lambda m: m.update(format="other")),
        "manifest.json: format is 'other', expected 'glm52-orbax'",
    ),
    "the_manifest_is_newer": (lambda c: edit(c / MANIFEST, lambda m: m.update(version=2)), "version is 2, expected 1"),
    "the_manifest_lacks_a_field": (
        lambda c: edit(c / MANIFEST, lambda m: m.pop("tensors")),
        "manifest.json: is not as a conversion writes it",
    ),
    "the_manifest_names_an_unknown_type": (
        lambda c: edit(c / MANIFEST, lambda m: m["tensors"][WEIGHT].update(dtype="I4")),
        "manifest.json: is not as a conversion writes it",
    ),
    "the_manifest_lacks_an_expert": (
        lambda c: edit(c / MANIFEST, lambda m: m["tensors"].pop(WEIGHT)),
        "down_proj.weight/zarr.json: shape is .8, 64, 32., but manifest.json has .7, 64, 32.",
    ),
    "the_manifest_lacks_a_tensor": (
        lambda c: edit(c / MANIFEST, lambda m: m["tensors"].pop("lm_head.weight")),
        "target: lm_head.weight is missing",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_result_is_refused(target: Path, fp8_folder: Folder, damage: str):
    change, sentence = DAMAGES[damage]
    change(target)
    for quick in (True, False):
        with pytest.raises(InputError, match=sentence):
            differences(target, fp8_folder.path, quick=quick)


# A published folder beside another one.


def test_a_published_target_is_compared_too(tmp_path: Path, fp8_folder: Folder, fp8: Folder):
    assert differences(fp8.path, fp8_folder.path) == []
    single = fp8_folder.as_single(tmp_path / "single").path
    shutil.copy(fp8_folder.path / "generation_config.json", single)
    assert differences(single, fp8_folder.path) == []
    name = "model.layers.1.mlp.gate.weight"
    changed = fp8.tensors()[name]
    changed[2, 3] += 1
    fp8.put({name: changed})
    (found,) = differences(fp8.path, fp8_folder.path)
    assert found.startswith(f"{name} differs from [2, 3] on")


def test_a_missing_mtp_layer_is_a_difference(fp8_folder: Folder, fp8: Folder):
    fp8.drop(lambda name: name.startswith(f"model.layers.{MTP_LAYER}."))
    assert differences(fp8.path, fp8_folder.path) == [f"the MTP layer is missing in {fp8.path}"]


def test_a_rounded_tensor_is_a_difference_where_the_type_is_kept(plain_folder: Folder, plain: Folder):
    """Names, shapes and types all fit."""
    name = "lm_head.weight"
    plain.put({name: plain.tensors()[name].astype(ml_dtypes.bfloat16).astype(np.float32)})
    assert differences(plain.path, plain_folder.path, quick=True) == []
    (found,) = differences(plain.path, plain_folder.path)
    assert found.startswith(name)
