"""A published folder becomes an Orbax checkpoint of the same values, which Orbax and `load_params` read."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

from glm52_jax import forward, load_config, load_params
from glm52_jax.checkpoint import commands
from glm52_jax.checkpoint.convert import conversion
from glm52_jax.checkpoint.convert.options import ConversionOptions
from glm52_jax.checkpoint.export.write import write_checkpoint
from glm52_jax.checkpoint.formats.manifest import Manifest
from glm52_jax.checkpoint.formats.orbax_layout import leaf_of, leaves
from glm52_jax.checkpoint.load.loader import load_with_report
from glm52_jax.checkpoint.sources.published import INDEX_FILE
from glm52_jax.config import ModelConfig
from glm52_jax.text import write_byte_tokenizer
from sharding.errors import InputError
from tests.checkpoint import test_damaged_files, test_refusals
from tests.checkpoint.builders import EXPERTS, MTP_LAYER, Folder, random_params, small_config
from tests.checkpoint.conversions import contents, run_convert, tensors
from tests.checkpoint.damage import Damage

ROOT = Path(__file__).parents[2]
TOKENS = np.arange(2, 26)[None]


@pytest.fixture(scope="module")
def bf16_folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    path = tmp_path_factory.mktemp("bf16") / "checkpoint"
    config = small_config(dtype="bfloat16")
    write_checkpoint(path, config, random_params(config), shard_bytes=300_000)
    return Folder(path)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory, fp8_folder: Folder, bf16_folder: Folder) -> dict[str, Path]:
    """The FP8 and the BF16 checkpoint, kept as they are. Not to be changed."""
    place = tmp_path_factory.mktemp("converted")
    for name, folder in (("fp8", fp8_folder), ("bf16", bf16_folder)):
        assert run_convert(folder.path, place / name).left == 0
    return {"fp8": place / "fp8", "bf16": place / "bf16"}


@pytest.fixture(params=["fp8", "bf16"])
def pair(request: pytest.FixtureRequest, converted: dict[str, Path]) -> tuple[Folder, Path]:
    """A published folder and what it was converted to."""
    return request.getfixturevalue(f"{request.param}_folder"), converted[request.param]


def equal(a: Any, b: Any) -> bool:
    """Whether trees are of the same structure, types and bytes."""
    leaves_a, tree_a = jax.tree.flatten(a)
    leaves_b, tree_b = jax.tree.flatten(b)
    same = [
        x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in zip(leaves_a, leaves_b, strict=True)
    ]
    return tree_a == tree_b and all(same)


# What is written.


def test_every_tensor_is_there_with_its_bytes(pair: tuple[Folder, Path]):
    published, target = pair
    assert tensors(target) == tensors(published.path)


def test_chunks_are_the_tensors_themselves(fp8_folder: Folder, converted: dict[str, Path]):
    root = converted["fp8"] / "params"
    for name, values in fp8_folder.tensors().items():
        leaf, expert = leaf_of(name)
        place = root / leaf / "c" / ("" if expert is None else str(expert))
        rows = sorted(place.iterdir(), key=lambda p: int(p.name))
        chunks = [row if row.is_file() else row / "0" for row in rows]
        assert b"".join(chunk.read_bytes() for chunk in chunks) == values.tobytes(), name
    experts = json.loads((root / "model.layers.2.mlp.experts.up_proj.weight" / "zarr.json").read_text())
    assert (experts["shape"], experts["data_type"]) == ([EXPERTS, 32, 64], "float8_e4m3fn")
    assert experts["chunk_grid"]["configuration"]["chunk_shape"] == [1, 32, 64]
    embedding = json.loads((root / "model.embed_tokens.weight" / "zarr.json").read_text())
    assert embedding["chunk_grid"]["configuration"]["chunk_shape"] == [24, 64]  # 24 kB in chunks of at most 8


def test_the_manifest_says_what_each_tensor_was_made_from(pair: tuple[Folder, Path]):
    published, target = pair
    manifest = Manifest.read(target)
    values = published.tensors()
    assert set(manifest.tensors) == set(values)
    for name, record in manifest.tensors.items():
        assert record.file == published.file_of(name)
        assert record.source_dtype == record.dtype
        assert record.shape == values[name].shape
        assert record.crc32 == f"{zlib.crc32(values[name].tobytes()):08x}"
    assert manifest.total_bytes == json.loads((published.path / INDEX_FILE).read_text())["metadata"]["total_size"]
    assert manifest.files == {f: (published.path / f).stat().st_size for f in published.files}


def test_config_tokenizer_and_template_come_along(tmp_path: Path, plain: Folder):
    write_byte_tokenizer(plain.path, vocab_size=320)
    (plain.path / "chat_template.jinja").write_text("{{ messages }}")
    plain.edit_json(lambda config: config | {"a_field_of_the_owner": [1, 2]})
    (plain.path / "weights.bin").write_bytes(b"of another program")
    run_convert(plain.path, tmp_path / "out")
    beside = {name: data for name, data in contents(plain.path).items() if not name.endswith((".safetensors", ".bin"))}
    found = {name: data for name, data in contents(tmp_path / "out").items() if not name.startswith("params/")}
    found.pop("manifest.json")
    assert found == beside
    assert load_config(tmp_path / "out") == load_config(plain.path)


def test_it_is_the_same_however_the_work_is_cut(tmp_path: Path, fp8_folder: Folder, converted: dict[str, Path]):
    settings = ConversionOptions(chunk_bytes=8192)
    for number in (2, 3, 1):
        result = conversion.convert(
            conversion.plan(fp8_folder.path, tmp_path / "c", settings), jobs=3, process=(number, 3)
        )
        assert (result.left == 0) == (number == 1)
    assert contents(tmp_path / "c") == contents(converted["fp8"])


def test_large_matrices_are_cut_into_equal_chunks():
    rows = {
        (154880, 6144): 4840,  # the embedding: 32 chunks
        (6144, 16384): 1536,  # o_proj: 4
        (2048, 6144): 2048,  # an expert: whole
        (6144,): 6144,
        (3 * 7 * 2**10, 2**14): 1792,  # 11 chunks would do, 12 divide
    }
    for shape, expected in rows.items():
        (leaf,) = leaves({"w": ("BF16", shape)}).values()
        assert leaf.rows == expected or shape[0] % leaf.rows == 0
        assert shape[0] % leaf.rows == 0
        assert leaf.chunk_bytes <= 64 * 2**20
        if shape != (3 * 7 * 2**10, 2**14):
            assert leaf.rows == expected


# Loading.


@pytest.mark.quick(1)
def test_both_formats_load_to_equal_parameters_and_logits(pair: tuple[Folder, Path]):
    published, target = pair
    expected, report = load_with_report(published.path)
    params, converted_report = load_with_report(target)
    assert equal(params, expected)
    assert (converted_report.tensors, converted_report.bytes) == (report.tensors, report.bytes)
    logits = [
        np.asarray(forward(p, load_config(folder), TOKENS))
        for p, folder in ((params, target), (expected, published.path))
    ]
    assert np.array_equal(*logits)


def test_fp8_is_dequantised_as_the_loader_does(tmp_path: Path, fp8_folder: Folder):
    for dtype in ("bfloat16", "float32"):
        run_convert(fp8_folder.path, tmp_path / dtype, dtype=dtype)
        config = load_config(tmp_path / dtype)
        assert config.quantization is None
        assert config.dtype == dtype
        assert equal(load_params(tmp_path / dtype), load_params(fp8_folder.path, dtype=dtype, fp8="dequantize"))
        bias = f"model.layers.{MTP_LAYER}.mlp.gate.e_score_correction_bias"
        assert Manifest.read(tmp_path / dtype).tensors[bias].dtype == "F32"


def test_types_are_cast(tmp_path: Path, bf16_folder: Folder, plain_folder: Folder):
    run_convert(bf16_folder.path, tmp_path / "wide", dtype="float32")
    assert equal(load_params(tmp_path / "wide"), load_params(bf16_folder.path, dtype="float32"))
    run_convert(plain_folder.path, tmp_path / "narrow", dtype="bfloat16")
    assert equal(load_params(tmp_path / "narrow"), load_params(plain_folder.path, dtype="bfloat16"))
    assert "rounded" in Manifest.read(tmp_path / "narrow").notes[0]


def test_bf16_is_quantised_as_the_published_files_are(tmp_path: Path, bf16_folder: Folder):
    run_convert(bf16_folder.path, tmp_path / "q", quantize="fp8")
    config = load_config(tmp_path / "q")
    assert config.quantization is not None
    assert config.quantization.block == (128, 128)
    # The writer of parameter trees has the same policy.
    other = dataclasses.replace(
        load_config(bf16_folder.path), quantization=dataclasses.replace(config.quantization, high_precision=())
    )
    write_checkpoint(tmp_path / "written", other, load_params(bf16_folder.path))
    assert tensors(tmp_path / "q") == tensors(tmp_path / "written")
    assert set(config.quantization.high_precision) == set(load_config(tmp_path / "written").quantization.high_precision)
    high = config.quantization.keeps_high_precision
    for plain in (
        "lm_head",
        "model.layers.1.mlp.gate",
        "model.layers.0.self_attn.indexer.weights_proj",
        f"model.layers.{MTP_LAYER}.eh_proj",
    ):
        assert high(plain), plain
    assert not high("model.layers.1.mlp.experts.0.up_proj")
    assert equal(load_params(tmp_path / "q"), load_params(tmp_path / "written"))


def test_fused_experts_become_single_ones(
    tmp_path: Path, config: ModelConfig, params: dict[str, Any], plain_folder: Folder
):
    write_checkpoint(tmp_path / "fused", config, params, fused_experts=True)
    for dtype in ("keep", "bfloat16"):
        run_convert(tmp_path / "fused", tmp_path / f"a-{dtype}", dtype=dtype)
        run_convert(plain_folder.path, tmp_path / f"b-{dtype}", dtype=dtype)
        assert tensors(tmp_path / f"a-{dtype}") == tensors(tmp_path / f"b-{dtype}")


def test_some_layers_are_no_model(tmp_path: Path, fp8_folder: Folder):
    run_convert(fp8_folder.path, tmp_path / "some", layers=(0, MTP_LAYER))
    layers = {name.split(".")[2] for name in Manifest.read(tmp_path / "some").tensors if ".layers." in name}
    assert layers == {"0", str(MTP_LAYER)}
    with pytest.raises(InputError, match="holds layers 0, 5 only, as --layers asked"):
        load_params(tmp_path / "some")


def test_a_model_goes_on_without_its_mtp_layer(tmp_path: Path, fp8: Folder):
    fp8.drop(lambda name: name.startswith(f"model.layers.{MTP_LAYER}."))
    with pytest.raises(InputError, match=r"declares an MTP layer .* no tensor of it .* --without-mtp goes on"):
        run_convert(fp8.path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    run_convert(fp8.path, tmp_path / "out", without_mtp=True)
    assert not load_config(tmp_path / "out").has_mtp
    assert equal(load_params(tmp_path / "out"), load_params(fp8.path))


# Orbax.

ORBAX = """
import json, os, sys, pathlib
from tests.quick_flags import with_devices
os.environ["XLA_FLAGS"] = with_devices(8)
import jax, numpy as np, orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec
from tests.checkpoint.conversions import tensors
from glm52_jax.checkpoint.formats.orbax_layout import leaf_of

