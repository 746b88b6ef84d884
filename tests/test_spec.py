"""The parameter table against the published checkpoints' own figures."""

import dataclasses
import math
from collections import Counter

import pytest

from glm52_jax.config import BUILT_IN, ModelConfig
from glm52_jax.params.spec import Param, Stack, Tensor, parameters, published_tensors, stack_layers

GLM52, FP8 = BUILT_IN["glm-5.2"], BUILT_IN["glm-5.2-fp8"]
MTP_LAYER = 78


def kind(name: str) -> str:
    """A tensor's name without its numbers: what it is, wherever it is."""
    return ".".join(part for part in name.removeprefix("model.layers.").split(".") if not part.isdigit())


def layer_of(name: str) -> int | None:
    return int(name.split(".")[2]) if name.startswith("model.layers.") else None


@pytest.fixture(scope="module")
def tensors() -> list[Tensor]:
    return [tensor for _, tensor in published_tensors(FP8)]


def owners(config: ModelConfig) -> dict[str, list[Param]]:
    """The parameters that each published tensor is a part of."""
    found: dict[str, list[Param]] = {}
    for param in parameters(config):
        for layer in param.layers(config):
            for tensor in param.published(config, layer):
                found.setdefault(tensor.name, []).append(param)
    return found


@pytest.mark.parametrize("name", ["glm-5.2", "glm-5.2-fp8", "glm-5.1", "glm-5.2-tiny"])
def test_every_tensor_belongs_to_one_parameter_but_kv_b(name: str):
    for tensor, params in owners(BUILT_IN[name]).items():
        if tensor.endswith("self_attn.kv_b_proj.weight"):
            assert [p.path for p in params] == ["attention.k_up", "attention.v_up"]
            keys, values = (p.shape[1] for p in params)
            assert [p.rows for p in params] == [(0, keys), (keys, keys + values)]
            assert [p.logical_shape[1] for p in params if p.logical_shape] == [keys + values] * 2
        else:
            assert len(params) == 1, tensor
    names = [tensor.name for _, tensor in published_tensors(BUILT_IN[name])]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("config", [GLM52, BUILT_IN["glm-5.2-tiny"], dataclasses.replace(GLM52, attention_bias=True)])
def test_rows_of_the_table_are_of_one_piece(config: ModelConfig):
    table = parameters(config)
    paths = [param.path for param in table]
    assert len(paths) == len(set(paths))
    assert not any(a != b and b.startswith(a + ".") for a in paths for b in paths)
    for param in table:
        assert len(param.axes) == len(param.shape)
        pieces = len(param.tensors) * (param.experts or 1)
        assert math.prod(param.shape) == pieces * math.prod(param.piece_shape)
        assert math.prod(param.logical_shape or param.tensor_shape) == math.prod(param.tensor_shape)
        lead = () if param.stack in (Stack.GLOBAL, Stack.MTP) else (len(param.layers(config)),)
        assert param.stacked_shape(config) == (*lead, *param.shape)
        for tensor in param.published(config, param.layers(config)[0]):
            assert tensor.shape == param.tensor_shape


def test_the_published_totals(tensors: list[Tensor]):
    # zai-org/GLM-5.2-FP8: tensors, their bytes, and elements by type; the BF16 repository's tensors and bytes.
    scaled = [t for t in tensors if t.quantized]
    assert len(tensors) + len(scaled) == 118_629
    assert sum(t.stored_bytes(FP8) for t in tensors) == 755_617_140_416
    assert sum(t.elements for t in scaled) == 751_226_191_872
    assert sum(t.elements for t in tensors if not t.quantized and not t.float32) == 2_103_729_152
    scales = sum(math.prod(t.scale_shape((128, 128))) for t in scaled)
    assert scales + sum(t.elements for t in tensors if t.float32) == 45_872_560
    plain = [t for _, t in published_tensors(GLM52)]
    assert len(plain) == 59_585
    assert not any(t.quantized for t in plain)
    assert sum(t.elements for t in plain) == 753_329_940_480
    assert sum(t.stored_bytes(GLM52) for t in plain) == 1_506_659_919_872


def test_the_published_numbers_of_tensors_a_layer(tensors: list[Tensor]):
    plain = Counter(layer_of(t.name) for t in tensors)
    fp8 = plain + Counter(layer_of(t.name) for t in tensors if t.quantized)
    assert (fp8[0], plain[0]) == (27, 17)  # dense, full
    assert (fp8[3], plain[3]) == (1558, 782)  # sparse, shared
    assert (fp8[6], plain[6]) == (1565, 787)  # sparse, full
    assert (fp8[MTP_LAYER], plain[MTP_LAYER]) == (1569, 791)
    indexers = {layer_of(t.name) for t in tensors if ".indexer." in t.name}
    assert indexers == {0, 1, 2, *range(6, 78, 4), MTP_LAYER}


