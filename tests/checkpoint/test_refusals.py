"""A checkpoint whose tensors are not those of its config is refused, naming the first one at fault."""

import ml_dtypes
import numpy as np
import pytest

from tests.checkpoint.builders import MTP_LAYER, Folder
from tests.checkpoint.damage import Cases, Damage, assert_refused, replace

Q_A, O, KV_A = (f"model.layers.2.self_attn.{n}.weight" for n in ("q_a_proj", "o_proj", "kv_a_proj_with_mqa"))
GATE, BIAS = "model.layers.1.mlp.gate.weight", "model.layers.1.mlp.gate.e_score_correction_bias"
WK = "model.layers.4.self_attn.indexer.wk.weight"
EXPERT = "model.layers.3.mlp.experts.5.up_proj.weight"

SINGLE_FILE = "model.safetensors"
CASES = Cases()

# Names, shapes and types.


@CASES.add("fp8", f": {WK} is missing, expected it with shape [32, 64]")
def an_indexer_tensor_of_a_full_layer_is_missing(folder: Folder):
    assert len(folder.drop(lambda name: name.startswith(WK))) == 2


@CASES.add("fp8", ": model.layers.0.self_attn.indexer.k_norm.bias is missing, expected it with shape [32]")
def a_bias_of_an_indexer_is_missing(folder: Folder):
    folder.drop(lambda name: name == "model.layers.0.self_attn.indexer.k_norm.bias")


@CASES.add("fp8", f": {EXPERT} is missing, expected it with shape [32, 64]")
def an_expert_is_missing(folder: Folder):
    folder.drop(lambda name: name.startswith(EXPERT))


@CASES.add(
    "fp8", f": model.layers.{MTP_LAYER}.enorm.weight is missing", "MTP layer is there in part", "runs without it"
)
def the_mtp_layer_is_there_in_part(folder: Folder):
    folder.drop(lambda name: name.startswith(f"model.layers.{MTP_LAYER}.enorm"))


@CASES.add(
    "fp8", f": model.layers.{MTP_LAYER}.input_layernorm.weight is missing", " more; the MTP layer is there in part"
)
def only_the_mtp_projection_is_there(folder: Folder):
    prefix = f"model.layers.{MTP_LAYER}."
    folder.drop(lambda name: name.startswith(prefix) and "eh_proj" not in name)


@CASES.add("plain", "model.layers.9.mlp.gate.weight is not a tensor of this model, which has 5 layers and an MTP layer")
def a_tensor_is_unknown(folder: Folder):
    folder.put({"model.layers.9.mlp.gate.weight": np.zeros((8, 64), np.float32)})


@CASES.add("plain", "model.layers.1.self_attn.k_scale is not a tensor of this model", ", and 1 more")
def two_tensors_are_unknown(folder: Folder):
    folder.put({f"model.layers.{layer}.self_attn.k_scale": np.ones(1, np.float32) for layer in (1, 2)})


@CASES.add("plain", "is not a tensor of this model")
def a_layer_number_has_no_end(folder: Folder):
    folder.put({f"model.layers.{'9' * 5000}.mlp.gate.weight": np.zeros(1, np.float32)})


@CASES.add("plain", "model.layers.2.mlp.experts.down_proj is not a tensor of this model")
def experts_are_there_twice(folder: Folder):
    folder.put({"model.layers.2.mlp.experts.down_proj": np.zeros((8, 64, 32), np.float32)})


@CASES.add("plain", SINGLE_FILE, O, "has shape [128, 64], expected [64, 128]")
def a_shape_is_transposed(folder: Folder):
    replace(folder, O, np.transpose)


@CASES.add("plain", SINGLE_FILE, "mlp.experts.gate_up_proj has shape [8, 32, 64], expected [8, 64, 64]")
def fused_experts_hold_the_gate_only(folder: Folder):
    prefix = "model.layers.2.mlp.experts."
    folder.drop(lambda name: name.startswith(prefix) and ("gate" in name or "up" in name))
    folder.put({prefix + "gate_up_proj": np.zeros((8, 32, 64), np.float32)})


@CASES.add("plain", "model.layers.2.mlp.experts.gate_up_proj is I8, but config.json has no quantization_config")
def fused_experts_are_int8(folder: Folder):
    prefix = "model.layers.2.mlp.experts."
    folder.drop(lambda name: name.startswith(prefix) and ("gate" in name or "up" in name))
    folder.put({prefix + "gate_up_proj": np.zeros((8, 64, 64), np.int8)})


