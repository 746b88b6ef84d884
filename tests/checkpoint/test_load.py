"""Loading what is published, in all the forms in which it comes; what is refused is in `test_refusals`."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from glm52_jax import forward, load_params
from glm52_jax.checkpoint.export.write import write_checkpoint
from glm52_jax.checkpoint.load import leaf_arrays
from glm52_jax.checkpoint.load.loader import load_with_report
from glm52_jax.checkpoint.sources.open_source import open_checkpoint
from glm52_jax.checkpoint.sources.published import INDEX_FILE, SINGLE_FILE
from glm52_jax.config import ModelConfig
from glm52_jax.params.quantization import BlockQuantized, dequantize_blocks
from glm52_jax.verification.verify import verify
from sharding.errors import InputError
from tests.checkpoint.builders import EXPERTS, FP8, LAYERS, MTP_LAYER, Folder, flat, random_params, small_config
from tests.trees import assert_same

TOKENS = np.arange(2, 26)[None]  # three times index_topk
HEADS, NOPE, VALUE = 4, 24, 32

# Where each published tensor of layer L is in the parameters, written out once more, independently of the table.
# `l` is the ordinal of the layer in its stack, `e` the expert.
PLACES = {
    "input_layernorm.weight": lambda p, l, e: p["attention"]["input_norm"][l],
    "post_attention_layernorm.weight": lambda p, l, e: p["attention"]["post_norm"][l],
    "self_attn.q_a_proj.weight": lambda p, l, e: p["attention"]["q_a"][l],
    "self_attn.q_a_layernorm.weight": lambda p, l, e: p["attention"]["q_a_norm"][l],
    "self_attn.q_b_proj.weight": lambda p, l, e: p["attention"]["q_b"][l].reshape(HEADS * 40, 48),
    "self_attn.kv_a_proj_with_mqa.weight": lambda p, l, e: p["attention"]["kv_a"][l],
    "self_attn.kv_a_layernorm.weight": lambda p, l, e: p["attention"]["kv_a_norm"][l],
    "self_attn.kv_b_proj.weight": lambda p, l, e: np.concatenate(
        [part for h in range(HEADS) for part in (p["attention"]["k_up"][l][h], p["attention"]["v_up"][l][h])]
    ),
    "self_attn.o_proj.weight": lambda p, l, e: p["attention"]["o"][l].reshape(64, HEADS * VALUE),
    "self_attn.indexer.wq_b.weight": lambda p, l, e: p["indexer"]["q_b"][l].reshape(8 * 32, 48),
    "self_attn.indexer.wk.weight": lambda p, l, e: p["indexer"]["k"][l],
    "self_attn.indexer.k_norm.weight": lambda p, l, e: p["indexer"]["k_norm"][l],
    "self_attn.indexer.k_norm.bias": lambda p, l, e: p["indexer"]["k_norm_bias"][l],
    "self_attn.indexer.weights_proj.weight": lambda p, l, e: p["indexer"]["weights"][l],
    "mlp.gate_proj.weight": lambda p, l, e: p["dense"]["gate_up"][l][0],
    "mlp.up_proj.weight": lambda p, l, e: p["dense"]["gate_up"][l][1],
    "mlp.down_proj.weight": lambda p, l, e: p["dense"]["down"][l],
    "mlp.gate.weight": lambda p, l, e: p["moe"]["router"][l],
    "mlp.gate.e_score_correction_bias": lambda p, l, e: p["moe"]["router_bias"][l],
    "mlp.experts.E.gate_proj.weight": lambda p, l, e: p["moe"]["gate_up"][l][e][0],
    "mlp.experts.E.up_proj.weight": lambda p, l, e: p["moe"]["gate_up"][l][e][1],
    "mlp.experts.E.down_proj.weight": lambda p, l, e: p["moe"]["down"][l][e],
    "mlp.shared_experts.gate_proj.weight": lambda p, l, e: p["moe"]["shared_gate_up"][l][0],
    "mlp.shared_experts.up_proj.weight": lambda p, l, e: p["moe"]["shared_gate_up"][l][1],
    "mlp.shared_experts.down_proj.weight": lambda p, l, e: p["moe"]["shared_down"][l],
    "enorm.weight": lambda p, l, e: p["mtp"]["embed_norm"],
    "hnorm.weight": lambda p, l, e: p["mtp"]["hidden_norm"],
    "eh_proj.weight": lambda p, l, e: p["mtp"]["project"],
    "shared_head.norm.weight": lambda p, l, e: p["mtp"]["norm"],
}
STACKS = {  # layers of the small config by what a tensor's name begins with; the first that fits
    "self_attn.indexer.": [0, 1, 4, MTP_LAYER],
    "mlp.gate_proj": [0],
    "mlp.up_proj": [0],
    "mlp.down_proj": [0],
    "mlp.": [1, 2, 3, 4, MTP_LAYER],
    "": [*range(LAYERS), MTP_LAYER],
}


def place(params: dict[str, Any], name: str) -> np.ndarray:
    """The values in `params` of a published tensor."""
    globals_ = {"model.embed_tokens.weight": "embed", "model.norm.weight": "norm", "lm_head.weight": "head"}
    if name in globals_:
        return np.asarray(params[globals_[name]])
    _, _, layer, inner = name.split(".", 3)
    expert = int(inner.split(".")[2]) if inner.startswith("mlp.experts.") else 0
    inner = inner.replace(f"experts.{expert}.", "experts.E.")
    layers = next(layers for start, layers in STACKS.items() if inner.startswith(start))
    return np.asarray(PLACES[inner](params, layers.index(int(layer)), expert))


def dequantized(codes: np.ndarray, scales: np.ndarray, block: int = 32) -> np.ndarray:
    """Block by block, as the published format is described."""
    out = np.zeros(codes.shape, np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            cut = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
            out[cut] = codes[cut].astype(np.float32) * scales[i, j]
    return out


def opened(leaf: Any) -> np.ndarray:
    """A leaf in plain form."""
    if not isinstance(leaf, BlockQuantized):
        return np.asarray(leaf)
    values = dequantize_blocks(np.asarray(leaf.codes), np.asarray(leaf.scales), leaf.block)
    return values.reshape(*values.shape[:-2], *leaf.logical_shape)


@pytest.mark.parametrize("shard_bytes", [None, 100_000], ids=["one file", "shards"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_was_written_is_loaded(tmp_path: Path, dtype: str, shard_bytes: int | None):
    config = small_config(dtype=dtype)
    params = random_params(config)
    write_checkpoint(tmp_path / "c", config, params, shard_bytes=shard_bytes)
    loaded, report = load_with_report(tmp_path / "c")
    assert_same(loaded, params)
    assert (report.notes, report.ignored) == ((), {})
    assert report.tensors == len(Folder(tmp_path / "c").tensors())


def test_attention_biases_are_loaded(tmp_path: Path):
    config = small_config(attention_bias=True, num_nextn_predict_layers=0)
    params = random_params(config)
    write_checkpoint(tmp_path / "c", config, params)
    assert_same(load_params(tmp_path / "c"), params)
    biases = [name for name in Folder(tmp_path / "c").tensors() if name.endswith("_proj.bias")]
    assert len(biases) == 2 * LAYERS


def test_every_leaf_comes_from_the_file(plain_folder: Folder, fp8_folder: Folder, monkeypatch: pytest.MonkeyPatch):
    sentinel = np.float32(777)
    monkeypatch.setattr(
        leaf_arrays, "aligned_empty", lambda shape, dtype: np.full(shape, sentinel.astype(dtype), dtype)
    )
    for folder, fp8 in ((plain_folder, "keep"), (fp8_folder, "keep"), (fp8_folder, "dequantize")):
        params = load_params(folder.path, fp8=fp8)
        for leaf in jax.tree.leaves(params):
            values = np.asarray(leaf, np.float32)
            assert np.isfinite(values).all()  # float8 has no 777, it would be NaN
            assert not (values == sentinel).any()
        params = jax.tree.map(opened, params, is_leaf=lambda leaf: isinstance(leaf, BlockQuantized))
        tensors = folder.tensors()
        seen = 0
        for name, values in tensors.items():
            if name.endswith("_scale_inv"):
                continue
            scales = tensors.get(name + "_scale_inv")
            expected = values if scales is None else dequantized(values, scales)
            np.testing.assert_array_equal(place(params, name), expected, err_msg=name)
            seen += values.size
        assert seen == sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.slow
def test_float8_kept_and_dequantized_give_equal_logits(fp8_folder: Folder, fp8_config: ModelConfig):
    kept, plain = (load_params(fp8_folder.path, fp8=fp8) for fp8 in ("keep", "dequantize"))
    assert isinstance(kept["moe"]["down"], BlockQuantized)
    assert isinstance(kept["attention"]["q_b"], BlockQuantized)
    assert not any(isinstance(leaf, BlockQuantized) for leaf in flat(plain).values())
    logits = forward(kept, fp8_config, TOKENS)
    np.testing.assert_allclose(logits, forward(plain, fp8_config, TOKENS), atol=1e-5)
    assert np.abs(logits).max() > 1


def test_a_block_that_is_cut_has_its_own_scale(tmp_path: Path, fp8_config: ModelConfig, params: dict[str, Any]):
    # 48 rows in blocks of 32: were the block guessed from the 2 rows of scales (24), rows 24 to 31 would be wrong.
    kv_a = np.array(params["attention"]["kv_a"])
    kv_a[:, 32:] *= 1000
    params = params | {"attention": params["attention"] | {"kv_a": kv_a}}
    write_checkpoint(tmp_path / "c", fp8_config, params)
    loaded = load_params(tmp_path / "c")["attention"]["kv_a"]
    assert (loaded.codes.shape, loaded.scales.shape) == ((LAYERS + 1, 48, 64), (LAYERS + 1, 2, 2))
    assert (loaded.scales[:, 1] > 100 * loaded.scales[:, 0]).all()
    # e4m3 has three bits of fraction: half a step is a sixteenth of the value, or of the least normal code.
    step = np.maximum(np.abs(kv_a) / 16, np.asarray(loaded.scales).repeat(32, 1)[:, :48].repeat(32, 2) * 2**-10)
    assert (np.abs(opened(loaded) - kv_a) <= step).all()


def test_kv_b_is_dequantised_before_it_is_split_into_heads(fp8: Folder):
    # 56 rows a head and blocks of 32: a head begins in the middle of a block, and the scales differ a thousandfold.
    rng = np.random.default_rng(1)
    name = "model.layers.2.self_attn.kv_b_proj.weight"
    scales = 10.0 ** rng.uniform(-3, 0, (7, 1)).astype(np.float32)
    fp8.put({name + "_scale_inv": scales})
    whole = dequantized(fp8.tensors()[name], scales).reshape(HEADS, NOPE + VALUE, 32)
    for mode in ("keep", "dequantize"):
        attention = load_params(fp8.path, fp8=mode)["attention"]
        np.testing.assert_array_equal(attention["k_up"][2], whole[:, :NOPE])
        np.testing.assert_array_equal(attention["v_up"][2], whole[:, NOPE:])


@pytest.mark.parametrize("fp8", ["keep", "dequantize"])
@pytest.mark.parametrize("dtype", [None, "bfloat16", jnp.float16, np.float32])
def test_the_router_bias_stays_float32(fp8_folder: Folder, params: dict[str, Any], fp8: Any, dtype: Any):
    loaded = load_params(fp8_folder.path, dtype=dtype, fp8=fp8)
    bias = loaded["moe"]["router_bias"]
    assert bias.dtype == jnp.float32
    np.testing.assert_array_equal(bias, params["moe"]["router_bias"])
    assert len(np.unique(bias)) > len(np.unique(bias.astype(jnp.bfloat16)))  # the test would see a rounded one
    assert loaded["moe"]["router"].dtype == loaded["embed"].dtype == jnp.dtype(dtype or "float32")


def test_a_narrower_dtype_is_noted(plain_folder: Folder):
    params, report = load_with_report(plain_folder.path, dtype="bfloat16")
    np.testing.assert_array_equal(
        params["embed"], plain_folder.tensors()["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16)
    )
    (note,) = report.notes
    assert "stored as F32 and rounded to bfloat16" in note
    assert load_with_report(plain_folder.path, dtype="float32")[1].notes == ()


@pytest.mark.parametrize(
    ("keywords", "fragments"),
    [
        ({"dtype": "int8"}, ["int8", "bfloat16, float16 or float32"]),
        ({"dtype": "float64"}, ["float64", "bfloat16, float16 or float32"]),
        ({"dtype": "half a bit"}, ["half a bit", "bfloat16, float16 or float32"]),
        ({"fp8": "drop"}, ["drop", "keep or dequantize"]),
    ],
)
def test_unknown_keywords_are_refused(plain_folder: Folder, keywords: dict[str, Any], fragments: list[str]):
    with pytest.raises(InputError) as error:
        load_params(plain_folder.path, **keywords)
    assert all(fragment in str(error.value) for fragment in fragments)


def fused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts as some releases of transformers write them: all of a layer in one, gate above up."""
    out = dict(tensors)
    for layer in range(1, MTP_LAYER + 1):
        prefix = f"model.layers.{layer}.mlp.experts."
        parts = {
            p: np.stack([out.pop(f"{prefix}{e}.{p}.weight") for e in range(EXPERTS)])
            for p in ("gate_proj", "up_proj", "down_proj")
        }
        out[f"{prefix}gate_up_proj"] = np.concatenate([parts["gate_proj"], parts["up_proj"]], axis=1)
        out[f"{prefix}down_proj"] = parts["down_proj"]
    return out