def test_the_modules_that_are_not_in_float8(tensors: list[Tensor]):
    # The kinds and numbers of `modules_to_not_convert` of GLM-5.2-FP8, which calls weights_proj `indexers_proj`.
    modules = [t.name.removesuffix(".weight") for t in tensors if not t.quantized]
    assert len(modules) == 541
    assert Counter(kind(module) for module in modules) == {
        "input_layernorm": 79,
        "post_attention_layernorm": 79,
        "self_attn.q_a_layernorm": 79,
        "self_attn.kv_a_layernorm": 79,
        "mlp.gate": 76,
        "mlp.gate.e_score_correction_bias": 76,
        "self_attn.indexer.weights_proj": 22,
        "self_attn.indexer.k_norm": 22,
        "self_attn.indexer.k_norm.bias": 22,
        "enorm": 1,
        "hnorm": 1,
        "eh_proj": 1,
        "shared_head.norm": 1,
        "model.norm": 1,
        "lm_head": 1,
        "model.embed_tokens": 1,
    }
    own = {"enorm", "hnorm", "eh_proj", "shared_head.norm"}
    assert {layer_of(module) for module in modules if kind(module) in own} == {MTP_LAYER}


def test_the_published_list_of_modules_changes_nothing(tensors: list[Tensor]):
    listed = [t.name.removesuffix(".weight") for t in tensors if not t.quantized]
    listed = [name.replace("indexer.weights_proj", "indexers_proj") for name in listed]
    published = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": listed,
    }
    config = ModelConfig.from_dict(GLM52.to_dict() | {"quantization_config": published})
    assert [t for _, t in published_tensors(config)] == tensors


def test_shapes_of_the_published_scales(tensors: list[Tensor]):
    shapes = {kind(t.name): t.scale_shape((128, 128)) for t in tensors if t.quantized and layer_of(t.name) in (0, 6)}
    assert shapes == {
        "self_attn.q_a_proj.weight": (16, 48),
        "self_attn.q_b_proj.weight": (128, 16),
        "self_attn.kv_a_proj_with_mqa.weight": (5, 48),  # the last block has 64 rows
        "self_attn.kv_b_proj.weight": (224, 4),
        "self_attn.o_proj.weight": (48, 128),
        "self_attn.indexer.wq_b.weight": (32, 16),
        "self_attn.indexer.wk.weight": (1, 48),
        "mlp.gate_proj.weight": (96, 48),
        "mlp.up_proj.weight": (96, 48),
        "mlp.down_proj.weight": (48, 96),
        "mlp.experts.gate_proj.weight": (16, 48),
        "mlp.experts.up_proj.weight": (16, 48),
        "mlp.experts.down_proj.weight": (48, 16),
        "mlp.shared_experts.gate_proj.weight": (16, 48),
        "mlp.shared_experts.up_proj.weight": (16, 48),
        "mlp.shared_experts.down_proj.weight": (48, 16),
    }


def test_the_router_bias_is_float32_in_every_release():
    for config in (GLM52, FP8):
        found = [t for _, t in published_tensors(config) if t.float32]
        assert {kind(t.name) for t in found} == {"mlp.gate.e_score_correction_bias"}
        assert len(found) == 76


def test_stacks_without_a_layer_are_left_out():
    config = dataclasses.replace(
        BUILT_IN["glm-5.2-tiny"],
        num_hidden_layers=2,
        indexer_types=("full",) * 2,
        mlp_layer_types=("dense",) * 2,
        num_nextn_predict_layers=0,
    )
    assert {param.path.split(".")[0] for param in parameters(config)} == {
        "attention",
        "dense",
        "embed",
        "head",
        "indexer",
        "norm",
    }
    assert stack_layers(config, Stack.MOE) == stack_layers(config, Stack.MTP) == ()
    assert stack_layers(config, Stack.LAYER) == stack_layers(config, Stack.INDEXER) == (0, 1)


def test_the_mtp_layer_is_the_last_of_its_stacks():
    for stack in (Stack.LAYER, Stack.INDEXER, Stack.MOE, Stack.MTP):
        assert stack_layers(GLM52, stack)[-1] == MTP_LAYER
    assert MTP_LAYER not in stack_layers(GLM52, Stack.DENSE)
    assert MTP_LAYER not in stack_layers(GLM52.without_mtp(), Stack.LAYER)