@CASES.add("plain", SINGLE_FILE, O, "is I8, but config.json has no quantization_config")
def a_weight_is_int8(folder: Folder):
    replace(folder, O, lambda w: w.astype(np.int8))


@CASES.add("plain", SINGLE_FILE, O, "is F64, expected BF16 or F16 or F32")
def a_weight_is_float64(folder: Folder):
    replace(folder, O, lambda w: w.astype(np.float64))


@CASES.add("fp8", O, "is BF16, expected F8_E4M3, as quantization_config does not except it")
def a_weight_is_plain_that_should_be_float8(folder: Folder):
    replace(folder, O, lambda w: w.astype(ml_dtypes.bfloat16))


@CASES.add("fp8", O, "is F8_E5M2, expected F8_E4M3")
def a_weight_is_the_other_float8(folder: Folder):
    replace(folder, O, lambda w: w.astype(ml_dtypes.float8_e5m2))


@CASES.add("plain", BIAS, "is BF16, expected F32")
def a_router_bias_is_bfloat16(folder: Folder):
    replace(folder, BIAS, lambda b: b.astype(ml_dtypes.bfloat16))


@CASES.add("fp8", BIAS, "is BF16, expected F32")
def a_router_bias_is_bfloat16_beside_float8(folder: Folder):
    replace(folder, BIAS, lambda b: b.astype(ml_dtypes.bfloat16))


# Scales.


@CASES.add("fp8", f"{Q_A} is F8_E4M3 but has no scale, expected {Q_A}_scale_inv or {Q_A}_scale")
def a_scale_is_missing(folder: Folder):
    folder.drop(lambda name: name == f"{Q_A}_scale_inv")


@CASES.add("fp8", f"{Q_A} is F8_E4M3 but has no scale, expected {Q_A}_scale_inv or {Q_A}_scale")
def a_scale_has_an_unknown_name(folder: Folder):
    folder.rename(lambda name: name.replace(f"{Q_A}_scale_inv", f"{Q_A}_block_scales"))


@CASES.add("fp8", f"{Q_A} has two scales, {Q_A}_scale_inv and {Q_A}_scale")
def a_scale_is_there_twice(folder: Folder):
    folder.put({f"{Q_A}_scale": folder.tensors()[f"{Q_A}_scale_inv"]})


@CASES.add("fp8", "model.layers.7.mlp.gate_proj.weight_scale_inv is a scale without its weight")
def a_scale_has_no_weight(folder: Folder):
    folder.put({"model.layers.7.mlp.gate_proj.weight_scale_inv": np.ones((1, 2), np.float32)})


@CASES.add("fp8", f"{GATE}_scale_inv is a scale, but {GATE} is F32, not F8_E4M3")
def a_plain_weight_has_a_scale(folder: Folder):
    folder.put({f"{GATE}_scale_inv": np.ones((1, 2), np.float32)})


@CASES.add("fp8", "model.layers.1.input_layernorm.weight is F8_E4M3, expected BF16 or F16 or F32")
def a_norm_is_float8_with_a_scale(folder: Folder):
    name = "model.layers.1.input_layernorm.weight"
    replace(folder, name, lambda w: w.astype(ml_dtypes.float8_e4m3fn))
    folder.put({f"{name}_scale_inv": np.ones(1, np.float32)})


@CASES.add("fp8", f"{KV_A}_scale_inv has shape [1, 2], expected [2, 2]")
def a_scale_lacks_the_block_that_is_cut(folder: Folder):
    replace(folder, f"{KV_A}_scale_inv", lambda s: s[:1])


@CASES.add("fp8", "_scale_inv has shape", "expected")
def scales_belong_to_another_block(folder: Folder):
    folder.edit_json(lambda config: config["quantization_config"].update(weight_block_size=[24, 32]))


@CASES.add("fp8", f"{Q_A}_scale_inv is BF16, expected F32")
def a_scale_is_bfloat16(folder: Folder):
    replace(folder, f"{Q_A}_scale_inv", lambda s: s.astype(ml_dtypes.bfloat16))


@CASES.add("fp8", "is F8_E4M3, but config.json has no quantization_config")
def float8_is_not_in_the_config(folder: Folder):
    folder.edit_json(lambda config: config.pop("quantization_config") and None)


@pytest.mark.parametrize(("name", "damage", "fragments"), CASES.rows)
def test_refused(
    name: str,
    damage: Damage,
    fragments: tuple[str, ...],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
):
    folder = request.getfixturevalue(name)
    damage(folder)
    assert_refused(folder, fragments, monkeypatch)