def test_fused_experts_equal_single_ones(plain: Folder, params: dict[str, Any]):
    plain.write(SINGLE_FILE, fused(plain.tensors()))
    loaded, report = load_with_report(plain.path)
    assert_same(loaded, params)
    assert report.tensors == len(plain.tensors())


def test_halves_of_fused_experts_are_gate_then_up(plain: Folder):
    tensors = plain.tensors()
    for name in tensors:
        if ".experts." in name and "gate_proj" in name:
            tensors[name] = np.full_like(tensors[name], 1)
        if ".experts." in name and "up_proj" in name:
            tensors[name] = np.full_like(tensors[name], 2)
    plain.write(SINGLE_FILE, fused(tensors))
    gate_up = load_params(plain.path)["moe"]["gate_up"]
    assert (gate_up[:, :, 0] == 1).all()
    assert (gate_up[:, :, 1] == 2).all()


def is_mtp(name: str) -> bool:
    return name.startswith(f"model.layers.{MTP_LAYER}.")


def test_an_mtp_layer_that_the_config_does_not_count_is_left_and_reported_once(plain: Folder):
    plain.edit_json(lambda config: config.update(num_nextn_predict_layers=0))
    loaded, report = load_with_report(plain.path)
    mtp = [name for name in plain.tensors() if is_mtp(name)]
    assert "mtp" not in loaded
    assert loaded["attention"]["o"].shape[0] == LAYERS
    assert set(report.ignored) == set(mtp)
    (note,) = report.notes
    assert f"{len(mtp)} tensors are not used" in note
    assert "num_nextn_predict_layers is 0" in note


