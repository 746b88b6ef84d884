"""Writing the published layout: the inverse of loading, whole or not at all, readable by the other programs."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from glm52_jax import forward, load_config, load_params
from glm52_jax.checkpoint.export import write
from glm52_jax.checkpoint.export.write import write_checkpoint
from glm52_jax.checkpoint.formats.safetensors_file import DTYPES, SafetensorsFile
from glm52_jax.checkpoint.load.loader import load_with_report
from glm52_jax.checkpoint.sources.published import INDEX_FILE, SINGLE_FILE
from glm52_jax.config import ModelConfig, QuantizationConfig
from glm52_jax.params.quantization import BlockQuantized, dequantize_blocks
from sharding.errors import InputError
from tests import needs
from tests.checkpoint.builders import EXPERTS, FP8, MTP_LAYER, Folder, flat, random_params, small_config

TOKENS = np.arange(2, 26)[None]  # three times index_topk


def contents(folder: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in folder.iterdir()}


def dtypes(folder: Folder) -> dict[str, str]:
    """Stored types by the name of the tensor."""
    files = [SafetensorsFile(folder.path / f) for f in folder.files]
    return {name: entry.dtype for f in files for name, entry in f.entries.items()}


def test_one_file_and_both_configs(plain_folder: Folder, config: ModelConfig):
    assert set(contents(plain_folder.path)) == {SINGLE_FILE, "config.json", "generation_config.json"}
    assert load_config(plain_folder.path) == config
    generation = json.loads((plain_folder.path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [90, 91, 95]
    assert (generation["temperature"], generation["top_p"]) == (1.0, 0.95)


def test_shards_and_their_index(fp8_folder: Folder):
    count = len(fp8_folder.files)
    assert count > 2
    assert fp8_folder.files == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    index = json.loads((fp8_folder.path / INDEX_FILE).read_text())
    tensors = {file: fp8_folder.tensors(file) for file in fp8_folder.files}
    assert index["weight_map"] == {name: file for file, held in tensors.items() for name in held}
    sizes = {file: sum(values.nbytes for values in held.values()) for file, held in tensors.items()}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert max(sizes.values()) <= 150_000
    for name, file in index["weight_map"].items():
        if name.endswith("_scale_inv"):
            assert index["weight_map"][name.removesuffix("_scale_inv")] == file


def test_a_tensor_larger_than_a_shard_has_one_of_its_own(tmp_path: Path, config: ModelConfig, params: dict[str, Any]):
    write_checkpoint(tmp_path / "c", config, params, shard_bytes=1)
    folder = Folder(tmp_path / "c")
    assert len(folder.files) == len(folder.tensors())
    assert load_params(folder.path)["norm"].shape == (64,)


@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "fp8"])
def test_there_and_back_gives_the_same_bytes(tmp_path: Path, config: ModelConfig, quantized: bool):
    config = dataclasses.replace(config, quantization=FP8 if quantized else None, dtype="bfloat16")
    write_checkpoint(tmp_path / "a", config, random_params(config), shard_bytes=100_000)
    loaded = load_params(tmp_path / "a")
    write_checkpoint(tmp_path / "b", load_config(tmp_path / "a"), loaded, shard_bytes=100_000)
    write_checkpoint(tmp_path / "c", load_config(tmp_path / "b"), load_params(tmp_path / "b"), shard_bytes=100_000)
    first, second, third = (contents(tmp_path / name) for name in "abc")
    assert second == third
    if not quantized:
        assert first == second
    # kv_b is computed with in bfloat16 and quantised again, so its scales are rounded once, and its codes stay.
    before, after = (Folder(tmp_path / name).tensors() for name in "ab")
    assert list(before) == list(after)
    for name, values in before.items():
        if "kv_b_proj.weight_scale" in name:
            np.testing.assert_allclose(after[name], values, rtol=2**-8)
        else:
            assert after[name].tobytes() == values.tobytes(), name


def test_stored_types(tmp_path: Path):
    config = small_config(dtype="bfloat16", quantization=FP8)
    write_checkpoint(tmp_path / "c", config, random_params(config))
    found = dtypes(Folder(tmp_path / "c"))
    modules: dict[str, set[str]] = {}
    for name, dtype in found.items():
        kind = ".".join(part for part in name.split(".") if not part.isdigit())
        modules.setdefault(dtype, set()).add(kind.removeprefix("model.layers."))
    projections = {f"self_attn.{p}" for p in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")}
    projections |= {"self_attn.indexer.wk", "self_attn.indexer.wq_b"}
    projections |= {
        f"mlp.{owner}{p}"
        for owner in ("", "experts.", "shared_experts.")
        for p in ("gate_proj", "up_proj", "down_proj")
    }
    assert modules["F8_E4M3"] == {f"{p}.weight" for p in projections}
    assert modules["F32"] == {f"{p}.weight_scale_inv" for p in projections} | {"mlp.gate.e_score_correction_bias"}
    assert {"mlp.gate.weight", "self_attn.indexer.weights_proj.weight", "eh_proj.weight"} < modules["BF16"]
    assert set(modules) == {"F8_E4M3", "F32", "BF16"}
    # All the others are in the list for readers that know no table, and with it the config reads back.
    listed = set(json.loads((tmp_path / "c/config.json").read_text())["quantization_config"]["modules_to_not_convert"])
    assert listed == {name.removesuffix(".weight") for name, d in found.items() if d == "BF16"} | {
        name for name in found if name.endswith("e_score_correction_bias")
    }
    assert dataclasses.replace(load_config(tmp_path / "c"), quantization=FP8) == config


def test_a_block_of_zeros_and_large_values_are_stored(tmp_path: Path, fp8_config: ModelConfig, params: dict[str, Any]):
    q_a = np.array(params["attention"]["q_a"])
    q_a[0, :32, :32] = 0
    q_a[1, 0, 0] = 1e30
    params = params | {"attention": params["attention"] | {"q_a": q_a}}
    write_checkpoint(tmp_path / "c", fp8_config, params)
    loaded = load_params(tmp_path / "c", fp8="dequantize")["attention"]["q_a"]
    assert (loaded[0, :32, :32] == 0).all()
    np.testing.assert_allclose(loaded[1, 0, 0], 1e30, rtol=1e-6)
    assert np.isfinite(loaded).all()


def test_float8_parameters_are_written_as_plain_ones(tmp_path: Path, fp8_folder: Folder, config: ModelConfig):
    kept, opened = (load_params(fp8_folder.path, fp8=mode) for mode in ("keep", "dequantize"))
    for name, fused in (("single", False), ("fused", True)):
        write_checkpoint(tmp_path / name, config, kept, fused_experts=fused)
        plain = flat(load_params(tmp_path / name))
        for path, leaf in flat(opened).items():
            np.testing.assert_array_equal(plain[path], leaf, err_msg=path)


def test_float8_parameters_are_requantised_to_another_block(tmp_path: Path, fp8_folder: Folder, config: ModelConfig):
    other = dataclasses.replace(config, quantization=QuantizationConfig((16, 64)))
    write_checkpoint(tmp_path / "c", other, load_params(fp8_folder.path))
    leaf = load_params(tmp_path / "c")["attention"]["q_a"]
    before = load_params(fp8_folder.path, fp8="dequantize")["attention"]["q_a"]
    assert leaf.block == (16, 64)
    assert leaf.scales.shape[1:] == (3, 1)
    largest = np.abs(before).max()
    after = dequantize_blocks(np.asarray(leaf.codes), np.asarray(leaf.scales), leaf.block)
    np.testing.assert_allclose(after, before, rtol=2**-4, atol=largest * 2**-10)


def test_fused_experts_are_what_other_readers_expect(tmp_path: Path, config: ModelConfig, params: dict[str, Any]):
    write_checkpoint(tmp_path / "c", config, params, fused_experts=True, shard_bytes=300_000)
    tensors = Folder(tmp_path / "c").tensors()
    gate_up = tensors["model.layers.2.mlp.experts.gate_up_proj"]
    assert gate_up.shape == (EXPERTS, 2 * 32, 64)
    np.testing.assert_array_equal(gate_up[3, :32], params["moe"]["gate_up"][1, 3, 0])
    np.testing.assert_array_equal(gate_up[3, 32:], params["moe"]["gate_up"][1, 3, 1])
    np.testing.assert_array_equal(tensors["model.layers.2.mlp.experts.down_proj"], params["moe"]["down"][1])
    assert not any(".experts.0." in name for name in tensors)
    loaded = load_params(tmp_path / "c")
    assert all(np.array_equal(leaf, flat(params)[path]) for path, leaf in flat(loaded).items())


def test_an_own_embedding_of_the_mtp_layer_is_written(tmp_path: Path, config: ModelConfig, params: dict[str, Any]):
    params = params | {"mtp": params["mtp"] | {"embed": params["embed"] + 1}}
    write_checkpoint(tmp_path / "c", config, params)
    np.testing.assert_array_equal(load_params(tmp_path / "c")["mtp"]["embed"], params["embed"] + 1)


def test_arrays_on_a_device_are_written_like_numpy_ones(
    tmp_path: Path, plain_folder: Folder, config: ModelConfig, params: dict[str, Any]
):
    write_checkpoint(tmp_path / "c", config, jax.tree.map(jnp.asarray, params))
    assert contents(tmp_path / "c") == contents(plain_folder.path)


# Whole or not at all.


def test_weights_come_first_and_the_config_last(
    tmp_path: Path, config: ModelConfig, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    renamed = []
    replace = write.os.replace
    monkeypatch.setattr(write.os, "replace", lambda a, b: (renamed.append(Path(b).name), replace(a, b)))
    write_checkpoint(tmp_path / "c", config, params, shard_bytes=1_500_000)
    assert renamed == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        INDEX_FILE,
        "generation_config.json",
        "config.json",
    ]


@pytest.mark.parametrize("shard_bytes", [None, 50_000])
def test_what_is_interrupted_is_not_taken_for_whole(
    tmp_path: Path,
    fp8_config: ModelConfig,
    params: dict[str, Any],
    shard_bytes: int | None,
    monkeypatch: pytest.MonkeyPatch,
):
    calls = []

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) > 100:
            raise KeyboardInterrupt
        return quantize(*args)

    quantize = write.quantize_blocks
    monkeypatch.setattr(write, "quantize_blocks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "c", fp8_config, params, shard_bytes=shard_bytes)
    left = contents(tmp_path / "c")
    assert not [name for name in left if not name.endswith(".safetensors")]
    assert bool(left) == (shard_bytes is not None)
    for given in (None, fp8_config):
        with pytest.raises(InputError, match=r"holds neither|no such file"):
            load_params(tmp_path / "c", given)
    monkeypatch.undo()
    if left:  # and what is left is not overwritten in part
        with pytest.raises(InputError, match="expected a folder without a checkpoint, not even a part of one"):
            write_checkpoint(tmp_path / "c", fp8_config, params)


def test_a_weight_that_is_not_finite_is_not_quantised(tmp_path: Path, fp8_config: ModelConfig, params: dict[str, Any]):
    down = np.array(params["moe"]["down"])
    down[2, 5, 0, 0] = np.nan
    broken = params | {"moe": params["moe"] | {"down": down}}
    with pytest.raises(InputError, match=r"moe.down is not finite in model.layers.3.mlp.experts.5.down_proj.weight"):
        write_checkpoint(tmp_path / "c", fp8_config, broken)
    assert contents(tmp_path / "c") == {}


def without(params: dict[str, Any], group: str, name: str) -> dict[str, Any]:
    return params | {group: {n: leaf for n, leaf in params[group].items() if n != name}}


def with_leaf(params: dict[str, Any], group: str, name: str, leaf: Any) -> dict[str, Any]:
    return params | {group: params[group] | {name: leaf}}


@pytest.mark.parametrize(
    ("change", "keywords", "message"),
    [
        (lambda p: without(p, "moe", "down"), {}, r"params has no moe.down, expected it with shape \(5, 8, 64, 32\)"),
        (lambda p: without(p, "mtp", "norm"), {}, r"params has no mtp.norm, expected it with shape \(64,\)"),
        (
            lambda p: {n: tree for n, tree in p.items() if n != "mtp"},
            {},
            r"params has no mtp, expected it as num_nextn_predict_layers is 1; config.without_mtp\(\) describes",
        ),
        (lambda p: with_leaf(p, "moe", "extra", np.ones(1)), {}, "params holds moe.extra, which is no parameter"),
        (
            lambda p: with_leaf(p, "moe", "down", p["moe"]["down"][:4]),
            {},
            r"moe.down has shape \(4, 8, 64, 32\), expected \(5, 8, 64, 32\)",
        ),
        (
            lambda p: with_leaf(p, "moe", "router_bias", p["moe"]["router_bias"].astype(ml_dtypes.bfloat16)),
            {},
            "moe.router_bias is bfloat16, expected float32",
        ),
        (
            lambda p: with_leaf(
                p,
                "moe",
                "router",
                BlockQuantized(np.ones((5, 8, 64), ml_dtypes.float8_e4m3fn), np.ones((5, 1, 1)), (8, 64)),
            ),
            {},
            "moe.router is in blocks of codes, expected plain weights",
        ),
        (
            lambda p: with_leaf(
                p,
                "attention",
                "q_a",
                BlockQuantized(np.ones((6, 48, 64), ml_dtypes.float8_e4m3fn), np.ones((6, 1, 2)), (48, 64), (32, 32)),
            ),
            {},
            r"attention.q_a has codes and scales \(\(48, 64\), \(1, 2\)\) a matrix, expected \(\(48, 64\), \(2, 2\)\)",
        ),
        (lambda p: p, {"shard_bytes": 0}, "shard_bytes is 0, expected at least 1"),
        (
            lambda p: p,
            {"fused_experts": True},
            "fused_experts is set, but quantization_config stores experts in codes",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path,
    fp8_config: ModelConfig,
    params: dict[str, Any],
    change: Any,
    keywords: dict[str, Any],
    message: str,
):
    with pytest.raises(InputError, match=message):
        write_checkpoint(tmp_path / "c", fp8_config, change(params), **keywords)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("file", ["config.json", INDEX_FILE, SINGLE_FILE, "model-00003-of-00003.safetensors"])
def test_a_checkpoint_is_not_written_over_another(
    tmp_path: Path, config: ModelConfig, params: dict[str, Any], file: str
):
    (tmp_path / file).write_text("here first")
    with pytest.raises(InputError, match=f"{file}: is there already"):
        write_checkpoint(tmp_path, config, params)
    assert contents(tmp_path) == {file: b"here first"}


def test_a_file_is_no_folder_to_write_to(tmp_path: Path, config: ModelConfig, params: dict[str, Any]):
    (tmp_path / "c").write_text("here first")
    with pytest.raises(InputError, match="is a file, expected a folder to write to"):
        write_checkpoint(tmp_path / "c", config, params)


# Other readers.


def test_the_safetensors_package_reads_it(plain_folder: Folder, fp8_folder: Folder):
    loaded = safetensors.numpy.load_file(plain_folder.path / SINGLE_FILE)
    expected = plain_folder.tensors()
    assert set(loaded) == set(expected)
    assert all(np.array_equal(loaded[name], values) for name, values in expected.items())
    for file in fp8_folder.files:
        with safetensors.safe_open(fp8_folder.path / file, framework="np") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert set(opened.keys()) == set(fp8_folder.tensors(file))
    # Wide types first: each tensor begins at a multiple of its width.
    for file in fp8_folder.files:
        for entry in SafetensorsFile(fp8_folder.path / file).entries.values():
            assert entry.start % DTYPES[entry.dtype].itemsize == 0


@pytest.fixture(scope="module")
def transformers() -> Any:
    needs.package("torch")
    return needs.package("transformers")


@pytest.mark.parametrize(("dtype", "fused"), [("float32", False), ("float32", True), ("bfloat16", False)])
def test_transformers_reads_it(tmp_path: Path, transformers: Any, dtype: str, fused: bool):
    torch = needs.package("torch")
    config = small_config(dtype=dtype)
    params = random_params(config)
    write_checkpoint(tmp_path / "c", config, params, fused_experts=fused, shard_bytes=500_000)
    model, info = transformers.GlmMoeDsaForCausalLM.from_pretrained(
        tmp_path / "c", dtype="auto", attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert {".".join(name.split(".")[:3]) for name in info["unexpected_keys"]} == {f"model.layers.{MTP_LAYER}"}
    theirs = model.state_dict()
    same_dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]
    assert theirs["model.layers.0.self_attn.q_a_proj.weight"].dtype == same_dtype
    for name, values in Folder(tmp_path / "c").tensors().items():
        if name in theirs:
            np.testing.assert_array_equal(theirs[name].float().numpy(), values.astype(np.float32), err_msg=name)
    experts = theirs["model.layers.2.mlp.experts.gate_up_proj"].float().numpy().reshape(EXPERTS, 2, 32, 64)
    np.testing.assert_array_equal(experts, params["moe"]["gate_up"][1].astype(np.float32))


@pytest.mark.slow
def test_transformers_gives_equal_logits(tmp_path: Path, transformers: Any):
    torch = needs.package("torch")
    config = small_config(latent_norm_eps=1e-6)  # the epsilon that transformers has
    write_checkpoint(tmp_path / "c", config, random_params(config))
    model = transformers.GlmMoeDsaForCausalLM.from_pretrained(tmp_path / "c", attn_implementation="eager")
    with torch.no_grad():
        expected = model(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(forward(load_params(tmp_path / "c"), config, TOKENS), expected, atol=2e-4)


def test_transformers_reads_the_same_config(plain_folder: Folder, config: ModelConfig, transformers: Any):
    theirs = transformers.AutoConfig.from_pretrained(plain_folder.path)
    assert type(theirs).__name__ == "GlmMoeDsaConfig"
    for field in dataclasses.fields(config):
        ours = getattr(config, field.name)
        if hasattr(theirs, field.name) and field.name != "dtype":
            value = getattr(theirs, field.name)
            assert (tuple(value) if isinstance(value, list) else value) == ours, field.name
    assert theirs.rope_parameters["rope_theta"] == config.rope_theta
    assert tuple(theirs.eos_token_id) == config.eos_token_ids
    generation = transformers.GenerationConfig.from_pretrained(plain_folder.path)
    assert (generation.temperature, generation.top_p, generation.do_sample) == (1.0, 0.95, True)


def test_nothing_is_noted_of_what_was_written(plain_folder: Folder, fp8_folder: Folder):
    for folder in (plain_folder, fp8_folder):
        assert load_with_report(folder.path)[1].notes == ()