folder = pathlib.Path(sys.argv[1])
expected = tensors(pathlib.Path(sys.argv[2]))

def check(params):
    for name, (dtype, shape, data) in expected.items():
        leaf, expert = leaf_of(name)
        node = params
        for key in leaf.split("."):
            node = node[key]
        values = np.asarray(node if expert is None else node[expert])
        assert values.shape == tuple(shape) and values.tobytes() == data, name

def restore(path, devices):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("x",))
    with ocp.StandardCheckpointer() as checkpointer:
        saved = checkpointer.metadata(path).item_metadata
        def abstract(leaf):
            axes = [None] * len(leaf.shape)
            whole = [i for i, size in enumerate(leaf.shape) if size % devices == 0]
            if whole:
                axes[whole[-1] if "o_proj" in leaf.name else whole[0]] = "x"
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))
        return checkpointer.restore(path, jax.tree.map(abstract, saved))

for devices in (2, 4, 8):
    params = restore(folder / "params", devices)
    check(params)
with ocp.StandardCheckpointer() as checkpointer:  # saved by Orbax itself from eight devices
    checkpointer.save(folder.parent / "again", params)
check(restore(folder.parent / "again", 1))
check(restore(folder.parent / "again", 2))
print("equal")
"""


def python(script: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_orbax_restores_it_on_any_number_of_devices(tmp_path: Path, fp8_folder: Folder, converted: dict[str, Path]):
    shutil.copytree(converted["fp8"], tmp_path / "c")
    result = python(ORBAX, tmp_path / "c", fp8_folder.path)
    assert result.stdout == "equal\n", result.stderr
    assert "WARNING" not in result.stderr


def test_the_documented_example_restores_it(converted: dict[str, Path]):
    """By someone who has none of this code."""
    text = (ROOT / "docs" / "convert.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len([line for line in example.splitlines() if line]) <= 11
    assert "glm52" not in example
    head = "import os, sys, pathlib\nos.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'\n"
    head += "folder = pathlib.Path(sys.argv[1])\n"
    tail = "print(weight.shape, weight.dtype, weight.addressable_shards[3].data.shape)\n"
    result = python(head + example + tail, converted["fp8"])
    assert result.stdout == f"({EXPERTS}, 64, 32) float8_e4m3fn (1, 64, 32)\n", result.stderr


# Refusals: of damaged sources, those of the loader.


@pytest.mark.parametrize(("name", "damage", "fragments"), [*test_refusals.CASES.rows, *test_damaged_files.CASES.rows])
def test_a_damaged_source_is_refused(
    name: str, damage: Damage, fragments: tuple[str, ...], request: pytest.FixtureRequest, tmp_path: Path
):
    folder = request.getfixturevalue(name)
    damage(folder)
    with pytest.raises(InputError) as error:
        conversion.plan(folder.path, tmp_path / "out", ConversionOptions())
    assert all(fragment in str(error.value) for fragment in fragments)
    assert str(error.value).startswith(str(folder.path))
    assert not (tmp_path / "out").exists()


def test_destinations_in_use_are_refused(tmp_path: Path, plain: Folder, converted: dict[str, Path]):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    cases = {
        plain.path / "out": "lies inside the source",
        plain.path: "is the source itself",
        tmp_path: "holds the source",
        tmp_path / "full": r"is not empty \(notes.txt\)",
        tmp_path / "file": "is a file, expected a folder",
    }
    for destination, sentence in cases.items():
        with pytest.raises(InputError, match=sentence):
            run_convert(plain.path, destination)
    with pytest.raises(InputError, match=r"is finished with source files .*expected a new folder"):
        run_convert(plain.path, converted["fp8"])
    assert contents(tmp_path / "full") == {"notes.txt": b"mine"}


def test_float8_is_not_quantised_again(tmp_path: Path, fp8_folder: Folder):
    with pytest.raises(InputError, match=r"holds F8_E4M3 codes already .*, expected plain weights to quantise to fp8"):
        run_convert(fp8_folder.path, tmp_path / "out", quantize="fp8")


@pytest.mark.parametrize(("value", "quantize"), [(np.inf, True), (np.nan, True)])
def test_weights_that_are_not_finite_are_not_quantised(tmp_path: Path, plain: Folder, value: float, quantize: bool):
    name = "model.layers.1.self_attn.o_proj.weight"
    weight = plain.tensors()[name]
    weight[3, 5] = value
    plain.put({name: weight})
    with pytest.raises(InputError, match=f"{name} is not finite"):
        run_convert(plain.path, tmp_path / "out", quantize="fp8")


def test_a_scale_that_is_no_number_is_refused_when_it_is_used(tmp_path: Path, fp8: Folder):
    name = "model.layers.2.self_attn.q_a_proj.weight_scale_inv"
    fp8.put({name: np.full_like(fp8.tensors()[name], np.nan)})
    with pytest.raises(InputError, match=f"{name} holds nan, expected finite scales"):
        run_convert(fp8.path, tmp_path / "out", dtype="bfloat16")


# The command.


def invoke(*arguments: Any) -> Any:
    return CliRunner().invoke(commands.convert, [str(a) for a in arguments])


def test_the_command_says_what_it_will_need_and_what_it_did(tmp_path: Path, fp8_folder: Folder):
    result = invoke(fp8_folder.path, tmp_path / "c", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    assert "176 tensors of F8_E4M3 became BF16: dequantised" in result.output
    assert re.search(r"229 tensors, .* leaves; at most \d+ MiB of anonymous memory", result.output)
    assert f"{tmp_path / 'c'}: finished" in result.output
    assert invoke(fp8_folder.path, tmp_path / "c", "--dtype", "bfloat16").exit_code == 0
    again = invoke(fp8_folder.path, tmp_path / "c")
    assert isinstance(again.exception, InputError)


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--process", "3/2", "--process is '3/2', expected"),
        ("--process", "0/2", "--process is '0/2', expected"),
        ("--layers", "3-1", "--layers is '3-1', expected"),
        ("--layers", "7", "layers names 7, but the model has layers 0 to 5"),
        ("--unit-size", "much", "--unit-size is 'much', expected a size such as 5GB"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    tmp_path: Path, fp8_folder: Folder, option: str, value: str, sentence: str
):
    result = invoke(fp8_folder.path, tmp_path / "c", option, value)
    assert isinstance(result.exception, InputError)
    assert sentence in str(result.exception)
    assert not (tmp_path / "c").exists()


def test_bfloat16_chunks_are_little_endian(converted: dict[str, Path]):
    name = "model.norm.weight"
    values = np.frombuffer((converted["bf16"] / "params" / name / "c" / "0").read_bytes(), ml_dtypes.bfloat16)
    assert np.array_equal(values, np.asarray(load_params(converted["bf16"])["norm"]))