def test_an_mtp_layer_that_is_not_there_is_noted(plain: Folder):
    plain.drop(is_mtp)
    loaded, report = load_with_report(plain.path)
    assert "mtp" not in loaded
    assert loaded["moe"]["down"].shape[0] == LAYERS - 1
    (note,) = report.notes
    assert "num_nextn_predict_layers is 1 but the folder has no tensor of the MTP layer" in note


def test_without_an_mtp_layer_there_is_nothing_to_say(plain: Folder):
    plain.drop(is_mtp)
    plain.edit_json(lambda config: config.update(num_nextn_predict_layers=0))
    loaded, report = load_with_report(plain.path)
    assert "mtp" not in loaded
    assert (report.notes, report.ignored) == ((), {})


def test_embedding_and_head_of_the_mtp_layer_are_used_where_it_has_them(plain: Folder, params: dict[str, Any]):
    assert set(load_params(plain.path)["mtp"]) == {"embed_norm", "hidden_norm", "norm", "project"}
    own = {f"model.layers.{MTP_LAYER}.embed_tokens.weight": params["embed"] + 1}
    plain.put(own)
    loaded, report = load_with_report(plain.path)
    np.testing.assert_array_equal(loaded["mtp"]["embed"], params["embed"] + 1)
    np.testing.assert_array_equal(loaded["embed"], params["embed"])
    assert report.notes == (f"model.layers.{MTP_LAYER}.embed_tokens.weight is used in place of the model's own",)

    plain.put({f"model.layers.{MTP_LAYER}.shared_head.head.weight": params["head"] * 2})
    loaded, report = load_with_report(plain.path)
    np.testing.assert_array_equal(loaded["mtp"]["head"], params["head"] * 2)
    assert len(report.notes) == 2


def test_indexers_of_shared_layers_are_left_with_the_reason(plain: Folder, params: dict[str, Any]):
    extra = {
        name.replace("layers.1.", "layers.3."): values + 1
        for name, values in plain.tensors().items()
        if "layers.1.self_attn.indexer." in name
    }
    plain.put(extra | {"model.layers.3.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)})
    loaded, report = load_with_report(plain.path)
    assert_same(loaded, params)
    assert set(extra) < set(report.ignored)
    assert {report.ignored[name] for name in extra} == {
        "the layer is shared: it uses the selection of the last full layer"
    }
    assert any("5 tensors are not used" in note for note in report.notes)
    assert any("1 tensor is not used" in note and "rope_theta" in note for note in report.notes)


@pytest.mark.quick(2)
@pytest.mark.parametrize("inner", ["shared_head.head.weight", "embed_tokens.weight"])
@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
@pytest.mark.parametrize("there", [False, True])
def test_a_stray_scale_of_what_is_always_plain_is_left(fp8: Folder, params: dict[str, Any], inner, suffix, there):
    """With its weight or without: it is ignored as the weight would be, and the rest is as before."""
    before, name = load_params(fp8.path), f"model.layers.{MTP_LAYER}.{inner}"
    fp8.put({name + suffix: np.ones((1, 2), np.float32)} | ({name: params["head"]} if there else {}))
    loaded, report = load_with_report(fp8.path)
    assert_same({k: v for k, v in loaded.items() if k != "mtp"}, {k: v for k, v in before.items() if k != "mtp"})
    assert report.ignored == {name + suffix: "it is a scale of a tensor that is always plain"}
    assert not verify(open_checkpoint(fp8.path), open_checkpoint(fp8.path), quick=True).differences


def test_stray_scales_of_what_is_not_used_are_left_with_it(fp8: Folder):
    strays = {
        "model.layers.2.self_attn.rotary_emb.inv_freq_scale_inv": np.ones(1, np.float32),
        "model.layers.3.self_attn.indexer.wk.weight_scale_inv": np.ones((1, 2), np.float32),
    }
    before = load_params(fp8.path)
    fp8.put(strays)
    loaded, report = load_with_report(fp8.path)
    assert_same(loaded, before)
    assert set(report.ignored) == set(strays)
    # A folder without the MTP layer but for a scale that was left behind has none.
    fp8.drop(lambda name: name.startswith(f"model.layers.{MTP_LAYER}."))
    fp8.put({f"model.layers.{MTP_LAYER}.shared_head.head.weight_scale_inv": np.ones((1, 2), np.float32)})
    assert "mtp" not in load_params(fp8.path)


@pytest.mark.parametrize(
    "entry", ["o_proj", "self_attn.o_proj", "self_attn.o_proj$", ".*o_proj$", "*.o_proj", "re:.*o_proj$"]
)
def test_exceptions_from_quantisation_by_any_name(fp8: Folder, params: dict[str, Any], entry: str):
    """What is stored plain and excepted is loaded plain; what the entry does not mean stays in codes."""
    plain = {name: np.asarray(values) for name, values in outputs(params).items()}
    fp8.drop(lambda name: "o_proj" in name)
    fp8.put(plain)
    fp8.edit_json(lambda c: c | {"quantization_config": c["quantization_config"] | {"modules_to_not_convert": [entry]}})
    loaded, report = load_with_report(fp8.path)
    np.testing.assert_array_equal(loaded["attention"]["o"], params["attention"]["o"])
    assert isinstance(loaded["attention"]["q_a"], BlockQuantized)
    assert report.notes == ()


def outputs(params: dict[str, Any]) -> dict[str, np.ndarray]:
    """The published tensors of the output projection."""
    stack = params["attention"]["o"]
    return {
        f"model.layers.{layer}.self_attn.o_proj.weight": stack[layer].reshape(stack.shape[1], -1)
        for layer in range(len(stack))
    }


def test_an_exception_that_means_nothing_is_named(fp8: Folder):
    listed = ["lm_head", "re:.*mlp.experts.7.nothing", "mtp.0.enorm", "self_attn.indexer.k_norm.bias", "Linear"]
    fp8.edit_json(lambda c: c["quantization_config"]["modules_to_not_convert"].extend(listed))
    assert load_with_report(fp8.path)[1].notes == (
        "quantization_config excepts 're:.*mlp.experts.7.nothing' and 2 more, which mean no tensor of this model",
    )


def test_a_scale_named_weight_scale_multiplies_too(fp8: Folder):
    before = load_params(fp8.path)
    fp8.rename(lambda name: name.replace("weight_scale_inv", "weight_scale"))
    assert_same(load_params(fp8.path), before)


def test_the_index_decides_not_the_names_of_files(fp8: Folder):
    before = load_params(fp8.path)
    names = {file: f"weights {i}.part" for i, file in enumerate(fp8.files)}
    for old, new in names.items():
        (fp8.path / old).rename(fp8.path / new)
    fp8.edit_json(
        lambda index: index | {"weight_map": {t: names[f] for t, f in index["weight_map"].items()}}, INDEX_FILE
    )
    (fp8.path / "weights 9.part.incomplete").write_bytes(b"")
    assert_same(load_params(fp8.path), before)


def test_files_may_be_links(fp8: Folder, tmp_path: Path):
    # The layout of a download cache: files by their hash elsewhere, and links to them.
    before = load_params(fp8.path)
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(sorted(fp8.path.iterdir())):
        file.rename(tmp_path / "blobs" / str(number))
        file.symlink_to(Path("..") / "blobs" / str(number))
    assert_same(load_params(fp8.path), before)


def test_a_file_that_the_index_does_not_name_is_noted(fp8: Folder):
    fp8.write("older.safetensors", {"model.norm.weight": np.zeros(64, np.float32)})
    before = load_with_report(fp8.path)[1]
    (note,) = before.notes
    assert note == "older.safetensors is not used, since model.safetensors.index.json does not name it"


def test_a_shard_without_an_index_beside_the_single_file_is_noted(plain: Folder):
    plain.write("model-00001-of-00002.safetensors", {"model.norm.weight": np.zeros(64, np.float32)})
    (note,) = load_with_report(plain.path)[1].notes
    assert note == "model-00001-of-00002.safetensors is not used, since without an index model.safetensors is all"


def test_weights_that_are_partly_excepted_from_float8_are_loaded_plain(
    tmp_path: Path, fp8_config: ModelConfig, params: dict[str, Any]
):
    quantization = dataclasses.replace(FP8, high_precision=("model.layers.0", "re:.*indexer.*"))
    config = dataclasses.replace(fp8_config, quantization=quantization)
    write_checkpoint(tmp_path / "c", config, params)
    loaded, report = load_with_report(tmp_path / "c")
    np.testing.assert_array_equal(loaded["attention"]["q_a"][0], params["attention"]["q_a"][0])
    assert not np.array_equal(loaded["attention"]["q_a"][1], params["attention"]["q_a"][1])
    np.testing.assert_array_equal(loaded["indexer"]["q_b"], params["indexer"]["q_b"])
    assert isinstance(loaded["moe"]["down"], BlockQuantized)
    assert "attention.q_a is not kept in float8, since 1 of its tensors are plain" in report.notes


def test_plain_weights_may_be_stored_in_other_types_than_the_config_says(plain: Folder, params: dict[str, Any]):
    plain.put({"model.layers.1.mlp.gate.weight": params["moe"]["router"][0].astype(ml_dtypes.bfloat16)})
    router = load_params(plain.path)["moe"]["router"]
    assert router.dtype == jnp.float32
    np.testing.assert_array_equal(router[0], params["moe"]["router"][0].astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("name", ["plain_folder", "fp8_folder"])
def test_progress_ends_at_the_total_and_not_before(name: str, request: pytest.FixtureRequest):
    folder = request.getfixturevalue(name)
    calls: list[tuple[int, int]] = []
    _, report = load_with_report(folder.path, progress=lambda done, total: calls.append((done, total)))
    done = [d for d, _ in calls]
    assert {total for _, total in calls} == {report.bytes} == {sum(t.nbytes for t in folder.tensors().values())}
    assert done == sorted(set(done))
    assert done[-1] == report.bytes


def test_progress_of_fused_experts_ends_at_the_total(plain: Folder):
    plain.write(SINGLE_FILE, fused(plain.tensors()))
    calls: list[int] = []
    _, report = load_with_report(plain.path, progress=lambda done, total: calls.append(done))
    assert calls[-1] == report.bytes
    assert calls == sorted(set(calls))


def test_a_scale_that_is_no_number_is_refused(fp8: Folder):
    name = "model.layers.2.mlp.experts.3.down_proj.weight_scale_inv"
    for value in (np.nan, np.inf, -1.0):
        scales = fp8.tensors()[name]
        scales[0, 0] = value
        fp8.put({name: scales})
        with pytest.raises(InputError, match=f"{name} holds {value}, expected finite scales of at least 0"):
            load_params(fp8.path)
